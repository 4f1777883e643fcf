"""Time and memory of an estimate with its gradient against S, A, N and C."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ntkmarglik.programs.paper.figures.style import colour_of, rows_of, sheet
from ntkmarglik.runs.records import Row, grouped

ESTIMATORS = {
    "ntk-S-1": colour_of("ntk"),
    "kfac-S-1": colour_of("kfac"),
    "kfac-S-C": colour_of("blockdiag"),
}
MODELS = {"mininet": ("MiniNet", "o", "--"), "resnet": ("ResNet-18", "s", "-")}
AXES = {"S": "data points S", "A": "augmented copies A", "N": "data set size N", "C": "outputs C"}
COLUMNS = {"cpu_seconds": "CPU seconds", "peak_mb": "peak memory, MB"}


def predicted(axis: str, column: str, estimator: str, value: float) -> float:
    """How a measurement should grow, up to a factor."""
    if column == "peak_mb":
        return value if axis == "S" and estimator == "ntk-S-1" else 1.0
    if axis == "C":
        return 3 + value if estimator.endswith("C") else 1.0
    return 1.0 if axis == "N" else value


def scaling(source: Path, target: Path) -> None:
    """Time and memory against size.

    Grey is the predicted growth, through the largest case for time and the smallest for memory.
    """
    rows = rows_of(source.parent, source.name)
    columns = {
        c: label for c, label in COLUMNS.items() if not any(math.isnan(float(r[c])) for r in rows)
    }
    with sheet(target, len(columns), len(AXES), (2.5, 2.3), sharey="row", sharex="col") as grid:
        for line, (column, label) in zip(grid, columns.items(), strict=True):
            for axes, axis in zip(line, AXES, strict=True):
                _panel(axes, axis, column, [r for r in rows if r["axis"] == axis])
            line[0].set_ylabel(label)
        for axes, name in zip(grid[-1], AXES.values(), strict=True):
            axes.set_xlabel(name)
        looks = {**ESTIMATORS, "predicted growth": "0.6"}
        lines = [Line2D([], [], color=colour, label=name) for name, colour in looks.items()]
        grid[0, 0].figure.legend(
            handles=lines, loc="outside upper left", ncols=len(lines), frameon=False
        )


def _panel(axes: Axes, axis: str, column: str, rows: list[Row]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for (model, estimator), points in grouped(rows, "model", "estimator").items():
        x, y = [float(r["value"]) for r in points], [float(r[column]) for r in points]
        growth = [predicted(axis, column, estimator, v) for v in x]
        # small cases are slowed by fixed costs, not by the growth
        anchor = 0 if column == "peak_mb" else -1
        axes.plot(
            x,
            [y[anchor] * g / growth[anchor] for g in growth],
            color="0.7",
            linewidth=0.8,
            zorder=1,
        )
        _, marker, dashes = MODELS[model]
        axes.plot(
            x, y, dashes, marker=marker, color=ESTIMATORS[estimator], markersize=3.5, linewidth=1.2
        )
    for (model,), points in grouped(
        rows, "model"
    ).items():  # named below its lowest curve, at the right
        last = max(float(r["value"]) for r in points)
        lowest = min(float(r[column]) for r in points if float(r["value"]) == last)
        below = (0, -13 if column == "peak_mb" else -24)  # curves of time are steep
        axes.annotate(
            MODELS[model][0],
            (last, lowest),
            below,
            textcoords="offset points",
            ha="right",
            color="0.25",
            fontsize=7,
        )
    if axis != "N":
        ticks = sorted({int(float(r["value"])) for r in rows})
        axes.set_xticks(ticks, [str(v) for v in ticks])
        axes.minorticks_off()
    axes.grid(color="0.93")
    axes.set_axisbelow(True)


FIGURES = {"scaling": lambda folder, target: scaling(folder / "scaling.csv", target)}
