"""What can be known before training: sizes, memory, time, and combinations that cannot work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from asdl_marglik import STRUCTURES, blocks_of, free_memory
from laplace_marglik import InducingPartition
from laplace_marglik.evidence.gradient_rows import is_gradient
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config, Estimator
from ntkmarglik.learn.distributed import local_size, rank
from ntkmarglik.learn.methods import METHODS, Method, Problem
from ntkmarglik.learn.schedule import hyper_epochs
from ntkmarglik.machine.device import check_device, device_of, dtype_of
from ntkmarglik.machine.speed import Speed, seconds
from ntkmarglik.problem.data import Dataset, check_dataset
from ntkmarglik.problem.models import check_uses, n_parameters
from ntkmarglik.settings import check_values, warn_unused

FEW = 32  # data points of a first timing
PATIENCE = 2.0  # seconds that a timing may take
# without an augmentation these change nothing
OF_AUGMENTATION = frozenset({"aug_samples", "aug_init", "aug_steps", "lr_aug", "lr_aug_min"})
WITH_GRADIENT = 3  # times the algebra of a value: an inverse and products with it besides


@dataclass(frozen=True)
class Sizes:
    """The numbers that decide what an estimate costs."""

    structure: str
    modules: tuple[int, ...]  # parameters of each module, or block of weights
    subset: int
    outputs: int

    @property
    def rows(self) -> int:
        return self.subset * self.outputs

    @property
    def n_parameters(self) -> int:
        return sum(self.modules)


def check_settings(config: Config) -> None:
    """Refuse what is wrong whatever the data."""
    check_values(config)
    check_dataset(config.problem.dataset)
    check_uses(config.problem.model, depth=config.problem.depth, width=config.problem.width)
    if config.hyperparameters.flip and config.hyperparameters.augment == "none":
        raise NtkMarglikError("--flip mirrors augmented copies and needs --augment affine.")
    check_device(config.run.device)
    _check_root(config)
    _check_method(config)


def warn_of_unused(config: Config) -> None:
    """Say which flags change nothing with this method or augmentation, or nothing for the good."""
    method = METHODS.named(config.estimator.method)
    names = set().union(*(METHODS[name].uses(config) for name in METHODS))
    ignored = names - method.uses(config)
    augment = config.hyperparameters.augment
    if augment == "none":
        ignored |= OF_AUGMENTATION
    warn_unused(config, ignored, f"--method {method.name} and --augment {augment}")
    if config.hyperparameters.learn_temperature and "learn_temperature" not in ignored:
        print(
            "warning: --learn-temperature: the evidence only grows with the temperature, at which "
            "data count less and less; see docs/bounds.md",
            file=sys.stderr,
        )


def _check_root(config: Config) -> None:
    """Refuse what the rows of the chosen root cannot be combined with."""
    estimator = config.estimator
    if estimator.root_samples > 1 and estimator.root != "sampled":
        raise NtkMarglikError(
            f"--root-samples {estimator.root_samples} are labels drawn for --root sampled, but "
            f"--root is {estimator.root}."
        )
    if is_gradient(estimator.root) and (
        estimator.outputs not in (0, 1) or estimator.columns != "shared"
    ):
        raise NtkMarglikError(
            f"--root {estimator.root} has one row for each log-likelihood and no outputs to "
            "choose from: leave out --outputs and --columns."
        )


def _check_method(config: Config) -> None:
    """Refuse what the method cannot work with."""
    estimator, training = config.estimator, config.training
    method = METHODS.named(estimator.method)
    method.check(config)
    if estimator.aug_block and (estimator.subset or not method.sums_over_data):
        additive = [name for name, structure in STRUCTURES.items() if structure.additive]
        raise NtkMarglikError(
            f"--aug-block is for estimators of all data: --method {' or '.join(additive)} with "
            "--subset 0."
        )
    if method.learns_in_rounds() and not hyper_epochs(training):
        raise NtkMarglikError(
            f"--epochs {training.epochs} has no epoch for hyperparameter steps: they come every "
            f"{training.frequency} epochs from epoch {training.burnin} on (--frequency, "
            "--burnin). Use --burnin 1 --frequency 1, or --method map to learn none."
        )


def check_network(config: Config, data: Dataset) -> None:
    """Refuse a network, or a training step, that no memory holds, before it is made."""
    settings = config.problem
    element = torch.empty(0, dtype=dtype_of(config)).element_size()
    free = free_memory(device_of(config)) / local_size()
    weights = n_parameters(
        settings.model,
        data.input_shape,
        data.n_classes,
        depth=settings.depth,
        width=settings.width,
    )
    # with their gradients and two moments of an optimiser
    if 4 * weights * element > free:
        raise NtkMarglikError(
            f"--model {settings.model} of --depth {settings.depth} and --width {settings.width} "
            f"has {weights:.2g} weights, which take {4 * weights * element / 1e9:.2g} GB in "
            f"training, and {free / 1e9:.2g} GB are free. Use a smaller one."
        )
    hyper = config.hyperparameters
    batch = min(config.training.batch_size, data.n_data)
    copies = hyper.aug_samples if hyper.augment != "none" else 1
    inputs = batch * copies * data.x_train[0].numel() * element
    if inputs > free:
        raise NtkMarglikError(
            f"A batch of {batch} inputs in {copies} copies takes {inputs / 1e9:.2g} GB, and "
            f"{free / 1e9:.2g} GB are free. Use a smaller --batch-size or --aug-samples."
        )


def fitted(problem: Problem, given: Collection[str] | None) -> Problem:
    """The problem with blocks of all data where the default is larger, or where none are used.

    given: settings that were asked for, which stay as they are; None for all.
    """
    config = problem.config
    subset = config.estimator.subset
    most, things = _largest_subset(problem)
    used = "subset" in METHODS.named(config.estimator.method).uses(config)
    asked_for = given is None or "subset" in given
    if subset <= most or (used and asked_for):
        return problem
    if used and rank() == 0:
        print(
            f"note: the default --subset {subset} is more than the {most} {things}; all of them "
            f"are in a block (--subset {most})",
            file=sys.stderr,
        )
    return replace(problem, config=config.updated(subset=most))


def _largest_subset(problem: Problem) -> tuple[int, str]:
    """How many there are of what --subset counts, and what that is."""
    n = problem.data.n_data
    if problem.config.estimator.inducing:
        return n * problem.n_columns, "rows of the training data"
    return n, "training data"


def check_sizes(config: Config, problem: Problem) -> Sizes:
    """Refuse blocks that do not fit the data or the memory, naming the nearest choice that does."""
    estimator, data = config.estimator, problem.data
    method = METHODS.named(estimator.method)
    if estimator.outputs > data.n_classes:
        raise NtkMarglikError(
            f"--outputs {estimator.outputs}, but {data.name} has {data.n_classes} classes; use "
            f"--outputs {data.n_classes}."
        )
    most, things = _largest_subset(problem)
    if estimator.subset > most and "subset" in method.uses(config):
        raise NtkMarglikError(
            f"--subset {estimator.subset}, but there are {most} {things}; use --subset {most} "
            "(all)."
        )
    _check_aug_blocks(estimator, data.n_data)
    weights = dict(problem.model.named_parameters())
    blocks = blocks_of(weights, estimator.weight_blocks).values()
    sizes = Sizes(
        # a baseline is measured by blocks also where the method itself is not
        structure=method.structure if method.structure in STRUCTURES else Method.structure,
        modules=tuple(sum(weights[name].numel() for name in block) for block in blocks),
        subset=estimator.subset or data.n_data,
        outputs=problem.rows_per_datum,
    )
    if method.memory(problem) is not None:
        method.check_memory(problem, memory_budget(config))
    elif config.run.baseline or method.measures_by == "blocks":
        _check_memory(config, sizes, problem)
    return sizes


def _check_aug_blocks(estimator: Estimator, n_data: int) -> None:
    """Refuse to sum gradients of the augmentation over more blocks than there are."""
    if estimator.aug_blocks > 1 and not estimator.aug_block:
        raise NtkMarglikError(
            f"--aug-blocks {estimator.aug_blocks} sums gradients over blocks, whose size is "
            "--aug-block: give one above 0, or leave --aug-blocks out for the gradient of all data."
        )
    blocks = -(-n_data // (estimator.aug_block or n_data))
    if estimator.aug_blocks > blocks:
        raise NtkMarglikError(
            f"--aug-blocks {estimator.aug_blocks}, but {n_data} training data are {blocks} blocks "
            f"of --aug-block {estimator.aug_block}; use --aug-blocks {blocks} (all)."
        )


def memory_budget(config: Config) -> float:
    """Bytes that the evidence may use; by default half of what is free, of which each process on
    this machine has its share, while a GPU is one process's own.
    """
    if config.run.memory_budget:
        return config.run.memory_budget * 1e9
    device = device_of(config)
    sharers = local_size() if device.type == "cpu" else 1
    return free_memory(device) / sharers / 2


def _check_memory(config: Config, sizes: Sizes, problem: Problem) -> None:
    budget = memory_budget(config)

    def needed(**changes: Any) -> int:
        return evidence_bytes(replace(sizes, **changes), problem)

    if needed() <= budget:
        return
    choices = (
        [f"--subset {fitting}"]
        if (fitting := _largest(lambda n: needed(subset=n) <= budget, sizes.subset))
        else []
    )
    if sizes.outputs > 1 and needed(outputs=1) <= budget:
        choices.append("--outputs 1")
    if sizes.structure != "kfac" and needed(structure="kfac") <= budget:
        choices.append("--method kfac")
    raise NtkMarglikError(
        f"The {sizes.structure} curvature of {sizes.subset} data points and {sizes.outputs} "
        f"outputs needs about {needed() / 1e9:.2g} GB for {sizes.n_parameters:,} weights, and "
        f"{budget / 1e9:.2g} GB may be used (--memory-budget). "
        + (
            f"Use {' or '.join(choices)}."
            if choices
            else "Nothing smaller fits: raise --memory-budget."
        )
    )


def evidence_bytes(sizes: Sizes, problem: Problem) -> int:
    """Memory of the estimate of a block and its gradient."""
    ml = problem.marginal_likelihood(sizes.structure)
    ml.outputs = sizes.outputs
    return ml.memory(problem.data.x_train[:1], sizes.subset)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if what fits is smaller than what does not; 0 if
    none does.
    """
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        low, most = (middle, most) if fits(middle) else (low, middle - 1)
    return low


