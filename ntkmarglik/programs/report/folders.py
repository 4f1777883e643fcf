"""Runs as their folders tell them, those included that were interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.problem.data import load
from ntkmarglik.runs.folder import CONFIG, name_of, read_config, read_summary
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.metrics import read_metrics
from ntkmarglik.runs.page import Page
from ntkmarglik.runs.page.samples import EXAMPLES, samples
from ntkmarglik.runs.records import config_of, of_the_runner
from ntkmarglik.runs.report import Runs

BASELINE = "MAP baseline"


def page_of(folders: list[Path]) -> Page:
    """The page of one run with its baseline, or of several runs without theirs."""
    for folder in folders:
        if not (folder / CONFIG).is_file():
            raise NtkMarglikError(f"{folder} is not a run folder: it has no {CONFIG}.")
    if len(folders) == 1:
        return _page_of_one(folders[0])
    labels = _distinct(folders)
    runs = {label: _run(folder) for label, folder in labels.items()}
    commands = {label: _command(folder) for label, folder in labels.items()}
    finished = read_summary(folders[0]) is not None
    return Page(f"{len(runs)} runs compared", runs, commands, finished=finished)


def _page_of_one(folder: Path) -> Page:
    label = _label(folder)
    runs: Runs = {label: _run(folder)}
    commands = {label: _command(folder)}
    baseline = folder / "baseline"
    if (baseline / CONFIG).is_file():
        runs[BASELINE] = _run(baseline)
    finished = read_summary(folder) is not None
    shown: dict[str, str] = {}
    notes: list[str] = []
    ranges = runs[label][1].get("augmentation")
    if ranges:
        config = config_of(folder)
        try:
            shown = pictures_of(config, ranges, _inputs(folder, config))
        except (NtkMarglikError, OSError) as error:
            notes.append(f"Without pictures of the augmentation: {error}")
    title = title_of(runs[label][1], label)
    return Page(title, runs, commands, shown, finished, notes)


def title_of(summary: Metrics, label: str) -> str:
    """What was trained on what."""
    parts = (summary.get("dataset"), summary.get("model"), label)
    return ", ".join(str(part) for part in parts if part)


def pictures_of(config: Config, ranges: list[float], x: Tensor) -> dict[str, str]:
    """The augmentation of a run at its start and at its end."""
    hyper = config.hyperparameters
    start = [hyper.aug_init] * len(ranges)
    return samples(start, ranges, x, flip=hyper.flip)


def _inputs(folder: Path, config: Config) -> Tensor:
    """A few training inputs of a run."""
    root = read_config(folder).get("data_root", config.problem.data_root)
    size = config.problem.n_data or EXAMPLES
    return load(config.problem.dataset, root, n_data=size, seed=config.run.seed).x_train


def _run(folder: Path) -> tuple[list[Metrics], Metrics]:
    lines = read_metrics(folder)
    return lines, read_summary(folder) or _so_far(lines, read_config(folder))


def _so_far(lines: list[Metrics], settings: dict[str, Any]) -> Metrics:
    """What a summary would say of an interrupted run: its settings and the last of each number."""
    names = ("method", "subset", "outputs", "seed", "dataset", "model", "n_data")
    known = {name: settings[name] for name in names if name in settings}
    for line in lines:
        known |= line
    start = settings.get("prior_precision")
    return {**known, "initial_prior_precision": start}


def _label(folder: Path) -> str:
    settings = read_config(folder)
    return name_of(config_of(folder)) if of_the_runner(settings) else str(settings.get("method"))


def _command(folder: Path) -> str:
    return config_of(folder).command() if of_the_runner(read_config(folder)) else ""


def _distinct(folders: list[Path]) -> dict[str, Path]:
    """Folders by name; by their whole paths where names meet."""
    names = {folder.resolve().name: folder for folder in folders}
    return names if len(names) == len(folders) else {str(folder): folder for folder in folders}
