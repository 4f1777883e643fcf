"""Bounds of the evidence against a hyperparameter (figures 3 to 6 and 12), from bound_grid.py.

Black is the exact value, a dot the maximum of a curve: the value of the hyperparameter that the
bound would choose. Shaded: one standard error over blocks. How far a curve lies below the black one
is its slack.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from asdl_marglik import STRUCTURES
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.grid.config import parse
from ntkmarglik.programs.grid.table import BOUNDS, Row, read
from ntkmarglik.programs.paper.figures.style import label_of

STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 150,
}
FILES = ("bound_grid_prior.csv", "bound_grid_rotation.csv")
ROOTS = {
    "paper": "published (no bound)",
    "fisher": "Fisher root",
    "symmetric": "symmetric root",
    "eigen": "eigen root",
}
LINES = ("-", "--", "-.", ":")  # told apart without colours
ROOT_LOOKS = {  # colours told apart with any colour vision
    "paper": ("#D55E00", "--"),
    "fisher": ("#0072B2", "-"),
    "symmetric": ("#009E73", "-."),
    "eigen": ("#CC79A7", ":"),
}
ROOTS_SUBSET = "50"
GAP = 0.062  # of the height of a panel between two labels
Maximum = tuple[float, str, str]  # height, name, colour
Chosen = Callable[[Row], str | None]  # the label of a row's curve; None if it is not in the panel


def structures(row: Row) -> str | None:
    """Curves of the inexact structures of the curvature, all data."""
    inexact = tuple(name for name, s in STRUCTURES.items() if s.guarantee != "exact")
    return label_of(row["structure"]) if _plain(row, inexact, whole=True) else None


def subsets(row: Row) -> str | None:
    """Curves of the kernel on subsets of data, all outputs."""
    return _size(row) if _plain(row, ("ntk",)) else None


def parametric(folder: Path, target: Path) -> None:
    """Figure 3: structures of the curvature, all data."""
    _draw(target, folder, structures)


def ntk(folder: Path, target: Path) -> None:
    """Figure 4: the kernel on subsets of data, all outputs."""
    _draw(target, folder, subsets)


def panel(axes: Axes, source: Path, chosen: Chosen) -> None:
    """One panel for another figure, with its curves named.

    Args:
        axes: where.
        source: csv file of a bound grid.
        chosen: gives the label of a row's curve.
    """
    _, rows = read(source)
    _label(axes, _panel(axes, rows, chosen, source))


def doubly(folder: Path, target: Path) -> None:
    """Figure 5: the block-diagonal curvature on subsets of data, all outputs."""
    _draw(target, folder, lambda row: _size(row) if _plain(row, ("blockdiag",)) else None)


def single(folder: Path, target: Path) -> None:
    """Figure 6: the kernel on subsets of data, one output, as published."""
    _draw(
        target, folder, lambda row: _size(row) if _single(row) and row["root"] == "paper" else None
    )


def grouped(folder: Path, target: Path) -> None:
    """Figure 12: blocks drawn at random (left) and of one class as far as possible (right)."""
    random, classes = (
        (lambda row, kind=kind: _size(row) if _plain(row, ("ntk",), partition=kind) else None)
        for kind in ("random", "class")
    )
    _draw(target, folder, random, classes, titles=("random blocks", "blocks by class"))


def roots(folder: Path, target: Path) -> None:
    """Single outputs with each root of the curvature, blocks of 50: the paper's is no bound."""
    _draw(
        target,
        folder,
        lambda row: ROOTS[row["root"]] if _single(row) and row["subset"] == ROOTS_SUBSET else None,
    )


def _plain(
    row: Row, kinds: tuple[str, ...], *, partition: str = "random", whole: bool = False
) -> bool:
    everything = row["subset"] == row["n_data"]
    return (
        row["structure"] in kinds
        and row["outputs"] == "all"
        and everything == whole
        and row["partition"] == partition
    )


def _single(row: Row) -> bool:
    kind = row["structure"], row["outputs"], row["columns"], row["partition"]
    return kind == ("ntk", "single", "shared", "random")


def _size(row: Row) -> str:
    return f"S = {row['subset']}"


def _look(label: str) -> tuple[str, str]:
    """Colour and line of a curve that is named by a root or a structure."""
    for root, name in ROOTS.items():
        if name == label:
            return ROOT_LOOKS[root]
    inexact = [s for s in STRUCTURES.values() if s.guarantee != "exact"]
    number = [s.label for s in inexact].index(label)
    return inexact[number].colour, LINES[number % len(LINES)]


def _draw(target: Path, folder: Path, *panels: Chosen, titles: tuple[str, ...] = ("",)) -> None:
    """A panel for each hyperparameter with data, side by side; a row for each kind of blocks."""
    files = [name for name in FILES if (folder / name).exists()] or [FILES[0]]
    lines, across = (1, len(files)) if len(panels) == 1 else (len(files), len(panels))
    with plt.rc_context(STYLE):  # type: ignore[arg-type]
        size = (3.5 * across, 2.5 * lines)
        figure, grid = plt.subplots(
            lines, across, figsize=size, squeeze=False, layout="constrained"
        )
        for number, name in enumerate(files):
            commands, rows = read(folder / name)
            own = grid[0][number : number + 1] if len(panels) == 1 else grid[number]
            best = []
            for axes, chosen, title in zip(own, panels, titles, strict=True):
                best.append(_panel(axes, rows, chosen, folder / name))
                axes.set_title(_described(commands) + (f": {title}" if title else ""))
            low, high = min(a.get_ylim()[0] for a in own), max(a.get_ylim()[1] for a in own)
            for axes, maxima in zip(own, best, strict=True):
                axes.set_ylim(low, high)  # one scale for panels that are compared
                _label(axes, maxima)
        figure.savefig(target)
        plt.close(figure)


