"""The partitions behind the bounds (figure 2), and the overview of the front page.

A matrix is a square: what is coloured stays, what is white is taken for zero, which makes the log
evidence smaller (Fischer's inequality). Dark is the block that one stochastic step sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from ntkmarglik.programs.paper.figures import bound_slack
from ntkmarglik.programs.paper.figures.style import colour_of, sheet
from ntkmarglik.runs.report import STYLE

LAYERS = (3, 5, 4)  # weights of each layer of a toy network
BLOCKS, OUTPUTS, DATA = 3, 2, 2  # of data, outputs of the network, data points of a block
P, ROWS = sum(LAYERS), BLOCKS * OUTPUTS * DATA
LIGHT = 0.35  # how much of a colour is left in what a step does not see
SPACE = 0.25  # between the matrices of a sum, in widths of one
Picture = np.ndarray  # [cells, cells, 3]


def partitions(folder: Path, target: Path) -> None:
    """Figure 2: parameters, data and outputs, and both are partitioned; needs no data."""
    with sheet(target, 3, 4, (1.75, 1.6)) as grid:
        _scheme(grid)


def overview(folder: Path, target: Path) -> None:
    """The scheme, and what its first two rows cost: bounds against the prior precision."""
    source = folder / bound_slack.FILES[0]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(10.5, 4.6), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(1.75, 1))  # type: ignore[misc]
        _scheme(left.subplots(3, 4))
        above, below = right.subplots(2, 1, sharex=True)
        for axes, chosen, what in (
            (above, bound_slack.structures, "the parameters"),
            (below, bound_slack.subsets, "the data, S in a block"),
        ):
            bound_slack.panel(axes, source, chosen)
            axes.set_title(f"MNIST-1000, partitions of {what}")
        above.set_xlabel("")
        figure.savefig(target)
        plt.close(figure)


def _scheme(grid: np.ndarray) -> None:
    """A row for each thing that is partitioned, finer from left to right; "both" starts at data."""
    kernel, dense = colour_of("ntk"), colour_of("blockdiag")
    of_weights = ([P], LAYERS, [1] * P)
    by_data = ([ROWS], [OUTPUTS * DATA] * BLOCKS, [DATA] * OUTPUTS * BLOCKS)
    parameters, data, both = grid[0][:3], grid[1][:3], grid[2][1:]
    _row(
        parameters,
        [[_matrix(sizes, dense)] for sizes in of_weights],
        ("full GGN", "a block per layer", "diagonal"),
    )
    _row(
        data,
        [[_matrix(sizes, kernel, seen=0)] for sizes in by_data],
        ("NTK of all data", "blocks of data", "of single outputs"),
    )
    _row(
        both,
        [[_matrix(sizes, dense), *[_light(_matrix(sizes, dense))] * 2] for sizes in of_weights],
        ("a GGN per block of data", "a block per layer", "diagonal"),
    )
    for axes, name in ((parameters[0], "parameters"), (data[0], "data and\noutputs")):
        axes.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
    _sign(both[0], "both", (-0.35, 0.5), size=8)
    _sign(parameters[1], "≥", (-0.3, 0.5), "Theorem 1")
    _sign(data[1], "≥", (-0.3, 0.5), "Theorem 2")
    _sign(both[1], "≥", (-0.12, 0.5), "Cor. 3.1", (0, -0.75))
    _sign(data[0], "=", (0.5, 1.36), "equation 6", (0.36, 0))
    _sign(both[0], "=", (0.5, 1.9), "Theorem 3", (0.36, 0))
    _sign(parameters[2], "≥", (-0.3, 0.5))
    _sign(data[2], "≥", (-0.3, 0.5), "true root")  # as published, single outputs give no bound
    _sign(both[2], "≥", (-0.12, 0.5))
    for axes in (grid[0][3], grid[1][3], grid[2][0]):
        axes.set_axis_off()
    note = "white: taken for zero,\nso that the evidence\ncan only fall\n\ndark: what\na step sees"
    grid[0][3].text(0, 0.5, note, va="center", fontsize=8)


def _row(line: Sequence[Axes], pictures: Sequence[list[Picture]], titles: Sequence[str]) -> None:
    for axes, own, title in zip(line, pictures, titles, strict=True):
        _show(axes, own)
        axes.set_title(title, loc="center", fontsize=8)


def _matrix(sizes: Iterable[int], colour: str, seen: int | None = None) -> Picture:
    """A block-diagonal matrix; all blocks are dark, or only that which is `seen`."""
    sizes = list(sizes)
    picture = np.ones((sum(sizes), sum(sizes), 3))
    start = 0
    for number, size in enumerate(sizes):
        dark = seen is None or number == seen
        block = slice(start, start + size)
        picture[block, block] = to_rgb(colour) if dark else _light(np.array(to_rgb(colour)))
        start += size
    return picture


def _light(picture: Picture) -> Picture:
    return 1 - LIGHT * (1 - picture)


def _show(axes: Axes, pictures: list[Picture]) -> None:
    """Matrices side by side, each in a frame of width 1."""
    for number, picture in enumerate(pictures):
        left = number * (1 + SPACE)
        axes.imshow(picture, extent=(left, left + 1, 0, 1), interpolation="nearest")
        axes.add_patch(Rectangle((left, 0), 1, 1, fill=False, edgecolor="0.6", clip_on=False))
        if number:
            axes.text(left - SPACE / 2, 0.5, "+", ha="center", va="center", fontsize=8)
    axes.set_xlim(0, left + 1)
    axes.set_ylim(0, 1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _sign(
    axes: Axes,
    sign: str,
    place: tuple[float, float],
    why: str = "",
    beside: tuple[float, float] = (0, -0.2),
    *,
    size: int = 13,
) -> None:
    """A sign beside a matrix and, in small, where it comes from."""
    where: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(*place, sign, fontsize=size, **where)
    axes.text(place[0] + beside[0], place[1] + beside[1], why, fontsize=6, color="0.4", **where)


FIGURES: dict[str, Callable[[Path, Path], None]] = {
    "partitions": partitions,
    "overview": overview,
}