def report(config: Config, sizes: Sizes, problem: Problem, method: Method) -> str:
    """Sizes, and estimates of memory and time from one step of each kind; nothing is written."""
    data, training = problem.data, config.training
    index = torch.arange(min(training.batch_size, data.n_data))
    weight_seconds = seconds(
        lambda: method.loss(data.x_train[index], data.y_train[index]).backward(), PATIENCE
    )
    problem.model.zero_grad()
    steps_per_epoch = -(-data.n_data // training.batch_size)
    total = training.epochs * steps_per_epoch * weight_seconds
    weights = f"{training.epochs} epochs x {steps_per_epoch} steps x {1000 * weight_seconds:.1f} ms"
    evidence, evidence_seconds = _evidence_cost(config, sizes, problem, method)
    total += evidence_seconds
    if method.learns() and config.run.baseline:
        copies = 1 if problem.augment is None else config.hyperparameters.aug_samples
        total += training.epochs * steps_per_epoch * weight_seconds / copies
    own_memory = method.memory(problem)
    needed = evidence_bytes(sizes, problem) if own_memory is None else own_memory
    allowed = memory_budget(config)
    lines = [
        f"data        {data.name}: {data.n_data} training, {len(data.y_test)} test, inputs "
        f"{data.input_shape}, {data.n_classes} classes",
        f"model       {config.problem.model}: {sizes.n_parameters:,} parameters in "
        f"{len(list(problem.model.parameters()))} tensors",
        f"block       {_block(sizes, problem)}",
        f"memory      about {needed / 1e6:.0f} MB for the curvature of a block; "
        f"{allowed / 1e9:.1f} GB allowed",
        f"threads     {torch.get_num_threads()}",
        f"weights     {weights}",
        f"evidence    {evidence}",
        f"time        about {total:.0f} s in all"
        + (", baseline included" if config.run.baseline else ""),
    ]
    return "\n".join(lines)


def _block(sizes: Sizes, problem: Problem) -> str:
    """The size of a block in words."""
    partition = problem.partition()
    if isinstance(partition, InducingPartition):
        return (
            f"{sizes.subset} of {partition.n_rows} rows, {partition.n_inducing} of them inducing; "
            f"the others count {partition.sample_weight:.0f} times"
        )
    things = "gradients" if is_gradient(problem.config.estimator.root) else "outputs"
    return (
        f"{sizes.subset} data points x {sizes.outputs} {things} = {sizes.rows} rows; "
        f"{len(partition)} blocks in a partition"
    )


def _evidence_cost(
    config: Config, sizes: Sizes, problem: Problem, method: Method
) -> tuple[str, float]:
    """What learning by the evidence takes in all, in words and in seconds."""
    rounds = len(hyper_epochs(config.training))
    round_seconds = method.round_seconds()
    if round_seconds is not None:
        return f"{rounds} rounds x at most {round_seconds:.1f} s", rounds * round_seconds
    if method.learns_by != "evidence":
        return "none", 0.0
    steps, each = _steps_per_round(config, problem), _evidence_seconds(sizes, problem, method)
    return f"{rounds} rounds x {steps} estimates x {1000 * each:.1f} ms", rounds * steps * each


def _steps_per_round(config: Config, problem: Problem) -> int:
    """Curvatures computed in a round: one a step; on all data, the prior takes its steps on one."""
    training = config.training
    aug_steps = training.aug_steps if problem.augment is not None else 0
    if config.estimator.aug_block:
        # the pass over all data and its blocks' second passes, in units of two passes over all data
        share = config.estimator.aug_blocks * config.estimator.aug_block / problem.data.n_data
        return 1 + round(aug_steps * share)
    prior_steps = max(0, training.prior_steps - aug_steps)
    if problem.full_batch:
        return aug_steps + (prior_steps > 0)
    return aug_steps + -(-prior_steps // training.steps_per_block)


def _evidence_seconds(sizes: Sizes, problem: Problem, method: Method) -> float:
    """Time of one estimate and its gradient: of a whole block if that is quick, else extrapolated
    from a few data.
    """
    data, block = problem.data, problem.partition().sample()
    ml = problem.marginal_likelihood(method.structure)
    # a row of a conditioned block costs as much as a datum with one column
    of_data = block.index if block.rows is None else block.index[block.rows[:, 0]]

    drawn = is_gradient(ml.root)  # then there are no columns to give

    def estimate(points: int) -> float:
        index = of_data[:points]
        columns = None if drawn else block.columns[:points]
        x, y = data.x_train[index], data.y_train[index]
        return seconds(
            lambda: torch.autograd.grad(ml(x, y, columns).total, ml.hyperparameters()), PATIENCE
        )

    points = min(FEW, sizes.subset)
    algebra = Speed.measured(data.x_train, torch.linalg.cholesky).algebra(
        sizes.structure, sizes.rows, sizes.modules
    )
    whole = estimate(points) * sizes.subset / points + WITH_GRADIENT * algebra
    return estimate(sizes.subset) if whole < PATIENCE else whole
