"""From a configuration to a finished run: prepare, train, evaluate, save, show."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml

from laplace_marglik import Categorical, GaussianPrior, Ranks
from ntkmarglik.learn.distributed import by_first, meeting, rank, refuse_different, restarts
from ntkmarglik.learn.methods import METHODS, Method, Problem
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.train import Trainer
from ntkmarglik.machine import device as machine
from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.problem.data import Dataset, load
from ntkmarglik.problem.models import build
from ntkmarglik.programs.classify import preflight
from ntkmarglik.programs.classify.config import Config
from ntkmarglik.runs.folder import folder_of, name_of, only_writer
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.resumable import check_written, how_to_continue, resumable_run
from ntkmarglik.runs.summary import summarise

if TYPE_CHECKING:
    from ntkmarglik.runs.report import Runs

# added to the seed (of which torch uses 32 bits): blocks are drawn independently of batches
EVIDENCE_SEED = 2**31


def run(config: Config, given: Collection[str] | None = None) -> Runs:
    """Train the configured method (and the MAP baseline), and show the comparison.

    given: settings that were asked for, where the others are defaults and may follow the data; None
    for all.
    """
    preflight.check_settings(config)
    if rank() == 0:
        preflight.warn_of_unused(config)
    if config.run.dry_run:
        return _dry_run(config, given) if rank() == 0 else {}
    config = config.updated(resume=config.run.resume or restarts() > 0)
    device = machine.device_of(config)
    with meeting(device, config.run.seed, config.run.collective_timeout) as ranks:
        if ranks is not None:  # the data may have to be downloaded
            ranks.from_first(lambda: _data(config) and None, "loading the data")
        data = _data(config)
        refuse_different(ranks, "data", data.fingerprint)
        problem = preflight.fitted(prepare(config, data, ranks), given)
        config = problem.config
        sizes = preflight.check_sizes(config, problem)
        with machine.threads(machine.threads_for(config, data, sizes.n_parameters)):
            method = METHODS.named(config.estimator.method)(problem)
            path = by_first(ranks, lambda: folder_of(config), "choice of a folder")
            with only_writer(path) if rank() == 0 else nullcontext():
                with how_to_continue(path):
                    runs = _runs(problem, method, path)
                if rank() == 0:
                    _show(runs, problem, path)
                    check_written((summary for _, summary in runs.values()), path)
    return runs


def _show(runs: Runs, problem: Problem, path: Path) -> None:
    """The table on the terminal, the figure and the page in the run folder."""
    # need matplotlib and bokeh, which take a second
    from ntkmarglik.programs.classify.pictures import draw
    from ntkmarglik.runs import report

    ranges = next(iter(runs.values()))[1]["augmentation"]
    if isinstance(problem.augment, AffineAugmentation):  # a finished run was not trained here
        problem.augment.eta.data.copy_(torch.tensor(ranges))
    report.show(runs)
    draw(runs, problem, path)
    print(f"run folder: {path}")


def _dry_run(config: Config, given: Collection[str] | None) -> Runs:
    """What a run would take, measured in one process."""
    data = _data(config)
    problem = preflight.fitted(prepare(config, data), given)
    config = problem.config
    sizes = preflight.check_sizes(config, problem)
    with machine.threads(machine.threads_for(config, data, sizes.n_parameters)):
        method = METHODS.named(config.estimator.method)(problem)
        print(yaml.safe_dump(config.flat(), sort_keys=False))
        print(preflight.report(config, sizes, problem, method))
    return {}


def _data(config: Config) -> Dataset:
    settings = config.problem
    return load(
        settings.dataset,
        settings.data_root,
        n_data=settings.n_data,
        seed=config.run.seed,
        device=machine.device_of(config),
        dtype=machine.dtype_of(config),
    )


def _runs(problem: Problem, method: Method, path: Path) -> Runs:
    """The configured run and, if it learns hyperparameters, the same without."""
    label = name_of(problem.config)
    runs = {label: train(problem, method, path, label)}
    if problem.config.run.baseline and method.learns():
        fixed = prepare(baseline_of(problem.config), problem.data, problem.ranks)
        runs["MAP baseline"] = train(
            fixed, method.baseline(fixed), path / "baseline", "MAP baseline"
        )
    return runs


def baseline_of(config: Config) -> Config:
    """The same settings with a fixed prior, and without the augmentation that is learned."""
    # the evidence is measured with the same blocks
    fixed = replace(config, estimator=replace(config.estimator, method=Map.name))
    fixed = fixed.updated(learn_temperature=False)
    if config.hyperparameters.flip:  # the mirror images stay
        return fixed.updated(aug_init=0.0)
    return fixed.updated(augment="none")


def prepare(config: Config, data: Dataset, ranks: Ranks | None = None) -> Problem:
    """Network, prior and augmentation of a configuration, all drawn from its seed."""
    preflight.check_network(config, data)
    device = machine.device_of(config)
    dtype = machine.dtype_of(config)
    settings = config.problem
    hyper = config.hyperparameters
    model = build(
        settings.model,
        data.input_shape,
        data.n_classes,
        depth=settings.depth,
        width=settings.width,
        seed=config.run.seed,
    ).to(device, dtype)
    prior = GaussianPrior(model, hyper.prior, hyper.prior_precision)
    augment = None
    if hyper.augment == "affine":
        augment = AffineAugmentation(hyper.aug_samples, flip=hyper.flip, init=hyper.aug_init)
        augment.to(device, dtype)
    generator = torch.Generator().manual_seed(EVIDENCE_SEED + config.run.seed)
    learnable = METHODS.named(config.estimator.method).uses(config)
    learn = hyper.learn_temperature and "learn_temperature" in learnable
    likelihood = Categorical(hyper.temperature, learn_temperature=learn).to(device)
    return Problem(config, data, model, prior, augment, generator, ranks, likelihood)


def train(
    problem: Problem, method: Method, path: Path, label: str
) -> tuple[list[Metrics], Metrics]:
    """One run from its start (or its checkpoint) to its summary; a finished one is read from its
    folder.
    """
    trainer = Trainer(problem, method)
    resume = problem.config.run.resume
    return resumable_run(trainer, summarise, path, resume=resume, label=label)
