"""Evidence and test log-likelihood over epochs, for bounds optimised in training (figures 8-11)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from asdl_marglik import STRUCTURES
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.paper.figures.style import (
    ESTIMATOR,
    Label,
    colour_of,
    label_ends,
    label_of,
    rows_of,
    shades,
    sheet,
)
from ntkmarglik.runs.records import Row, grouped, mean_and_error, values
from ntkmarglik.runs.report import window

QUANTITIES = {"log_marglik": "log evidence / datum", "test_log_likelihood": "test log-likelihood"}


class Curve(NamedTuple):
    """How the curve of an estimator looks."""

    name: str
    colour: str
    line: str = "-"


def parametric(labels: list[str]) -> dict[str, Curve]:
    """Structures of the curvature, all data; single outputs where all of them were not run.

    The kernel of all outputs has the numbers of the full curvature, and a panel of its own.
    """
    found = {}
    for structure in STRUCTURES:
        whole, single = f"{structure}-N-C", f"{structure}-N-1"
        same = whole if structure != "ntk" else "full-N-C"
        if structure != "ntk" and whole in labels:
            found[whole] = Curve(label_of(structure), colour_of(structure))
        elif single in labels and same not in labels:
            found[single] = Curve(f"{label_of(structure)}, 1 output", colour_of(structure), ":")
    return found


def by_subset(structure: str, outputs: str, labels: list[str]) -> dict[str, Curve]:
    """Block sizes of one structure, light for small to dark for all data; alike in all panels."""
    sizes = {label: _size(label) for label in labels if ESTIMATOR.fullmatch(label)}
    ordered = sorted(set(sizes.values()))
    colours = dict(zip(ordered, shades(len(ordered)), strict=True))
    found = [
        label
        for label in sizes
        if label.startswith(f"{structure}-") and label.endswith(f"-{outputs}")
    ]
    if (structure, outputs) == ("ntk", "C") and "ntk-N-C" not in labels and "full-N-C" in labels:
        found.append("full-N-C")  # the same number
    return {
        label: Curve(f"S = {label.split('-')[1]}", colours[sizes[label]])
        for label in sorted(found, key=lambda label: sizes[label])
    }


def _size(label: str) -> float:
    """Data points in a block of an estimator."""
    subset = label.split("-")[1]
    return float("inf") if subset == "N" else float(subset)


Panel = tuple[str, Callable[[list[str]], dict[str, Curve]]]
PARAMETRIC: list[Panel] = [
    ("all data", parametric),
    ("NTK, all outputs", partial(by_subset, "ntk", "C")),
]
DOUBLY: list[Panel] = [
    ("block-diagonal, all outputs", partial(by_subset, "blockdiag", "C")),
    ("NTK, single outputs", partial(by_subset, "ntk", "1")),
    ("KFAC, single outputs", partial(by_subset, "kfac", "1")),
]


def traces(file: str, panels: list[Panel], folder: Path, target: Path) -> None:
    """Means over seeds with standard errors; a column per family of bounds, one scale per row."""
    by_label = {label: own for (label,), own in grouped(rows_of(folder, file), "estimator").items()}
    families = [(title, curves) for title, choose in panels if (curves := choose(list(by_label)))]
    if not families:
        raise NtkMarglikError(f"{file} has no runs of {' or '.join(title for title, _ in panels)}.")
    baseline = {"map": Curve(label_of("map"), colour_of("map"), "--")} if "map" in by_label else {}
    with sheet(
        target, len(QUANTITIES), len(families), (3.5, 2.1), sharey="row", sharex="all"
    ) as grid:
        for line, (quantity, name) in zip(grid, QUANTITIES.items(), strict=True):
            ends = []
            for axes, (title, curves) in zip(line, families, strict=True):
                ends.append(_panel(axes, by_label, baseline | curves, quantity))
                if axes in grid[0]:
                    axes.set_title(title)
                if axes in grid[-1]:
                    axes.set_xlabel("epoch")
            shown = [float(y) for axes in line for curve in axes.lines for y in curve.get_ydata()]
            if shown:
                line[0].set_ylim(
                    *window(shown, [height for labels in ends for height, _, _ in labels])
                )
            line[0].set_ylabel(name)
            for axes, labels in zip(line, ends, strict=True):
                label_ends(axes, labels)


def _panel(
    axes: Axes, by_label: dict[str, list[Row]], curves: dict[str, Curve], quantity: str
) -> list[Label]:
    ends = []
    for label, (name, colour, line) in curves.items():
        epochs = grouped(by_label[label], "epoch")
        found = [(float(epoch), values(own, quantity)) for (epoch,), own in epochs.items()]
        points = [(epoch, *mean_and_error(numbers)) for epoch, numbers in sorted(found) if numbers]
        if points:
            x, y, error = np.array([(epoch, mean, error or 0) for epoch, mean, error in points]).T
            axes.plot(x, y, line, color=colour, linewidth=1.3)
            axes.fill_between(x, y - error, y + error, color=colour, alpha=0.2, linewidth=0)
            ends.append((y[-1], name, colour))
    axes.grid(axis="y", color="0.93")
    return ends


FIGURES: dict[str, Callable[[Path, Path], None]] = {
    "traces_lila": partial(traces, "traces_bound_lila.csv", PARAMETRIC),
    "traces_lila_doubly": partial(traces, "traces_bound_lila.csv", DOUBLY),
    "traces_prior": partial(traces, "traces_bound_prior.csv", PARAMETRIC),
    "traces_prior_doubly": partial(traces, "traces_bound_prior.csv", DOUBLY),
}
