"""From settings to a csv: train or load the network, then evaluate one bound after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from tqdm import tqdm

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.distributed import refuse_several
from ntkmarglik.learn.methods import METHODS, Problem
from ntkmarglik.machine import device as machine
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.problem.data import Dataset, load
from ntkmarglik.programs.classify import preflight
from ntkmarglik.programs.classify.run import prepare, train
from ntkmarglik.programs.grid.bound import Bound, bounds_of, exact_bound
from ntkmarglik.programs.grid.config import CSV, GridConfig, parse
from ntkmarglik.programs.grid.cost import seconds_of, shares_kernel
from ntkmarglik.programs.grid.evaluate import Evaluator, Reference, reference_of, values_of
from ntkmarglik.programs.grid.table import Table, row
from ntkmarglik.runs import checkpoint


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return exit_code(lambda: run(parse(arguments)), "interrupted; the same command continues")


def run(config: GridConfig) -> Path | None:
    """Evaluate every chosen bound that is not in the csv yet; returns the csv."""
    refuse_several(config.script)
    values, run_config = values_of(config.grid), config.run_config()
    if config.grid.blocks < 0:
        raise NtkMarglikError(f"--blocks must be 0 (all) or more, but is {config.grid.blocks}.")
    preflight.check_settings(run_config)
    state = _checkpoint(config) if config.reference.checkpoint is not None else None
    settings = config.problem
    data = load(
        settings.dataset,
        settings.data_root,
        n_data=settings.n_data,
        seed=config.place.seed,
        device=machine.device_of(run_config),
        dtype=machine.dtype_of(run_config),
    )
    bounds = bounds_of(config.grid, data.n_data)
    with machine.threads(config.place.threads or 1):
        if config.place.dry_run:
            _estimate(config, _prepared(config, data, state), bounds, train_too=state is None)
            return None
        problem = _prepared(config, data, state)
        reference = reference_of(problem, config)
        bounds = _fitting(reference, bounds, config)
        path = config.folder / CSV
        table = Table.open(path, _command(problem.config), config)  # before anything is trained
        if state is None:
            method = METHODS.named(run_config.estimator.method)(problem)
            train(problem, method, config.folder / "reference", "reference network")
            reference = reference_of(problem, config)
        path.parent.mkdir(parents=True, exist_ok=True)
        evaluator = Evaluator(reference, config, share=shares_kernel(reference, bounds))
        _fill(table, evaluator, bounds, values, config)
    print(f"{len(table.rows)} rows: {path}")
    return path


def is_complete(config: GridConfig) -> bool:
    """Whether the csv has every chosen bound; a csv of other results is an error.

    False if only the program can tell: the network is that of a checkpoint, or the exact value did
    not fit in memory.
    """
    path = config.folder / CSV
    if config.reference.checkpoint is not None or not path.exists():
        return False
    table, values = Table.open(path, _command(config.run_config()), config), values_of(config.grid)
    if not table.rows:
        return False
    return not any(
        table.missing(bound, values)
        for bound in bounds_of(config.grid, int(table.rows[0]["n_data"]))
    )


def _fill(
    table: Table, evaluator: Evaluator, bounds: list[Bound], values: list[float], config: GridConfig
) -> None:
    """Evaluate what is missing, and save it as soon as it is known."""
    name, data = config.grid.hyperparameter, evaluator.reference.data
    # all values of a prior grid come from the same passes; of another grid, all bounds at a value
    # share a kernel
    units = (
        [(b, values) for b in bounds]
        if name == "prior"
        else [(b, [v]) for v in values for b in bounds]
    )
    with tqdm(
        total=len(bounds) * len(values), unit="value", disable=not sys.stderr.isatty()
    ) as bar:
        for bound, own in units:
            bar.set_description(str(bound))
            missing = table.missing(bound, own)
            if missing:
                used = len(bound.blocks(data, config.place.seed, config.grid.blocks))
                found = evaluator(bound, missing)
                table.add(
                    [
                        row(name, v, bound, e, data.n_data, used)
                        for v, e in zip(missing, found, strict=True)
                    ]
                )
            bar.update(len(own))


def _prepared(config: GridConfig, data: Dataset, state: dict | None) -> Problem:
    """The problem with untrained weights, or with those of a checkpoint."""
    if state is None:
        return prepare(config.run_config(), data)
    known = {name: value for name, value in state["settings"].items() if name in Config().flat()}
    problem = prepare(Config().updated(**{**known, "device": config.place.device}), data)
    problem.model.load_state_dict(state["model"])
    problem.prior.load_state_dict(state["prior"])
    if problem.augment is not None:
        problem.augment.load_state_dict(state["augment"])
    return problem


def _checkpoint(config: GridConfig) -> dict:
    """The state of a finished run whose problem is the one asked for."""
    given = config.reference.checkpoint
    assert given is not None
    path = given / "checkpoint.pt" if given.is_dir() else given
    if not path.exists():
        raise NtkMarglikError(
            f"--checkpoint {given}: there is no {path}; give the folder of a finished run."
        )
    state = checkpoint.load(path)
    settings = state["settings"]
    if state["epoch"] < settings["epochs"]:
        raise NtkMarglikError(
            f"The run in {given} stopped after epoch {state['epoch']} of {settings['epochs']}; "
            "finish it with --resume."
        )
    for name in ("dataset", "n_data", "model", "depth", "width", "seed", "precision"):
        if settings[name] != config.flat()[name]:
            flag = name.replace("_", "-")
            raise NtkMarglikError(
                f"The network of {given} has {flag} {settings[name]}, but {config.flat()[name]} "
                f"is asked for; add --{flag} {settings[name]}."
            )
    return state


def _command(config: Config) -> str:
    """The command that trains the network."""
    defaults, place = Config().flat(), {*Config().free(), "eval_every"}
    return (
        Config().updated(**{**config.flat(), **{name: defaults[name] for name in place}}).command()
    )


def _fitting(reference: Reference, bounds: list[Bound], config: GridConfig) -> list[Bound]:
    """The bounds, without the exact value if its matrices do not fit in memory; others have to
    fit.
    """
    budget, exact = preflight.memory_budget(config.run_config()), exact_bound(reference.data.n_data)
    found = []
    for bound in bounds:
        needed = reference.marginal_likelihood(bound, config.grid.kfac).memory(
            reference.data.x_train[:1], bound.subset
        )
        if needed <= budget:
            found.append(bound)
            continue
        why = (
            f"{bound} needs about {needed / 1e9:.2g} GB, and {budget / 1e9:.2g} GB may be used "
            "(--memory-budget)"
        )
        if bound != exact:
            raise NtkMarglikError(f"{why}; leave S = {bound.subset} out of --subsets.")
        print(f"the exact value is left out: {why}", file=sys.stderr)
    return found


def _estimate(
    config: GridConfig, problem: Problem, bounds: list[Bound], *, train_too: bool
) -> None:
    """Print what would be done and how long it would take."""
    print(
        yaml.safe_dump(
            {k: list(v) if isinstance(v, tuple) else v for k, v in config.flat().items()},
            sort_keys=False,
        )
    )
    if train_too:
        run_config = problem.config
        method = METHODS.named(run_config.estimator.method)(problem)
        print(
            "network:\n"
            + preflight.report(
                run_config, preflight.check_sizes(run_config, problem), problem, method
            )
        )
    reference = reference_of(problem, config)
    bounds = _fitting(reference, bounds, config)
    seconds = seconds_of(reference, bounds, config)
    print(f"\n{'bound':40} {'blocks':>7} {'seconds':>9}")
    for bound, time in zip(bounds, seconds, strict=True):
        blocks = len(bound.blocks(reference.data, config.place.seed, config.grid.blocks))
        print(f"{bound!s:40} {blocks:7} {time:9.1f}")
    print(f"{len(bounds)} bounds at {config.grid.points} values: about {sum(seconds):.0f} s")
