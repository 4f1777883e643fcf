"""What a run runs on: device, number format, threads and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator

import torch

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.distributed import local_rank, world_size
from ntkmarglik.problem.data import Dataset

SMALL_NETWORK = 100_000  # parameters
SMALL_STEP = 1_000_000  # input values in a weight step


def device_of(config: Config) -> torch.device:
    """The device of a run."""
    return device_named(config.run.device)


def device_named(name: str) -> torch.device:
    """The device asked for; for auto a GPU, if there is one; for torchrun, one per process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world_size() > 1:
        return torch.device(name, local_rank())
    return torch.device(name)


def check_device(name: str) -> None:
    """Refuse a GPU where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise NtkMarglikError(
            "--device cuda, but torch sees no GPU here; use --device cpu or auto."
        )


def dtype_of(config: Config) -> torch.dtype:
    """The number format of the network."""
    return {"float32": torch.float32, "float64": torch.float64}[config.run.precision]


def threads_for(config: Config, data: Dataset, n_parameters: int) -> int:
    """The number of CPU threads asked for.

    For 0: one where the work is too small to be shared, else all cores but one.

    Threads wait for each other many times in every step. A second one gains a fifth for a small
    network, half for a larger one, as long as each has a core to itself; with another program on
    one of the cores a step takes up to twenty times as long as with one thread.
    """
    if config.run.threads:
        return config.run.threads
    hyper = config.hyperparameters
    copies = hyper.aug_samples if hyper.augment != "none" else 1
    values = config.training.batch_size * copies * data.x_train[0].numel()
    if n_parameters < SMALL_NETWORK and values < SMALL_STEP:
        return 1
    other_cores = (os.cpu_count() or 1) - 1
    return max(1, min(torch.get_num_threads(), other_cores))


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with this many CPU threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has used at one time."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
