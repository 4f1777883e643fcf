"""One run in several processes, started by torchrun: how they meet, what the first does for all.

Every process draws the same random numbers and takes its own part of the work: data points of a
batch, blocks of the evidence. One process alone makes no call of torch.distributed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from ntkmarglik.errors import NtkMarglikError, PassingProblem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from laplace_marglik import Ranks

T = TypeVar("T")
MOST_RANKS = 2**20


def world_size() -> int:
    """Processes that torchrun has started; 1 without it."""
    return _from_torchrun("WORLD_SIZE", default=1, least=1)


def rank() -> int:
    """Number of this process."""
    number = _from_torchrun("RANK")
    if number >= world_size():
        raise NtkMarglikError(
            f"RANK={number}, but WORLD_SIZE={world_size()}: ranks count from 0. torchrun sets both."
        )
    return number


def local_rank() -> int:
    """Number of this process on its machine, and so of its GPU."""
    return _from_torchrun("LOCAL_RANK")


def local_size() -> int:
    """Processes on this machine."""
    return _from_torchrun("LOCAL_WORLD_SIZE", default=1, least=1)


def restarts() -> int:
    """How often `torchrun --max-restarts` has started the processes again, after one of them
    failed.
    """
    return _from_torchrun("TORCHELASTIC_RESTART_COUNT")


def _from_torchrun(name: str, default: int = 0, least: int = 0) -> int:
    """A number that torchrun puts into the environment of its processes."""
    text = os.environ.get(name, str(default))
    if text.isascii() and text.isdecimal() and least <= int(text) <= MOST_RANKS:
        return int(text)
    raise NtkMarglikError(
        f"{name} in the environment must be a number from {least} on, as torchrun sets it, but is "
        f"{text!r}; unset it, or start the program by torchrun."
    )


def refuse_several(program: str) -> None:
    """For programs that would do everything several times, in one folder."""
    if world_size() > 1:
        raise NtkMarglikError(
            f"{program} runs in one process: start it with python instead of torchrun."
        )


@contextlib.contextmanager
def meeting(device: torch.device, seed: int, timeout: float) -> Iterator[Ranks | None]:
    """The ranks of this run, or None for a single process; the backend is that of the device.

    timeout: seconds that a collective may take.
    """
    if world_size() == 1:
        yield None
        return
    import torch
    import torch.distributed as dist

    from laplace_marglik import Ranks

    if device.type == "cuda":
        torch.cuda.set_device(device)
        # a timeout is an error that can be given a name
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    backend = "nccl" if device.type == "cuda" else "gloo"
    wait = timedelta(seconds=timeout)
    # torchrun may keep its store when it starts processes again: they must not find the addresses
    # of those before
    try:
        store, number, size = next(dist.rendezvous("env://", timeout=wait))
        attempt = dist.PrefixStore(f"attempt {restarts()}", store)
        dist.init_process_group(backend, store=attempt, rank=number, world_size=size, timeout=wait)
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise PassingProblem(
            f"The {world_size()} processes cannot meet ({reason}); start them by torchrun, and on "
            "several machines with the same --rdzv-endpoint."
        ) from error
    torch.manual_seed(seed + rank())  # of what a network draws by itself, as dropout does
    ranks = Ranks()
    yield ranks
    # not after an error: the others may not answer
    ranks.barrier("end")  # a rank that leaves early closes connections that others still use
    dist.destroy_process_group()


def leave_others(code: int) -> None:
    """End this process after an error, if it has met others.

    They may be gone: closing the connections to them would end it by a signal (SIGABRT), without
    its exit code.
    """
    dist = sys.modules.get("torch.distributed")  # who has not imported it has met nobody
    if dist is not None and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def by_first(ranks: Ranks | None, compute: Callable[[], T], step: str) -> T:
    """What the first rank computes, for all of them; its errors are those of all."""
    return compute() if ranks is None else ranks.from_first(compute, step)


def refuse_different(ranks: Ranks | None, what: str, fingerprint: str) -> None:
    """Refuse ranks that do not have the same: all of them, before one waits for another in vain."""
    if ranks is None:
        return
    digest = hashlib.sha256(fingerprint.encode()).digest()
    numbers = struct.unpack(">8I", digest)  # as a message of float64 carries them exactly
    if not ranks.agree(numbers, f"comparing the {what}"):
        raise NtkMarglikError(
            f"The processes have different {what}: this one has {fingerprint}. Give all of them "
            "the same files (--data-root)."
        )


def named(ranks: Ranks | None, step: str) -> contextlib.AbstractContextManager[None]:
    """A step of a run; if another rank does not answer in it, the error has its name."""
    return contextlib.nullcontext() if ranks is None else ranks.named(step)


def in_turn(
    compute: Callable[[Tensor], Tensor], batches: Sequence[Tensor], ranks: Ranks | None
) -> Tensor:
    """Results [n, C] of all batches, one after the other; ranks take batches in turn."""
    import torch

    if ranks is None:
        return torch.cat([compute(batch) for batch in batches])
    computed: dict[int, Tensor] = {}
    for number, batch in enumerate(batches):
        if ranks.owns(number):
            computed[number] = compute(batch)
    # a rank without batches learns the number of columns from the others
    columns = max((result.shape[1] for result in computed.values()), default=0)
    columns = int(ranks.largest(columns, "evaluation"))
    results = []
    for number, batch in enumerate(batches):
        zeros = batch.new_zeros(len(batch), columns)
        results.append(computed.get(number, zeros))
    return ranks.sum(torch.cat(results), "evaluation")
