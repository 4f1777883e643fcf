"""Estimators on growing subsets of transformed data (figures 7 and 14 to 16)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from ntkmarglik.programs.paper.figures.style import Label, colour_of, label_ends, rows_of, sheet
from ntkmarglik.runs.records import Row, grouped, mean_and_error, values

VARIANTS = {
    "": "original",
    "r90": "rotated (±90°)",
    "r180": "rotated",
    "translated": "translated",
    "scaled": "scaled",
}
NAMES = {
    "log_marglik": "log evidence / datum",
    "test_log_likelihood": "test log-likelihood",
    "test_accuracy": "test acc. %",
}
STYLES = {"N": ("black", "--", "s")}  # all data


def subsets(quantity: str, folder: Path, target: Path) -> None:
    """One quantity against the size of the subset, over seeds; a panel per transformation."""
    rows = sorted(
        rows_of(folder, "runs_cifar_subsets.csv"),
        key=lambda row: list(VARIANTS).index(_variant(row["dataset"])),
    )
    datasets = grouped(rows, "dataset")
    with sheet(target, 1, len(datasets), (2.0, 2.0), sharey="row") as (line,):
        ends = []
        for axes, ((dataset,), own) in zip(line, datasets.items(), strict=True):
            ends.append(_panel(axes, own, quantity))
            axes.set_title(f"{dataset.partition('_')[0]}, {VARIANTS[_variant(dataset)]}")
            axes.set_xlabel("training data N")
        line[0].set_ylabel(NAMES[quantity])
        label_ends(line[-1], ends[-1])


def _variant(dataset: str) -> str:
    return dataset.partition("_")[2]


def _panel(axes: Axes, rows: list[Row], quantity: str) -> list[Label]:
    ends = []
    for (label,), own in grouped(rows, "estimator").items():
        by_size = sorted((int(n), members) for (n,), members in grouped(own, "n_data").items())
        scale = 100 if quantity == "test_accuracy" else 1
        points = [
            (n, *mean_and_error([scale * v for v in values(members, quantity)]))
            for n, members in by_size
        ]
        colour, style, marker = STYLES.get(
            label.split("-")[1], (colour_of(label.split("-")[0]), "-", "o")
        )
        x, y, error = zip(*((n, mean, error or 0) for n, mean, error in points), strict=True)
        axes.errorbar(
            x,
            y,
            yerr=error,
            color=colour,
            linestyle=style,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            capsize=1.5,
        )
        ends.append(
            (y[-1], "KFAC, all data" if "-N-" in label else label.split()[0].upper(), colour)
        )
    sizes = sorted({int(row["n_data"]) for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{n // 1000}k" if n % 1000 == 0 else str(n) for n in sizes])
    axes.minorticks_off()
    axes.grid(axis="y", color="0.93")
    return ends


FIGURES: dict[str, Callable[[Path, Path], None]] = {
    "subsets": partial(subsets, "test_log_likelihood"),
    "subsets_evidence": partial(subsets, "log_marglik"),
    "subsets_accuracy": partial(subsets, "test_accuracy"),
}
