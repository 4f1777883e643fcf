"""Draw the figures of illustrations/ again from its small csv files: no account, no network.

python generate_illustration_figures.py [--figures methods scaling]
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.layout_engine import ConstrainedLayoutEngine

HERE = Path(__file__).parent / "illustrations"


def methods(target: Path) -> None:
    """Test log-likelihood and evidence of every estimator, mean and standard error over seeds, a row per data set."""
    with (HERE / "data" / "methods.csv").open() as file:
        rows = list(csv.DictReader(file))
    problems = list(dict.fromkeys((r["dataset"], r["n_data"], r["model"]) for r in rows))
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150})
    figure, grid = plt.subplots(
        len(problems), 2, figsize=(7, 0.7 + 1.5 * len(problems)), squeeze=False, layout="constrained"
    )
    for line, problem in zip(grid, problems, strict=True):
        own = [r for r in rows if (r["dataset"], r["n_data"], r["model"]) == problem]
        labels = list(dict.fromkeys(_label(r) for r in own))
        for axes, column, title in zip(
            line, ("test_log_likelihood", "log_marglik"), ("test log-likelihood", "log evidence / datum"), strict=True
        ):
            for y, label in enumerate(labels):
                values = [float(r[column]) for r in own if _label(r) == label]
                error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
                colour = "#D55E00" if label == "map" else "#0072B2"
                axes.errorbar(statistics.mean(values), y, xerr=error, fmt="o", color=colour, capsize=2, markersize=4)
            axes.set_yticks(range(len(labels)), labels if column == "test_log_likelihood" else [""] * len(labels))
            axes.set_ylim(len(labels) - 0.5, -0.5)
            axes.set_title(f"{problem[0]}-{problem[1]}, {problem[2]}: {title}", fontsize=8)
            axes.locator_params(axis="x", nbins=5)
            axes.grid(axis="x", color="0.9")
    figure.savefig(target)
    plt.close(figure)


def _label(row: dict[str, str]) -> str:
    return row["estimator"] + (", affine" if row["augment"] == "affine" else "")


ESTIMATORS = {"ntk-S-1": "#0072B2", "kfac-S-1": "#D55E00", "kfac-S-C": "#009E73"}
MODELS = {"mininet": ("MiniNet", "o", "--"), "resnet": ("ResNet-18", "s", "-")}
AXES = {"S": "data points S", "A": "augmented copies A", "N": "data set size N", "C": "outputs C"}


def predicted(axis: str, column: str, estimator: str, value: float) -> float:
    """How a measurement should grow, up to a factor."""
    if column == "peak_mb":
        return value if axis == "S" and estimator == "ntk-S-1" else 1.0
    if axis == "C":
        return 3 + value if estimator.endswith("C") else 1.0
    return 1.0 if axis == "N" else value


def scaling(target: Path, source: Path = HERE / "data" / "scaling.csv") -> None:
    """Time and memory of an estimate with its gradient against S, A, N and C.

    Grey is the predicted growth, through the largest case for time and through the smallest for memory.
    """
    with source.open() as file:
        rows = list(csv.DictReader(file))
    columns = {"cpu_seconds": "CPU seconds"}
    if all(r["peak_mb"] != "nan" for r in rows):  # memory can be left out of a run
        columns["peak_mb"] = "peak memory, MB"
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150})
    figure, grid = plt.subplots(
        len(columns), 4, figsize=(10, 2.2 * len(columns)), sharey="row", sharex="col", squeeze=False,
        layout=ConstrainedLayoutEngine(rect=(0, 0, 1, 0.94)),
    )  # fmt: skip
    for line, (column, label) in zip(grid, columns.items(), strict=True):
        for axes, axis in zip(line, AXES, strict=True):
            own = [r for r in rows if r["axis"] == axis]
            for model, estimator in dict.fromkeys((r["model"], r["estimator"]) for r in own):
                points = [r for r in own if (r["model"], r["estimator"]) == (model, estimator)]
                x, y = [float(r["value"]) for r in points], [float(r[column]) for r in points]
                growth = [predicted(axis, column, estimator, v) for v in x]
                anchor = 0 if column == "peak_mb" else -1  # small cases are slowed by fixed costs, not by the growth
                expected = [y[anchor] * g / growth[anchor] for g in growth]
                axes.plot(x, expected, color="0.7", linewidth=0.8, zorder=1)
                _, marker, dashes = MODELS[model]
                axes.plot(x, y, dashes, marker=marker, color=ESTIMATORS[estimator], markersize=3.5, linewidth=1.2)
            axes.set_xscale("log")
            axes.set_yscale("log")
            for model in dict.fromkeys(r["model"] for r in own):  # named below its lowest curve, at the right
                last = [r for r in own if r["model"] == model and r["value"] == own[-1]["value"]]
                place = (float(own[-1]["value"]), min(float(r[column]) for r in last))
                below = (0, -13 if column == "peak_mb" else -26)
                style = {"ha": "right", "color": "0.25", "fontsize": 7}
                axes.annotate(MODELS[model][0], place, below, textcoords="offset points", **style)
            if axis != "N":
                ticks = sorted({int(r["value"]) for r in own})
                axes.set_xticks(ticks, [str(v) for v in ticks])
                axes.minorticks_off()
            axes.grid(color="0.93")
            axes.set_axisbelow(True)
        line[0].set_ylabel(label)
    for axes, name in zip(grid[-1], AXES.values(), strict=True):
        axes.set_xlabel(name)
    for number, (estimator, colour) in enumerate({**ESTIMATORS, "predicted growth": "0.6"}.items()):
        grid[0, 0].annotate(
            estimator, (0, 1), (58 * number, 8), "axes fraction", "offset points", color=colour, weight="bold"
        ).set_in_layout(False)  # it may reach over the neighbouring panels
    figure.savefig(target)
    plt.close(figure)


FIGURES: dict[str, Callable[[Path], None]] = {"methods": methods, "scaling": scaling}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", choices=list(FIGURES), default=list(FIGURES), help="which to draw")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the png files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.figures:
        FIGURES[name](arguments.out / f"{name}.png")
        print(arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()
