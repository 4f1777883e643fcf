"""The figure and the page of a finished run, in its folder."""

from __future__ import annotations

from pathlib import Path

from ntkmarglik.learn.methods import Problem
from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.programs.report.folders import pictures_of, title_of
from ntkmarglik.runs import page, report


def draw(runs: report.Runs, problem: Problem, path: Path) -> None:
    """Write `figure.png` and `report.html`; a full disk is reported and costs these only."""
    example = problem.data.x_train[0]
    report.save(runs, path / "figure.png", augment=problem.augment, example=example)
    page.save(_page(runs, problem), path / page.FILE)


def _page(runs: report.Runs, problem: Problem) -> page.Page:
    """What the page shows."""
    label, (_, summary) = next(iter(runs.items()))
    config = problem.config
    shown = {}
    if isinstance(problem.augment, AffineAugmentation):
        shown = pictures_of(config, summary["augmentation"], problem.data.x_train)
    return page.Page(title_of(summary, label), runs, {label: config.command()}, shown)
