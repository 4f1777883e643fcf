"""From settings to a csv: train or load the network, then evaluate one bound after the other."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import yaml
from tqdm import tqdm

from asdl_marglik import check_weights
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.distributed import refuse_several
from ntkmarglik.learn.methods import METHODS, Problem
from ntkmarglik.machine import device as machine
from ntkmarglik.problem.data import Dataset, load
from ntkmarglik.programs.classify import preflight
from ntkmarglik.programs.classify.run import prepare, train
from ntkmarglik.programs.grid.bound import INDUCING, Bound, bounds_of, exact_bound
from ntkmarglik.programs.grid.config import CSV, GridConfig
from ntkmarglik.programs.grid.cost import seconds_of, shares_kernel
from ntkmarglik.programs.grid.evaluate import (
    Evaluator,
    Reference,
    n_blocks,
    reference_of,
    values_of,
)
from ntkmarglik.programs.grid.table import Table, row
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.folder import check_writable, only_writer
from ntkmarglik.settings import check_values, warn_unused


def run(config: GridConfig) -> Path | None:
    """Evaluate every chosen bound that is not in the csv yet; returns the csv."""
    refuse_several(config.script)
    check(config)
    warn_of_unused(config)
    state = _checkpoint(config) if config.reference.checkpoint is not None else None
    data = _data(config)
    bounds = bounds_of(config.grid, data.n_data)
    with machine.threads(config.place.threads or 1):
        problem = _prepared(config, data, state)
        if config.place.dry_run:
            _estimate(config, problem, bounds, train_too=state is None)
            return None
        reference = reference_of(problem, config)
        bounds = _fitting(reference, bounds, config)
        path = config.folder / CSV
        with only_writer(config.folder):
            check_writable(config.folder)
            table = Table.open(path, _command(problem.config), config)
            table.tell_damage()
            if state is None:
                method = METHODS.named(problem.config.estimator.method)(problem)
                train(problem, method, config.folder / "reference", "reference network")
                reference = reference_of(problem, config)
            evaluator = Evaluator(reference, config, share=shares_kernel(reference, bounds))
            _fill(table, evaluator, bounds, config)
    print(f"{len(table.rows)} rows: {path}")
    return path


def check(config: GridConfig) -> None:
    """Refuse what is wrong whatever the data."""
    check_values(config)
    preflight.check_settings(config.run_config())


def warn_of_unused(config: GridConfig) -> None:
    """Say which of the flags that are given change nothing with the chosen bounds and network."""
    grid = config.grid
    ignored = set()
    if INDUCING not in grid.partitions:
        ignored.add("inducing")
    if "kfac" not in grid.structures:
        ignored.add("kfac")
    if "single" not in grid.outputs:
        ignored |= {"columns", "roots"}
    if grid.hyperparameter == "prior":
        ignored |= {"aug_samples", "aug_init", "aug_steps", "lr_aug", "lr_aug_min"}
    if config.reference.checkpoint is not None:
        ignored |= {"train_method", "train_subset", "train_outputs", "prior_precision", "aug_init"}
        ignored |= {setting.name for setting in fields(config.training)}
    warn_unused(config, ignored, "these bounds and this network")


def _data(config: GridConfig) -> Dataset:
    settings = config.problem
    run_config = config.run_config()
    return load(
        settings.dataset,
        settings.data_root,
        n_data=settings.n_data,
        seed=config.place.seed,
        device=machine.device_of(run_config),
        dtype=machine.dtype_of(run_config),
    )


def is_complete(config: GridConfig) -> bool | None:
    """Whether the csv has every chosen bound; a csv of other results is an error.

    None if only the program can tell: the network is that of a checkpoint, or all that is missing
    is the exact value, which may not fit in memory.
    """
    path = config.folder / CSV
    if not path.exists():
        return False
    if config.reference.checkpoint is not None:
        return None
    table = Table.open(path, _command(config.run_config()), config)
    if not table.rows:
        return False
    values = values_of(config.grid)
    n_data = int(table.rows[0]["n_data"])
    bounds = bounds_of(config.grid, n_data)
    missing = [bound for bound in bounds if table.missing(bound, values)]
    return None if missing == [exact_bound(n_data)] else not missing


def _fill(table: Table, evaluator: Evaluator, bounds: list[Bound], config: GridConfig) -> None:
    """Evaluate what is missing, and save it as soon as it is known."""
    hyperparameter = config.grid.hyperparameter
    data = evaluator.reference.data
    total = len(bounds) * config.grid.points
    with tqdm(total=total, unit="value", disable=not sys.stderr.isatty()) as bar:
        for bound, values in _portions(bounds, config):
            bar.set_description(str(bound))
            missing = table.missing(bound, values)
            if missing:
                used = n_blocks(bound, data, config)
                rows = []
                for value, evidence in zip(missing, evaluator(bound, missing), strict=True):
                    rows.append(row(hyperparameter, value, bound, evidence, data.n_data, used))
                table.add(rows)
            bar.update(len(values))


def _portions(bounds: list[Bound], config: GridConfig) -> list[tuple[Bound, list[float]]]:
    """The bounds and values that are evaluated at once, in the order that shares the most work."""
    values = values_of(config.grid)
    if config.grid.hyperparameter == "prior":  # all values come from the same passes
        return [(bound, values) for bound in bounds]
    # all bounds at a value share a kernel
    return [(bound, [value]) for value in values for bound in bounds]


def _prepared(config: GridConfig, data: Dataset, state: dict | None) -> Problem:
    """The problem with untrained weights, or with those of a checkpoint."""
    if state is None:
        return prepare(config.run_config(), data)
    defaults = Config()
    names = defaults.flat()
    known = {name: value for name, value in state["settings"].items() if name in names}
    run_config = defaults.updated(**known).updated(device=config.place.device)
    problem = prepare(run_config, data)
    try:
        problem.model.load_state_dict(state["model"])
        problem.prior.load_state_dict(state["prior"])
        if problem.augment is not None:
            problem.augment.load_state_dict(state["augment"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise NtkMarglikError(
            f"The weights in --checkpoint {config.reference.checkpoint} are not those of its "
            f"network ({reason})."
        ) from error
    check_weights(problem.model)
    return problem


def _checkpoint(config: GridConfig) -> dict:
    """The state of a finished run whose problem is the one asked for."""
    source = config.reference.checkpoint
    assert source is not None
    path = source / "checkpoint.pt" if source.is_dir() else source
    if not path.exists():
        raise NtkMarglikError(
            f"--checkpoint {source}: there is no {path}; give the folder of a finished run."
        )
    state = checkpoint.load(path)
    lacking = {"settings", "epoch", "model", "prior", "augment"} - state.keys()
    if lacking or not isinstance(state["settings"], dict):
        raise NtkMarglikError(
            f"--checkpoint {source}: {path} is not a checkpoint of classification_image.py "
            f"(it has no {', '.join(sorted(lacking)) or 'settings'})."
        )
    settings = {**Config().flat(), **state["settings"]}
    if state["epoch"] < settings["epochs"]:
        raise NtkMarglikError(
            f"The run in {source} stopped after epoch {state['epoch']} of {settings['epochs']}; "
            "finish it with --resume."
        )
    if settings["temperature"] != 1 or settings["learn_temperature"]:
        raise NtkMarglikError(
            f"The network of {source} was trained at another --temperature than 1, at which bounds "
            "are evaluated; use one of temperature 1."
        )
    asked = config.flat()
    for name in ("dataset", "n_data", "model", "depth", "width", "seed", "precision"):
        if settings[name] != asked[name]:
            flag = name.replace("_", "-")
            raise NtkMarglikError(
                f"The network of {source} has {flag} {settings[name]}, but {asked[name]} is asked "
                f"for; add --{flag} {settings[name]}."
            )
    return state


def _command(config: Config) -> str:
    """The command that trains the network."""
    defaults = Config()
    values = defaults.flat()
    place = {*defaults.free(), "eval_every"}
    portable = config.updated(**{name: values[name] for name in place})
    return portable.command()


def _fitting(reference: Reference, bounds: list[Bound], config: GridConfig) -> list[Bound]:
    """The bounds, without the exact value if its matrices do not fit in memory; others have to
    fit.
    """
    budget = preflight.memory_budget(config.run_config())
    exact = exact_bound(reference.data.n_data)
    example = reference.data.x_train[:1]
    fitting = []
    for bound in bounds:
        ml = reference.marginal_likelihood(bound, config.grid.kfac)
        needed = ml.memory(example, bound.subset)
        if needed <= budget:
            fitting.append(bound)
            continue
        why = (
            f"{bound} needs about {needed / 1e9:.2g} GB, and {budget / 1e9:.2g} GB may be used "
            "(--memory-budget)"
        )
        if bound != exact:
            raise NtkMarglikError(f"{why}; leave S = {bound.subset} out of --subsets.")
        print(f"the exact value is left out: {why}", file=sys.stderr)
    return fitting


def _estimate(
    config: GridConfig, problem: Problem, bounds: list[Bound], *, train_too: bool
) -> None:
    """Print what would be done and how long it would take."""
    settings = config.flat()
    for name, value in settings.items():
        settings[name] = list(value) if isinstance(value, tuple) else value
    print(yaml.safe_dump(settings, sort_keys=False))
    if train_too:
        run_config = problem.config
        method = METHODS.named(run_config.estimator.method)(problem)
        sizes = preflight.check_sizes(run_config, problem)
        print("network:")
        print(preflight.report(run_config, sizes, problem, method))
    reference = reference_of(problem, config)
    bounds = _fitting(reference, bounds, config)
    seconds = seconds_of(reference, bounds, config)
    print(f"\n{'bound':40} {'blocks':>7} {'seconds':>9}")
    for bound, time in zip(bounds, seconds, strict=True):
        blocks = n_blocks(bound, reference.data, config)
        print(f"{bound!s:40} {blocks:7} {time:9.1f}")
    print(f"{len(bounds)} bounds at {config.grid.points} values: about {sum(seconds):.0f} s")
