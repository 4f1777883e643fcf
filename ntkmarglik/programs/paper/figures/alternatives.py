"""Learned hyperparameters beside what people do today: quality against CPU time."""

from __future__ import annotations

from dataclasses import dataclass
from operator import sub, truediv
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter

from ntkmarglik.programs.paper.figures.style import label_ends, rows_of, sheet
from ntkmarglik.runs.records import Row, grouped, mean_and_error, values

CSV = "alternatives.csv"
TITLES = {
    "digits": "digits, CNN",
    "mnist": "MNIST-1000, MiniNet",
    "fashion": "Fashion-MNIST-1000, MiniNet",
    "cifar": "CIFAR-10-2000, small ResNet",
    "rotated": "rotated MNIST-1000, 8 copies",
    "diabetes": "diabetes, MLP",
}
# kind of a way: colour (told apart with any colour vision), marker
LOOKS = {
    "people": ("#777777", "s"),
    "grid": ("#000000", "D"),
    "ours": ("#0072B2", "o"),
    "posterior": ("#D55E00", "^"),
}
GOAL = 1.3  # plain fits that learning may cost
WORST = 0.12  # what is further below the grid is named, not drawn
FASTEST = 0.6  # plain fits; what takes less is drawn here
SLOWEST = 23  # plain fits that every panel has room for


@dataclass(frozen=True)
class Compared:
    """A way to hyperparameters beside the grid on a held-out split, over seeds.

    Args:
        rows: one for each seed.
        difference: mean of the paired differences in test log-likelihood.
        error: its standard error; None for a single seed.
        units: mean CPU time, in units of a plain fit with the same seed in the same hour.
    """

    rows: list[Row]
    difference: float
    error: float | None
    units: float

    @property
    def way(self) -> str:
        return str(self.rows[0]["way"])

    @property
    def kind(self) -> str:
        return str(self.rows[0]["kind"])


def compared(rows: list[Row]) -> list[Compared]:
    """The ways of one study, over the seeds that the grid has too."""
    grid = {row["seed"]: row for row in rows if row["kind"] == "grid"}
    found = []
    for members in grouped(rows, "way").values():
        own = [row for row in members if row["seed"] in grid]
        if not own:
            continue
        base = [grid[row["seed"]] for row in own]
        scores, scores_of_grid = (values(part, "test_log_likelihood") for part in (own, base))
        difference, error = mean_and_error(list(map(sub, scores, scores_of_grid)))
        seconds, plain_fits = values(own, "cpu_seconds"), values(own, "fit_seconds")
        units, _ = mean_and_error(list(map(truediv, seconds, plain_fits)))
        found.append(Compared(own, difference, error, units))
    return found


def alternatives(folder: Path, target: Path) -> None:
    """A panel for each data set: difference to the grid against CPU time."""
    by_study = {study: rows for (study,), rows in grouped(rows_of(folder, CSV), "study").items()}
    studies = {study: by_study[study] for study in TITLES if study in by_study}
    columns = min(3, len(studies))
    lines = -(-len(studies) // columns)
    with sheet(target, lines, columns, (4.1, 3.2)) as grid:
        panels = list(grid.flat)
        for axes, (study, rows) in zip(panels, studies.items(), strict=False):
            _panel(axes, compared(rows))
            axes.set_title(TITLES[study])
        for axes in panels[len(studies) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("test log-likelihood,\ndifference to the grid")
        for axes in grid[-1]:
            axes.set_xlabel("CPU time, plain fits")


def _panel(axes: Axes, ways: list[Compared]) -> None:
    """Points with their numbers; names beside the panel, those of points below it in brackets."""
    labels = []
    for number, way in enumerate(sorted(ways, key=lambda way: -way.difference), 1):
        colour, marker = LOOKS[way.kind]
        if way.difference < -WORST:
            labels.append((-WORST, f"({way.way}: {way.difference:.2f})", colour))
            continue
        at = max(way.units, FASTEST)
        axes.errorbar(
            at, way.difference, way.error, fmt=marker, color=colour, capsize=2, markersize=4
        )
        axes.annotate(
            str(number),
            (at, way.difference),
            xytext=(4, 2),
            textcoords="offset points",
            color=colour,
            fontsize=6,
        )
        labels.append((way.difference, f"{number} {way.way}", colour))
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(GOAL, color="0.8", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xscale("log")
    slowest = max([SLOWEST, *(way.units for way in ways if way.difference >= -WORST)])
    axes.set_xlim(0.9 * FASTEST, 1.3 * slowest)
    axes.set_xticks([tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick <= slowest])
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    label_ends(axes, labels)


FIGURES = {"alternatives": alternatives}
