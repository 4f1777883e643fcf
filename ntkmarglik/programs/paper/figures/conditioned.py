"""What conditioning on inducing rows is worth: slack against rows, and learning against time."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from ntkmarglik.programs.paper.figures.style import label_ends, rows_of, sheet
from ntkmarglik.runs.records import Row

SLACK = "conditioned_slack.csv"
STEPS = "50"  # evaluations that have chosen the inducing rows
NETWORKS = {
    "digits": "digits, N = 400, P = 3,990",
    "mnist": "MNIST, N = 1,000, MiniNet",
    "cifar": "CIFAR-10, N = 2,000, small ResNet",
}
# kind and root of a curve: name, colour (told apart with any colour vision), line
CURVES = {
    ("plain", "paper"): ("published (no bound)", "#D55E00", "--"),
    ("plain", "fisher"): ("Fisher root", "#0072B2", "-"),
    ("class-wise", "fisher"): ("Fisher, by class", "#56B4E9", "-."),
    ("plain", "eigen"): ("eigen root", "#CC79A7", ":"),
    ("conditioned", "fisher"): ("conditioned, Fisher", "#009E73", "-"),
    ("conditioned", "eigen"): ("conditioned, eigen", "#000000", "-"),
}
SMALLEST = 1.0  # per cent; less is drawn there
PER_CENT = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def slack_against_cost(folder: Path, target: Path) -> None:
    """Slack of the log-determinant at equal rows, which is equal cost, for each kind of block."""
    rows = [row for row in rows_of(folder, SLACK) if row["slack_percent"]]
    networks = [name for name in NETWORKS if any(row["network"] == name for row in rows)]
    with sheet(target, 1, len(networks), (3.7, 3.0)) as grid:
        for axes, name in zip(grid[0], networks, strict=True):
            _panel(axes, [row for row in rows if row["network"] == name])
            axes.set_title(NETWORKS[name])
        grid[0, 0].set_ylabel("slack of the log-determinant, per cent")


def _panel(axes: Axes, rows: list[Row]) -> None:
    labels = []
    for (kind, root), (name, colour, line) in CURVES.items():
        points = sorted(
            (int(row["rows"]), max(float(row["slack_percent"]), SMALLEST))
            for row in rows
            if (row["kind"], row["root"]) == (kind, root)
            and row["precision"] in ("1", "learned")
            and (kind != "conditioned" or row["steps"] == STEPS)
        )
        if points:
            sizes, values = zip(*points, strict=True)
            axes.plot(sizes, values, line, color=colour, marker="o", markersize=3, linewidth=1.4)
            labels.append((values[-1], name, colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows of a block")
    ticks = sorted({int(row["rows"]) for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    ticks = [tick for tick in PER_CENT if low <= tick <= high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_minor_formatter(NullFormatter())
    _label(axes, labels)


def _label(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Names at the ends of curves, whose heights are those of the axis' own scale."""
    low, high = axes.get_ylim()
    to_axes = axes.transScale.transform
    bottom, top = to_axes((1, low))[1], to_axes((1, high))[1]
    heights = [(to_axes((1, value))[1] - bottom) / (top - bottom) for value, _, _ in labels]
    placed = [
        (low + height * (high - low), name, colour)
        for height, (_, name, colour) in zip(heights, labels, strict=True)
    ]
    label_ends(axes, placed)


FIGURES = {"slack_against_cost": slack_against_cost}
