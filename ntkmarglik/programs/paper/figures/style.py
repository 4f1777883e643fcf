"""How figures look: readable in print and with any colour vision, labels beside what they name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from asdl_marglik import STRUCTURES
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.runs.records import Row, read
from ntkmarglik.runs.report import STYLE

MARKERS = ("o", "*", "s", "^", "D", "v", "P", "X")  # of the structures, in their order
ESTIMATOR = re.compile(r"(?P<method>\w+)-(?P<subset>\d+|N)-(?P<outputs>\d+|C)(?P<variant>.*)")
GAP = 0.075  # of the height of a panel between two labels
Label = tuple[float, str, str]  # height, text, colour


@contextlib.contextmanager
def sheet(
    target: Path, rows: int, columns: int, size: tuple[float, float], **shared: Any
) -> Iterator[np.ndarray]:
    """Panels [rows, columns] that are saved to `target` once drawn; size of one panel in inches."""
    with plt.rc_context(STYLE):
        figsize = (size[0] * columns, size[1] * rows)
        figure, grid = plt.subplots(
            rows, columns, figsize=figsize, squeeze=False, layout="constrained", **shared
        )
        try:
            yield grid
            figure.savefig(target)
        finally:
            plt.close(figure)


def rows_of(folder: Path, name: str) -> list[Row]:
    """The rows of a csv file, or an error that says how to make it."""
    if not (folder / name).exists():
        raise NtkMarglikError(
            f"There is no {folder / name}; run its experiment, then draw with --source runs "
            "(illustrations/README.md)."
        )
    return read(folder / name)


def label_of(method: str) -> str:
    """A method, or the structure of its curvature, as a reader knows it."""
    return METHODS.named(method).label


def colour_of(method: str) -> str:
    """The same colour for a method in every figure."""
    return METHODS.named(method).colour


def marker_of(structure: str) -> str:
    """The same marker for a structure in every figure."""
    return MARKERS[list(STRUCTURES).index(structure) % len(MARKERS)]


def shades(number: int) -> list[str]:
    """Colours of an ordered quantity, from light to dark."""
    return [
        to_hex(plt.get_cmap("viridis")(0.82 - 0.82 * i / max(1, number - 1))) for i in range(number)
    ]


def label_ends(axes: Axes, labels: list[Label], x: float = 1.02) -> None:
    """Names right of a panel, each as near to the height of its curve's end as the others allow."""
    low, high = axes.get_ylim()
    place = np.inf
    for left, (height, text, colour) in zip(
        range(len(labels) - 1, -1, -1), sorted(labels, key=lambda label: -label[0]), strict=True
    ):
        place = max(min((height - low) / (high - low), place - GAP), left * GAP)
        axes.text(x, place, text, color=colour, transform=axes.transAxes, va="center", fontsize=7)
