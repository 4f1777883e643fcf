"""What a person sees at the end of a run: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from asdl_marglik import augmented
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .augment import RANGES

Metrics = dict[str, Any]
Runs = dict[str, tuple[list[Metrics], Metrics]]  # label -> (epochs, summary)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # distinguishable with any colour vision


def table(runs: Runs) -> Table:
    """The runs side by side."""
    result = Table(title="Learned hyperparameters against the MAP baseline" if len(runs) > 1 else None)
    for heading in (
        "",
        "test accuracy",
        "test log-lik.",
        "test ECE",
        "train log-lik.",
        "log evidence / datum",
        "seconds",
    ):
        result.add_column(heading, justify="left" if not heading else "right")
    for label, (_, s) in runs.items():
        error = s.get("log_marglik_error")
        evidence = f"{s['log_marglik']:.4f}" + (f" ± {error:.4f}" if error else "") + f" ({s['log_marglik_status']})"
        result.add_row(
            label, f"{100 * s['test_accuracy']:.2f} %", f"{s['test_log_likelihood']:.4f}", f"{s['test_ece']:.4f}",
            f"{s['train_log_likelihood']:.4f}", evidence, f"{s['seconds_total']:.1f}",
        )  # fmt: skip
    return result


def show(runs: Runs) -> None:
    Console(width=None if Console().is_terminal else 120).print(table(runs))


def figure(runs: Runs, path: Path, *, augment: nn.Module | None = None, example: Tensor | None = None) -> None:
    """Curves over epochs, the learned prior of every layer, and what the learned augmentation does to an input."""
    with_augmentation = augment is not None and example is not None
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150})
    picture = plt.figure(figsize=(9, 5.2 if with_augmentation else 3.1), layout="constrained")
    grid = picture.add_gridspec(2 if with_augmentation else 1, 3, width_ratios=[1, 1, 1.25])
    _curve(picture.add_subplot(grid[0, 0]), runs, "log_marglik", "log evidence / datum")
    _curve(picture.add_subplot(grid[0, 1]), runs, "test_log_likelihood", "test log-likelihood / datum")
    _precisions(picture.add_subplot(grid[0, 2]), runs)
    if with_augmentation:
        assert augment is not None and example is not None
        _ranges(picture.add_subplot(grid[1, 0]), runs)
        _strip(picture.add_subplot(grid[1, 1:]), augment, example)
    picture.savefig(path)
    plt.close(picture)


def _curve(axes: Axes, runs: Runs, key: str, label: str) -> None:
    for (name, (epochs, summary)), colour in zip(runs.items(), COLOURS, strict=False):
        points = [(m["epoch"], m[key]) for m in epochs if m.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=name, linewidth=1.3)
        elif key in summary:  # only the final value is known
            axes.axhline(summary[key], color=colour, label=f"{name} (end)", linewidth=1, linestyle="--")
    axes.set_xlabel("epoch")
    axes.set_title(label)
    values = [m[key] for epochs, _ in runs.values() for m in epochs if m.get(key) is not None]
    if len(values) > 4:  # the first epochs are far below: they would flatten everything else
        low, high = sorted(values)[len(values) // 10], max(values)
        room = max(high - low, 1e-3)
        finals = [s[key] for _, s in runs.values() if key in s]
        axes.set_ylim(min([low, *finals]) - 0.15 * room, max([high, *finals]) + 0.15 * room)
    axes.legend(frameon=False)


def _precisions(axes: Axes, runs: Runs) -> None:
    name, (_, summary) = next(iter(runs.items()))
    precisions = summary["prior_precision"]
    if len(precisions) <= 16:
        axes.barh(range(len(precisions)), list(precisions.values()), color=COLOURS[0])
        axes.set_yticks(range(len(precisions)), list(precisions), fontsize=6)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.axvline(summary["initial_prior_precision"], color="0.4", linewidth=0.8, linestyle=":")
    else:  # too many tensors for names: weights and biases along the depth of the network
        for kind, colour, marker in (("weight", COLOURS[0], "o"), ("other", COLOURS[1], "x")):
            chosen = [
                (i, p) for i, (n, p) in enumerate(precisions.items()) if n.endswith("weight") == (kind == "weight")
            ]
            axes.plot(*zip(*chosen, strict=True), marker, color=colour, markersize=3, label=kind)
        axes.set_yscale("log")
        axes.set_xlabel("parameter tensor, input to output")
        axes.legend(frameon=False)
    axes.set_title(f"prior precision ({name})")


def _ranges(axes: Axes, runs: Runs) -> None:
    epochs = next(iter(runs.values()))[0]
    points = [(m["epoch"], m["augmentation"]) for m in epochs if "augmentation" in m]
    styles = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
    for index, (name, style) in enumerate(zip(RANGES, styles, strict=True)):
        values = [abs(eta[index]) for _, eta in points]
        axes.plot([e for e, _ in points], values, linestyle=style, color=COLOURS[index % 4], label=name, linewidth=1.3)
    axes.set_xlabel("epoch")
    axes.set_title("learned range of each transformation")
    axes.legend(frameon=False, ncols=2, fontsize=6)


def _strip(axes: Axes, augment: nn.Module, example: Tensor, shown: int = 10) -> None:
    """The input, then copies drawn from the learned augmentation."""
    with torch.no_grad():
        copies = augmented(augment, example.unsqueeze(0), 0)[0, :shown]
    images = torch.cat([example.unsqueeze(0), copies]).float().cpu()
    low, high = images.amin(), images.amax()
    images = ((images - low) / (high - low).clamp_min(1e-6)).permute(0, 2, 3, 1)
    gap = torch.ones(images.shape[1], 2, images.shape[3])
    row = torch.cat([part for image in images for part in (image, gap)], 1)
    axes.imshow(row.expand(-1, -1, 3) if row.shape[2] == 1 else row, interpolation="nearest")
    axes.set_title("an input (left) and draws from the learned augmentation")
    axes.axis("off")
