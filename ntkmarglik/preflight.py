"""What can be known before training: sizes, memory, time, and combinations that cannot work."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from .config import Config
from .data import Dataset
from .errors import NtkMarglikError
from .methods import Method, Problem
from .train import hyper_epochs


@dataclass(frozen=True)
class Sizes:
    """The numbers that decide what an estimate costs."""

    n_data: int
    n_outputs: int
    n_parameters: int
    subset: int
    outputs: int

    @property
    def rows(self) -> int:
        return self.subset * self.outputs

    def kernel_bytes(self, rows: int, element: int) -> int:
        """Stored rows and a few square matrices in float64."""
        return element * rows * self.n_parameters + 4 * 8 * rows**2


def check_settings(config: Config) -> None:
    """Refuse what is wrong whatever the data."""
    hyper, training = config.hyperparameters, config.training
    positive = {
        "epochs": training.epochs, "batch_size": training.batch_size, "frequency": training.frequency,
        "lr": training.lr, "prior_precision": hyper.prior_precision, "aug_samples": hyper.aug_samples,
    }  # fmt: skip
    for name, value in positive.items():
        if not value > 0:
            raise NtkMarglikError(f"--{name.replace('_', '-')} must be greater than 0, but is {value}.")
    not_negative = {
        "subset": config.estimator.subset, "outputs": config.estimator.outputs, "n_data": config.problem.n_data,
        "burnin": training.burnin, "prior_steps": training.prior_steps, "aug_steps": training.aug_steps,
    }  # fmt: skip
    for name, value in not_negative.items():
        if value < 0:
            raise NtkMarglikError(
                f"--{name.replace('_', '-')} must not be negative, but is {value}; 0 means all or none."
            )
    if hyper.flip and hyper.augment == "none":
        raise NtkMarglikError("--flip mirrors augmented copies and needs --augment affine.")
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise NtkMarglikError("--device cuda, but torch sees no GPU here; use --device cpu or auto.")


def check_sizes(config: Config, data: Dataset, model: nn.Module) -> Sizes:
    """Refuse blocks that do not fit the data or the memory, naming the nearest choice that does."""
    estimator, classes = config.estimator, data.n_classes
    if estimator.outputs > classes:
        raise NtkMarglikError(
            f"--outputs {estimator.outputs}, but {data.name} has {classes} classes; use --outputs {classes}."
        )
    if estimator.subset > data.n_data:
        raise NtkMarglikError(
            f"--subset {estimator.subset}, but there are {data.n_data} training data; use --subset {data.n_data} (all)."
        )
    sizes = Sizes(
        data.n_data, data.n_classes, sum(p.numel() for p in model.parameters()),
        estimator.subset or data.n_data, estimator.outputs or data.n_classes,
    )  # fmt: skip
    if estimator.method in ("ntk", "map"):
        _check_kernel_memory(config, sizes)
    return sizes


def memory_budget(config: Config) -> float:
    """Bytes that the evidence may use."""
    if config.run.memory_budget:
        return config.run.memory_budget * 1e9
    return psutil.virtual_memory().available / 2


def _check_kernel_memory(config: Config, sizes: Sizes) -> None:
    budget, element = memory_budget(config), 8 if config.run.precision == "float64" else 4
    needed = sizes.kernel_bytes(sizes.rows, element)
    if needed <= budget:
        return
    fitting = sizes.subset
    while fitting > 1 and sizes.kernel_bytes(fitting * sizes.outputs, element) > budget:
        fitting -= max(1, fitting // 50)
    raise NtkMarglikError(
        f"A kernel of {sizes.subset} data points and {sizes.outputs} outputs needs about {needed / 1e9:.1f} GB for "
        f"{sizes.n_parameters:,} weights, and {budget / 1e9:.1f} GB may be used (--memory-budget). "
        f"Use --subset {fitting}, --outputs 1, or --method kfac, which keeps no rows."
    )


def report(config: Config, sizes: Sizes, problem: Problem, method: Method) -> str:
    """Sizes, and estimates of memory and time from one step of each kind; nothing is written."""
    data, training = problem.data, config.training
    index = torch.arange(min(training.batch_size, data.n_data))
    weight_seconds = _seconds(lambda: method.loss(data.x_train[index], data.y_train[index]).backward())
    problem.model.zero_grad()
    rounds = hyper_epochs(training) if method.learns else []
    hyper_seconds = 0.0
    if rounds:
        block = problem.partition()[0]
        x, y = data.x_train[block.index], data.y_train[block.index]
        ml = problem.marginal_likelihood(config.estimator.method)
        parameters = ml.hyperparameters()
        hyper_seconds = _seconds(lambda: torch.autograd.grad(ml(x, y, block=block).total, parameters))
    steps_per_epoch = -(-data.n_data // training.batch_size)
    aug_steps = training.aug_steps if problem.augment is not None else 0
    hyper_steps = len(rounds) * max(training.prior_steps, aug_steps)
    total = training.epochs * steps_per_epoch * weight_seconds + hyper_steps * hyper_seconds
    element = 8 if config.run.precision == "float64" else 4
    tensors = len(list(problem.model.parameters()))
    baseline = " and the weights' time again for the baseline" if config.run.baseline and rounds else ""
    kernel = sizes.kernel_bytes(sizes.rows, element) / 1e6
    lines = [
        f"data        {data.name}: {data.n_data} training, {len(data.y_test)} test, inputs {data.input_shape}, "
        f"{data.n_classes} classes",
        f"model       {config.problem.model}: {sizes.n_parameters:,} parameters in {tensors} tensors",
        f"block       {sizes.subset} data points x {sizes.outputs} outputs = {sizes.rows} rows; "
        f"{len(problem.partition())} blocks in a partition",
        f"memory      about {kernel:.0f} MB for a kernel of these rows; {memory_budget(config) / 1e9:.1f} GB allowed",
        f"weights     {training.epochs} epochs x {steps_per_epoch} steps x {1000 * weight_seconds:.1f} ms",
        f"evidence    {len(rounds)} rounds, {hyper_steps} steps x {1000 * hyper_seconds:.1f} ms",
        f"time        about {total:.0f} s{baseline}",
    ]
    return "\n".join(lines)


def _seconds(function: object) -> float:
    assert callable(function)
    function()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
