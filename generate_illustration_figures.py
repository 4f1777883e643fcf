"""Draw the figures of illustrations/ again from its small csv files: no account, no network.

python generate_illustration_figures.py [--figures methods]
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


FIGURES: dict[str, Callable[[Path], None]] = {"methods": methods}


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