def _described(commands: list[str]) -> str:
    """What the rows were computed on."""
    config = parse(
        shlex.split(next(c for c in commands if c.startswith(BOUNDS)).removeprefix(BOUNDS))[2:]
    )
    copies = (
        f", A = {config.reference.aug_samples}" if config.grid.hyperparameter == "rotation" else ""
    )
    return (
        f"{config.problem.dataset}-{config.problem.n_data or 'all'}, {config.problem.model}{copies}"
    )


def _curves(rows: list[Row], chosen: Chosen) -> dict[str, np.ndarray]:
    """Value, evidence per datum, standard error [points, 3] of each curve, small blocks first."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in sorted(rows, key=lambda row: int(row["subset"])):
        exact = row["status"] == "exact"
        label = "exact" if exact else chosen(row)
        if label is not None:
            n = float(row["n_data"])
            point = (
                float(row["value"]),
                float(row["log_marglik"]) / n,
                float(row["standard_error"] or 0) / n,
            )
            found.setdefault(label, []).append(point)
    return {label: np.array(sorted(points)) for label, points in found.items()}


def _panel(axes: Axes, rows: list[Row], chosen: Chosen, source: Path) -> list[Maximum]:
    """Draw the curves of a panel; returns where each has its maximum, its name and colour."""
    curves = _curves(rows, chosen)
    others = [label for label in curves if label != "exact"]
    if not others:
        raise NtkMarglikError(
            f"{source} has no rows for this figure; run its command again with more of "
            "--structures, --subsets, --outputs, --partitions and --roots (see bound_grid.py "
            "--help)."
        )
    best = []
    for label, points in curves.items():
        colour, style = _line(label, others)
        x, y, error = points.T
        axes.plot(x, y, style, color=colour, linewidth=1.8 if label == "exact" else 1.2, zorder=3)
        axes.fill_between(x, y - error, y + error, color=colour, alpha=0.2, linewidth=0)
        top = int(y.argmax())
        axes.plot(x[top], y[top], "o", color=colour, markersize=3.5, zorder=4)
        best.append((y[top], label, colour))
    hyperparameter = rows[0]["hyperparameter"]
    _name_axes(axes, hyperparameter)
    _limit(axes, hyperparameter, curves, [height for height, _, _ in best])
    return best


def _line(label: str, others: list[str]) -> tuple[str, str]:
    """Colour and style of a curve among the others that are not the exact one."""
    if label == "exact":
        return "black", "-"
    if not all(other.startswith("S = ") for other in others):
        return _look(label)
    # dark for large blocks; the lightest tones are lost in print
    tone = 0.75 * (1 - others.index(label) / max(1, len(others) - 1))
    return to_hex(plt.get_cmap("viridis")(tone)), "-"


def _name_axes(axes: Axes, hyperparameter: str) -> None:
    """Scale and names of the axes."""
    if hyperparameter == "prior":
        axes.set_xscale("log")
        axes.set_xlabel("prior precision")
    else:
        axes.set_xticks([0, math.pi / 2, math.pi], ["0", "π/2", "π"])
        axes.set_xlabel("rotation range")
    axes.set_ylabel("log evidence / datum")
    axes.locator_params(axis="y", nbins=5)


def _limit(
    axes: Axes, hyperparameter: str, curves: dict[str, np.ndarray], heights: list[float]
) -> None:
    """Show the maxima of all curves and what is near them."""
    spread = max(heights) - min(heights)
    exact = curves.get("exact")
    low = min(heights) - 0.35 * spread - 0.05
    if exact is not None and hyperparameter == "rotation":
        low = min(low, exact[:, 1].min() - 0.05 * spread)
    axes.set_ylim(low, max(heights) + 0.08 * spread + 0.01)
    if hyperparameter == "prior":  # the part of the grid where a curve is in sight
        seen = [x for points in curves.values() for x in points[points[:, 1] >= low, 0]]
        axes.set_xlim(min(seen) / 4, max(seen) * 4)


def _label(axes: Axes, maxima: list[Maximum]) -> None:
    """Names at the right, each as near to the height of its curve's maximum as the others allow."""
    low, high = axes.get_ylim()
    place = math.inf
    for left, (height, label, colour) in zip(
        range(len(maxima) - 1, -1, -1), sorted(maxima, reverse=True), strict=True
    ):
        place = max(min((height - low) / (high - low), place - GAP), left * GAP)
        axes.text(
            1.02, place, label, color=colour, transform=axes.transAxes, va="center", fontsize=7
        )


FIGURES: dict[str, Callable[[Path, Path], None]] = {
    "bounds_parametric": parametric,
    "bounds_ntk": ntk,
    "bounds_doubly": doubly,
    "bounds_single": single,
    "bounds_grouped": grouped,
    "bounds_roots": roots,
}
