"""What an estimator reaches against what one estimate and its gradient cost (figures 1 and 13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from asdl_marglik import STRUCTURES
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.paper.figures.style import (
    ESTIMATOR,
    colour_of,
    marker_of,
    rows_of,
    sheet,
)
from ntkmarglik.runs.records import grouped, mean_and_error, values

QUANTITIES = {"log_marglik": "log evidence / datum", "test_log_likelihood": "test log-likelihood"}
FAINT = 0.3
LETTER, LINE = 0.024, 0.05  # width of a letter of a name and height of a name, of those of a panel
OF_ALL_DATA = "black"  # estimators that see all data at once, those before the paper's


class Point(NamedTuple):
    """An estimator: seconds of an estimate, and mean and standard error of what it reached."""

    seconds: float
    value: float
    error: float
    label: str

    @property
    def method(self) -> str:
        return self.label.split("-")[0]

    @property
    def all_data(self) -> bool:
        parts = ESTIMATOR.fullmatch(self.label)
        return parts is not None and parts["subset"] == "N"

    @property
    def all_outputs(self) -> bool:
        parts = ESTIMATOR.fullmatch(self.label)
        return parts is not None and parts["outputs"] == "C"

    @property
    def colour(self) -> str:
        return OF_ALL_DATA if self.all_data else colour_of(self.method)


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in cost or value without being worse in the other."""
    best, found = -np.inf, []
    for point in sorted(points, key=lambda p: (p.seconds, -p.value)):
        if point.value > best:
            best = point.value
            found.append(point)
    return found


def pareto(runs: str, timing: str, folder: Path, target: Path) -> None:
    """Evidence and test log-likelihood against runtime.

    Estimators of all data are black; others that are dominated are faint.
    """
    seconds = {
        label: values(own, "seconds_round")
        for (label,), own in grouped(rows_of(folder, timing), "estimator").items()
    }
    reached = grouped(rows_of(folder, runs), "estimator")
    with sheet(target, 1, len(QUANTITIES), (3.5, 2.9)) as (line,):
        for axes, (quantity, name) in zip(line, QUANTITIES.items(), strict=True):
            points = []
            for (label,), own in reached.items():
                if seconds.get(label):
                    mean, error = mean_and_error(values(own, quantity))
                    points.append(Point(mean_and_error(seconds[label])[0], mean, error or 0, label))
            if not points:
                raise NtkMarglikError(
                    f"No estimator is both in {runs} and, with its time, in {timing}; run both "
                    "experiments."
                )
            _draw(axes, points)
            axes.set_xlabel("seconds of one estimate and its gradient")
            axes.set_ylabel(name)
        _legend(line[-1], points)


def _draw(axes: Axes, points: list[Point]) -> None:
    best = front(points)
    axes.set_xscale("log")
    for point in points:
        axes.errorbar(
            point.seconds,
            point.value,
            yerr=(point.error or None) if point in best else None,
            fmt=marker_of(point.method),
            color=point.colour,
            alpha=1.0 if point in best or point.all_data else FAINT,
            markersize=5,
            markerfacecolor="white" if point.all_outputs else point.colour,
            linewidth=0.8,
            zorder=3 if point in best else 2,
        )
    x, y = [p.seconds for p in best], [p.value for p in best]
    axes.step(
        [*x, max(p.seconds for p in points)],
        [*y, y[-1]],
        where="post",
        color="0.4",
        linewidth=0.8,
        zorder=1,
    )
    _window(axes, points, best)
    _name(axes, best)
    _name_beside(axes, [p for p in points if p.all_data and p not in best])


def _window(axes: Axes, points: list[Point], best: list[Point]) -> None:
    """Room for the front; what lies far below it is cut off, and said so."""
    high, low = max(p.value for p in best), min(p.value for p in best)
    spread = max(high - low, 1e-3)
    floor = min(p.value for p in points if p.value >= low - spread)
    axes.set_ylim(floor - 0.18 * spread, high + 0.25 * spread)
    first, last = min(p.seconds for p in points), max(p.seconds for p in points)
    # names stand left of the front
    axes.set_xlim(first / (last / first) ** 0.6, last * (last / first) ** 0.08)
    below = [p for p in points if p.value < floor]
    if below:
        axes.text(
            0.98,
            0.02,
            _unseen(below),
            in_layout=False,
            transform=axes.transAxes,
            ha="right",
            fontsize=6,
            color="0.4",
        )


def _unseen(points: list[Point]) -> str:
    """What is cut off, with the values of estimators of all data."""
    named = [f"{p.label} ({p.value:.2f})" for p in points if p.all_data]
    others = len(points) - len(named)
    parts = [*named, *([f"{others} more" if named else str(others)] if others else [])]
    return f"{', '.join(parts)} lower, not shown"


def _name(axes: Axes, best: list[Point]) -> None:
    """Names left of the front's points and above, where nothing is; moved up where they meet."""
    place, (low, high) = -np.inf, axes.get_ylim()
    first, last = np.log(axes.get_xlim())
    before = -np.inf  # where the name before ends
    for point in best:
        end = (np.log(point.seconds) - first) / (last - first)
        if end - LETTER * len(point.label) > before:
            place = -np.inf
        place = max((point.value - low) / (high - low) + 0.015, place + LINE)
        before = end
        at = (point.seconds / 1.08, low + place * (high - low))
        axes.text(*at, point.label, fontsize=6, ha="right", va="bottom", color=point.colour)


def _name_beside(axes: Axes, points: list[Point]) -> None:
    """Names below points that are not on the front, if these are in sight; moved down where they
    meet.
    """
    low, high = axes.get_ylim()
    first, last = np.log(axes.get_xlim())
    taken: list[tuple[float, float, float]] = []  # begin, end and height of a name
    for point in sorted((p for p in points if p.value >= low), key=lambda p: -p.value):
        end = (np.log(1.1 * point.seconds) - first) / (last - first)
        begin = end - LETTER * len(point.label)
        place = (point.value - low) / (high - low) - 0.025
        for other_begin, other_end, other in sorted(taken, key=lambda name: -name[2]):
            if begin < other_end and other_begin < end and abs(place - other) < LINE:
                place = other - LINE
        taken.append((begin, end, place))
        at = (1.1 * point.seconds, low + place * (high - low))
        axes.text(*at, point.label, fontsize=6, ha="right", va="top", color=point.colour)


def _legend(axes: Axes, points: list[Point]) -> None:
    def handle(label: str, marker: str, colour: str, face: str) -> Line2D:
        return Line2D(
            [],
            [],
            linestyle="",
            marker=marker,
            color=colour,
            markerfacecolor=face,
            markersize=5,
            label=label,
        )

    handles = [
        handle(name, marker_of(name), colour_of(name), colour_of(name))
        for name in STRUCTURES
        if name in {point.method for point in points}
    ]
    if any(point.all_data for point in points):
        handles.append(handle("all data: black", "o", OF_ALL_DATA, OF_ALL_DATA))
    handles.append(handle("all outputs: open", "o", "0.4", "white"))
    handles.append(handle("dominated: faint", "o", "0.8", "0.8"))
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), handletextpad=0.2, fontsize=7
    )


FIGURES: dict[str, Callable[[Path, Path], None]] = {
    "pareto_lila": partial(pareto, "runs_bound_lila.csv", "runs_timing_lila.csv"),
    "pareto_prior": partial(pareto, "runs_bound_prior.csv", "runs_timing_prior.csv"),
}
