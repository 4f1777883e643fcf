"""Rows of tables and figures, per run or evaluated epoch, from run folders or csv files."""

from __future__ import annotations

import csv
import itertools
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ntkmarglik.learn.config import Config
from ntkmarglik.programs.grid.config import CSV as GRID_CSV
from ntkmarglik.programs.paper.experiments import label_of
from ntkmarglik.runs.folder import read_config, read_summary
from ntkmarglik.runs.metrics import read_metrics

Row = dict[str, Any]
IDENTITY = ("dataset", "model", "n_data", "estimator", "augment", "seed")
RUN_COLUMNS = (
    *IDENTITY,
    "test_accuracy",
    "test_log_likelihood",
    "test_ece",
    "train_log_likelihood",
    "log_marglik",
    "log_marglik_status",
    "seconds_weights",
    "seconds_hyper",
    "seconds_round",
    "command",
)
TRACE_COLUMNS = (
    *IDENTITY,
    "epoch",
    "log_marglik",
    "test_log_likelihood",
    "test_accuracy",
    "command",
)


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Finished runs: the given folders, the runs one level below, and the baselines of both."""
    candidates: list[Path] = []
    for path in paths:
        below = sorted(folder for folder in path.glob("*") if folder.name != "baseline")
        for folder in (path, *below):
            candidates.append(folder)
            candidates.append(folder / "baseline")
    return [folder for folder in candidates if read_summary(folder) is not None]


def of_the_runner(settings: Row) -> bool:
    """Whether settings are of classification_image.py; fine-tuning has rows of its own."""
    return "checkpoint" not in settings


def config_of(folder: Path) -> Config:
    """The settings of a run without where it ran, which is not part of what it is."""
    settings = read_config(folder)
    defaults = Config()
    values = defaults.flat()
    known = {name: value for name, value in settings.items() if name in values}
    place = defaults.free() - {"baseline"}
    elsewhere = {name: values[name] for name in place}
    elsewhere["data_root"] = defaults.problem.data_root
    return defaults.updated(**{**known, **elsewhere})


def run_row(folder: Path) -> Row:
    """The summary of one run, with the command that made it."""
    config = config_of(folder)
    return {
        **(read_summary(folder) or {}),
        "estimator": label_of(config),
        "augment": config.hyperparameters.augment,
        "seconds_round": seconds_of_a_round(folder),
        "command": config.command(),
    }


def trace_rows(folder: Path) -> list[Row]:
    """Evidence, as last estimated, and test metrics of every evaluation; the command first."""
    run = run_row(folder)
    identity = {name: run[name] for name in IDENTITY}
    evidence = None
    rows: list[Row] = []
    for metrics in read_metrics(folder):
        evidence = metrics.get("log_marglik", evidence)
        if "test_log_likelihood" in metrics:
            row = {
                **identity,
                "epoch": metrics["epoch"],
                "test_log_likelihood": metrics["test_log_likelihood"],
                "test_accuracy": metrics["test_accuracy"],
                "log_marglik": evidence,
                "command": "" if rows else run["command"],
            }
            rows.append(row)
    return rows


def seconds_of_a_round(folder: Path) -> float | None:
    """Median time of a round of hyperparameter steps but the first, which plans; None without."""
    totals = [m["seconds_hyper"] for m in read_metrics(folder) if "log_marglik" in m]
    rounds = [later - earlier for earlier, later in itertools.pairwise(totals)]
    return statistics.median(rounds) if any(rounds) else None


def write(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Rows as csv; numbers with as many digits as a figure can show."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def collect(runs: Path, target: Path, *, keep: bool = False) -> None:
    """Write runs_bound_prior.csv and traces_bound_prior.csv of `runs/bound-prior`, and so on.

    A bound grid, `runs/bound-grid-prior`, already has its csv: bound_grid_prior.csv.

    Args:
        runs: has a folder of runs per experiment.
        target: folder of the csv files.
        keep: rows of runs that are in a csv file and not in `runs` stay there.
    """
    target.mkdir(parents=True, exist_ok=True)
    for experiment in sorted(path for path in runs.glob("*") if path.is_dir()):
        name = experiment.name.replace("-", "_")
        if (experiment / GRID_CSV).exists():
            shutil.copy(experiment / GRID_CSV, target / f"{name}.csv")
            continue
        folders = [f for f in run_folders([experiment]) if of_the_runner(read_config(f))]
        if folders and read_summary(experiment) is None:
            traces = [row for folder in folders for row in trace_rows(folder)]
            for path, columns, rows in (
                (target / f"runs_{name}.csv", RUN_COLUMNS, [run_row(f) for f in folders]),
                (target / f"traces_{name}.csv", TRACE_COLUMNS, traces),
            ):
                write(path, columns, _with_others(path, rows) if keep else rows)


def _with_others(path: Path, rows: list[Row]) -> list[Row]:
    """Rows, and those of other runs that a csv file has; in the order of the runs' names."""

    def name(row: Row) -> str:
        label = str(row["estimator"]).replace(" ", "-")
        return f"{row['dataset']}-{row['n_data']}-{label}-seed{row['seed']}-{row['augment']}"

    new = {name(row) for row in rows}
    others = [row for row in read(path) if name(row) not in new] if path.exists() else []
    return sorted([*others, *rows], key=name)


def read(path: Path) -> list[Row]:
    """The rows of a csv file, as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows with equal values in the named columns together, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def values(rows: Iterable[Row], name: str) -> list[float]:
    """The numbers of a column; empty cells are left out."""
    return [float(row[name]) for row in rows if row.get(name) not in (None, "")]


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float | None]:
    """Mean over seeds and its standard error; None for a single seed."""
    mean = statistics.mean(numbers)
    if len(numbers) == 1:
        return mean, None
    return mean, statistics.stdev(numbers) / len(numbers) ** 0.5


def as_text(numbers: Sequence[float], digits: int) -> str:
    """Mean ± standard error."""
    if not numbers:
        return "-"
    mean, error = mean_and_error(numbers)
    text = f"{mean:.{digits}f}"
    if error is None:
        return text
    return f"{text} ± {error:.{digits}f}"
