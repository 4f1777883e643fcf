"""The slides' two pictures: variance of gradients, and what one sample is worth."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes

from ntkmarglik.programs.paper.figures.style import rows_of, sheet
from ntkmarglik.runs.records import Row
from ntkmarglik.runs.report import COLOURS

OBJECTIVES = {"data": ("L", COLOURS[1]), "prior": ("L'", COLOURS[0])}
LINES = ("-", "--", ":", "-.")


def variance(folder: Path, target: Path) -> None:
    """Along the steps of the sampler, and the ratio at its end against the noise scale."""
    rows = rows_of(folder, "sampled_variance.csv")
    with sheet(target, 1, 2, (3.3, 2.6)) as grid:
        left, right = grid[0]
        _along_steps(left, [row for row in rows if row["kind"] == "measured"])
        _ratios(right, [row for row in rows if row["at"] == "solution"])


def _along_steps(axes: Axes, rows: list[Row]) -> None:
    """The last point, of conjugate gradients, is drawn where the next step would be."""
    steps = sorted({float(row["step"]) for row in rows})
    names = ["end" if math.isinf(step) else f"{step:.0f}" for step in steps]
    for batch, line in zip(sorted({int(row["batch"]) for row in rows}), LINES, strict=False):
        for column, (label, colour) in OBJECTIVES.items():
            values = {float(r["step"]): float(r[column]) for r in rows if int(r["batch"]) == batch}
            axes.plot(
                range(len(steps)),
                [values[step] for step in steps],
                color=colour,
                linestyle=line,
                marker="o",
                markersize=3,
                label=f"{label}, batch {batch}",
            )
    axes.set_xticks(range(len(steps)), names)
    axes.set_yscale("log")
    axes.set_xlabel("step of the sampler")
    axes.set_title("variance of a gradient")
    axes.legend(fontsize=7, handlelength=4)


def _ratios(axes: Axes, rows: list[Row]) -> None:
    for i, epoch in enumerate(sorted({int(row["epoch"]) for row in rows})):
        line = [row for row in rows if int(row["epoch"]) == epoch]
        noises = [float(row["noise"]) for row in line]
        ratios = [float(row["ratio"]) for row in line]
        name = f"after {epoch} epochs" if epoch > 1 else "after 1 epoch"
        axes.plot(noises, ratios, color=COLOURS[i], marker="o", markersize=3, label=name)
    axes.axhline(16, color="0.6", linewidth=0.8, linestyle=":", label="16, as in the slides")
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.text(max(noises), 0.8, "below 1 it is L that has less", fontsize=7, ha="right", va="top")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=1e6)  # room for the legend
    axes.set_xlabel("variance of the noise in the data")
    axes.set_title("variance of L / variance of L', at the solution")
    axes.legend(fontsize=7)


def count(folder: Path, target: Path) -> None:
    """Effective dimension and test log-likelihood by k samples, a dot per seed."""
    rows = rows_of(folder, "sampled_count.csv")
    network, drawn = rows[0], rows[1:]
    panels = {"effective_dimension": "effective dimension", "test_log_likelihood": "test log-lik."}
    with sheet(target, 1, 2, (3.0, 2.3)) as grid:
        for axes, (column, title) in zip(grid[0], panels.items(), strict=True):
            counts = [int(row["samples"]) for row in drawn]
            values = [float(row[column]) for row in drawn]
            axes.scatter(counts, values, s=12, color=COLOURS[0], alpha=0.7, label="k samples")
            known = "exact" if column == "effective_dimension" else "network (MAP)"
            axes.axhline(float(network[column]), color="0.5", linewidth=0.9, label=known)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(counts)), [str(k) for k in sorted(set(counts))])
            axes.set_xlabel("samples k")
            axes.set_title(title)
            axes.legend(fontsize=7)
        grid[0][0].set_ylim(0, 1.15 * max(float(row["effective_dimension"]) for row in rows))


FIGURES = {"sampled_variance": variance, "sampled_count": count}
