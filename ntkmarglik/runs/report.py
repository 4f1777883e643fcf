"""What a person sees at the end of a run: a table and a picture."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullFormatter
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from asdl_marglik import augmented
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.problem.augment import RANGES
from ntkmarglik.runs.loggers import Metrics

Runs = dict[str, tuple[list[Metrics], Metrics]]  # label -> (epochs, summary)
# told apart with any colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
WIDTH = 100  # of the table where there is no terminal
SHORT = 14  # letters of a label that leave room for another beside it
NAMED_TENSORS = 16  # so many have room for their names
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 150,
}
# as a reader knows them
RANGE_LABELS = dict(
    zip(RANGES, ("shift x", "shift y", "rotation", "scale x", "scale y", "shear"), strict=True)
)

# predictions of a posterior, by the probit link or averaged over samples
PREDICTIVE = {
    "log-likelihood, posterior (probit)": "probit_test_log_likelihood",
    "calibration error, posterior (probit)": "probit_test_ece",
    "log-likelihood per datum, sampled": "sampled_test_log_likelihood",
    "calibration error, sampled": "sampled_test_ece",
    "joint log-likelihood per datum, sampled": "sampled_test_joint_log_likelihood",
}


def _number(value: float) -> str:
    return f"{value:.4f}"


# what every run has; how each is written
SCORES = {
    "test accuracy": ("test_accuracy", lambda value: f"{100 * value:.2f} %"),
    "test log-likelihood per datum": ("test_log_likelihood", _number),
    "test calibration error": ("test_ece", _number),
}


def table(runs: Runs) -> Table:
    """The runs side by side, one line per quantity."""
    result = Table()
    result.add_column("")
    for label in runs:
        result.add_column(label, justify="right")
    for name, cells in quantities(runs).items():
        result.add_row(name, *cells)
    return result


def quantities(runs: Runs) -> dict[str, list[str]]:
    """What is compared of runs, as text: by name, a cell for each run, "-" where it has none."""
    summaries = [summary for _, summary in runs.values()]
    rows = {name: _cells(summaries, key, text) for name, (key, text) in SCORES.items()}
    optional = {"joint log-likelihood per datum": "test_joint_log_likelihood", **PREDICTIVE}
    for name, key in optional.items():
        if any(key in s for s in summaries):
            rows[f"test {name}"] = _cells(summaries, key, _number)
    rows["training log-likelihood per datum"] = _cells(summaries, "train_log_likelihood", _number)
    rows["log evidence per datum"] = [_evidence(s) for s in summaries]
    if any(s.get("log_marglik_interval") for s in summaries):
        rows["exact log evidence is within"] = [_interval(s) for s in summaries]
    rows["evidence is"] = [status(s) for s in summaries]
    if any("samples_converged" in s for s in summaries):
        rows["largest residual of samples"] = [_residual(s) for s in summaries]
    if any("sigma" in s for s in summaries):
        rows["posterior width sigma"] = [_width(s) for s in summaries]
        rows["emphasis kappa"] = _cells(summaries, "kappa", lambda value: f"{value:.4g}")
    if any(s.get("temperature", 1.0) != 1 for s in summaries):
        rows["temperature"] = [f"{s.get('temperature', 1.0):.4g}" for s in summaries]
    rows["seconds"] = _cells(summaries, "seconds_total", lambda value: f"{value:.1f}")
    return rows


def _cells(summaries: list[Metrics], key: str, text: Callable[[float], str]) -> list[str]:
    values = [summary.get(key) for summary in summaries]
    return ["-" if value is None else text(value) for value in values]


def _evidence(summary: Metrics) -> str:
    error = summary.get("log_marglik_error")
    (value,) = _cells([summary], "log_marglik", _number)
    return f"{value} ± {error:.4f}" if error else value


def _interval(summary: Metrics) -> str:
    interval = summary.get("log_marglik_interval")
    return f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "-"


def _residual(summary: Metrics) -> str:
    if "samples_converged" not in summary:
        return "-"
    mark = "" if summary["samples_converged"] else " (not converged)"
    return f"{summary['sample_residual']:.2g}{mark}"


def status(summary: Metrics) -> str:
    """What the number called evidence is, in words."""
    words = {"exact": "exact", "bound": "a lower bound", "approximation": "an approximation"}
    found = words.get(summary.get("log_marglik_status", ""))
    if found is None:
        return "-"
    kind = METHODS.named(summary["method"]).evidence_kind
    return found + (f" ({kind})" if kind else "")


def _width(summary: Metrics) -> str:
    """Standard deviations of a variational posterior, least and largest where tensors differ."""
    widths = summary.get("sigma", {}).values()
    if not widths:
        return "-"
    least = f"{min(widths):.3g}"
    largest = f"{max(widths):.3g}"
    return least if least == largest else f"{least} to {largest}"


def show(runs: Runs) -> None:
    """Print the table."""
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(runs))


def save(
    runs: Runs, path: Path, *, augment: nn.Module | None = None, example: Tensor | None = None
) -> None:
    """Draw the figure into a file; a full disk is reported and costs the figure only."""
    try:
        figure(runs, path, augment=augment, example=example)
        print(f"figure: {path}")
    except OSError as error:
        print(f"warning: {path} cannot be written ({error.strerror or error})", file=sys.stderr)


def figure(
    runs: Runs, path: Path, *, augment: nn.Module | None = None, example: Tensor | None = None
) -> None:
    """Curves over epochs, the prior of every layer, reliability, and the learned augmentation."""
    rows = 1 if augment is None or example is None else 2
    reliable = _with_reliability(runs)
    widths = [1, 1, 1.1] + [0.9] * (reliable is not None)
    with plt.rc_context(STYLE):
        picture = plt.figure(figsize=(10 * sum(widths) / 3.1, 3.4 * rows), layout="constrained")
        try:
            grid = picture.add_gridspec(rows, len(widths), width_ratios=widths)
            panels = [picture.add_subplot(grid[0, column]) for column in range(len(widths))]
            _curve(panels[0], runs, "log_marglik", "log evidence per datum")
            _curve(panels[1], runs, "test_log_likelihood", "test log-likelihood per datum")
            _precisions(panels[2], runs)
            if reliable is not None:
                _reliability(panels[3], reliable, runs[reliable][1])
            if augment is not None and example is not None:
                _ranges(picture.add_subplot(grid[1, 0]), runs)
                _strip(picture.add_subplot(grid[1, 1:]), augment, example)
            picture.savefig(path)
        finally:
            plt.close(picture)


def _curve(axes: Axes, runs: Runs, key: str, title: str) -> None:
    """A quantity of every run over the epochs; a single last value is a dashed line."""
    shown = []
    for (label, (epochs, summary)), colour in zip(runs.items(), COLOURS, strict=False):
        positions, values = course(epochs, key)
        final = summary[key]
        name = f"{label}: {final:.3f}"
        if values:
            axes.plot(positions, values, color=colour, label=name, linewidth=1.4)
        else:
            axes.axhline(final, color=colour, label=name, linewidth=1.2, linestyle="--")
        interval = summary.get(f"{key}_interval")
        if interval:  # of the final value
            axes.axhspan(*interval, color=colour, alpha=0.12, linewidth=0)
            shown.extend(interval)
        shown.append(final)
        shown.extend(values)
    axes.set_xlabel("epoch")
    banded = any(summary.get(f"{key}_interval") for _, summary in runs.values())
    axes.set_title(f"{title} (band: final)" if banded else title)
    finals = [summary[key] for _, summary in runs.values()]
    axes.set_ylim(*window(shown, finals))
    last = max((m["epoch"] for epochs, _ in runs.values() for m in epochs), default=1)
    axes.set_xlim(0, last)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _legend_below(axes, columns=2 if max(map(len, runs)) <= SHORT else 1)


def course(lines: list[Metrics], key: str) -> tuple[list[int], list[Any]]:
    """Where a quantity was recorded, and its values there."""
    recorded = [line for line in lines if line.get(key) is not None]
    positions = [int(line.get("epoch") or line.get("step") or 0) for line in recorded]
    return positions, [line[key] for line in recorded]


def window(values: list[float], finals: list[float]) -> tuple[float, float]:
    """Limits that show all but the first steep part of a rise, and where every run ends."""
    ordered = sorted(values)
    low = min([ordered[len(ordered) // 10], *finals])
    high = max(ordered)
    room = 0.08 * max(high - low, 1e-3)
    return low - room, high + room


def _precisions(axes: Axes, runs: Runs) -> None:
    """Prior precision of every parameter tensor, and where it started if learned by steps."""
    label, (_, summary) = next(iter(runs.items()))
    precisions = summary["prior_precision"]
    start = summary["initial_prior_precision"]
    named = len(precisions) <= NAMED_TENSORS
    # a logarithm of 0 cannot be drawn
    values = [max(value, 1e-30) for value in precisions.values()]
    weights = [i for i, name in enumerate(precisions) if name.endswith("weight")]
    others = [i for i in range(len(precisions)) if i not in weights]
    for kind, tensors, colour, marker in (
        ("weights", weights, COLOURS[0], "o"),
        ("biases, scalars", others, COLOURS[1], "s"),
    ):
        if tensors:
            learned = [values[i] for i in tensors]
            size = 22 if named else 10
            axes.scatter(learned, tensors, color=colour, marker=marker, s=size, label=kind)
            if named and start is not None:
                axes.hlines(tensors, start, learned, color=colour, linewidth=1.2)
    if start is not None:
        axes.axvline(start, color="0.5", linewidth=1, linestyle=":", label="start", zorder=0)
        values = [start, *values]
    _logarithmic(axes, values)
    axes.invert_yaxis()
    if named:
        axes.set_yticks(list(range(len(precisions))), list(precisions))
    else:
        axes.set_ylabel("parameter tensor, input to output")
    what = "prior precision" if len(label) > SHORT else "prior precision of each tensor"
    axes.set_title(f"{what} ({label})")
    _legend_below(axes, columns=3)


def _with_reliability(runs: Runs) -> str | None:
    """The first run whose posterior made predictions."""
    found = (label for label, (_, summary) in runs.items() if summary.get("reliability"))
    return next(found, None)


def _reliability(axes: Axes, label: str, summary: Metrics) -> None:
    """How often predictions are right, against how sure they are."""
    axes.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle=":")
    names = {"network": "network", "posterior": "posterior (probit)"}
    for (kind, bins), colour in zip(summary["reliability"].items(), COLOURS, strict=False):
        confidence, accuracy, share = zip(*bins, strict=True)
        axes.plot(confidence, accuracy, color=colour, linewidth=1.2, label=names[kind])
        sizes = [4 + 60 * part for part in share]
        axes.scatter(confidence, accuracy, s=sizes, color=colour, alpha=0.7, linewidth=0)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence", ylabel="share that is right")
    axes.set_title(f"reliability ({label})" if len(label) <= SHORT else "reliability on test data")
    _legend_below(axes, columns=2)


def _logarithmic(axes: Axes, values: list[float]) -> None:
    """A logarithmic horizontal axis from a power of ten below all values to one above."""
    low = math.floor(math.log10(min(values)) - 0.05)
    high = math.ceil(math.log10(max(values)) + 0.05)
    axes.set_xscale("log")
    axes.set_xlim(10.0**low, 10.0**high)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend_below(axes: Axes, columns: int, handlelength: float = 1.5) -> None:
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=columns,
        handlelength=handlelength,
        columnspacing=1.2,
    )


def _ranges(axes: Axes, runs: Runs) -> None:
    """The learned range of each transformation over the epochs."""
    epochs = next(iter(runs.values()))[0]
    points = list(zip(*course(epochs, "augmentation"), strict=True))
    styles = ("-", "--", "-", ":", "-.", "--")
    for index, (name, style) in enumerate(zip(RANGES, styles, strict=True)):
        axes.plot(
            [epoch for epoch, _ in points],
            [abs(eta[index]) for _, eta in points],
            linestyle=style,
            color=COLOURS[index],
            label=RANGE_LABELS[name],
            linewidth=1.4,
        )
    rotation = RANGES.index("rotation")
    if max((abs(eta[rotation]) for _, eta in points), default=0) > 1:
        axes.axhline(math.pi, color="0.5", linewidth=1, linestyle=":")
        axes.annotate(
            "π: every angle", (0.02, math.pi), (0, 3), axes.get_yaxis_transform(), "offset points"
        )
        axes.set_ylim(top=1.12 * math.pi)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_title("learned ranges (rotation in radians)")
    _legend_below(axes, columns=3, handlelength=2)


def pictures(
    augment: nn.Module, example: Tensor, shown: int, columns: int
) -> tuple[Tensor, tuple[int, int], int]:
    """A sheet [height, width, 3] of an input and copies of it, the size of each and its margin.

    The copies are the same for every augmentation but for their ranges.
    """
    original = example.unsqueeze(0)
    with torch.no_grad():
        draws = [augmented(augment, original, seed)[0] for seed in range(shown)]
    copies = torch.cat(draws)[:shown]
    images = torch.cat([original, copies]).float().cpu()
    low = images.amin()
    high = images.amax()
    images = (images - low) / (high - low).clamp_min(1e-6)
    images = images.permute(0, 2, 3, 1)
    if images.shape[3] == 1:
        images = images.expand(-1, -1, -1, 3)
    gap = max(1, images.shape[1] // 14)
    framed = nn.functional.pad(images, (0, 0, gap, gap, gap, gap), value=1.0)
    sheet = torch.cat([torch.cat(list(row), 1) for row in framed.split(columns)])
    return sheet, (framed.shape[1], framed.shape[2]), gap


def _strip(
    axes: Axes, augment: nn.Module, example: Tensor, shown: int = 23, columns: int = 8
) -> None:
    """An input, then copies drawn from the learned augmentation, as a sheet of pictures."""
    sheet, frame_size, gap = pictures(augment, example, shown, columns)
    axes.imshow(sheet.numpy(), interpolation="nearest")
    h, w = frame_size
    frame = Rectangle(
        (gap / 2, gap / 2), w - gap - 1, h - gap - 1, fill=False, edgecolor=COLOURS[1], linewidth=2
    )
    axes.add_patch(frame)
    axes.set_title("a training input (framed) and draws from the learned augmentation")
    axes.axis("off")
