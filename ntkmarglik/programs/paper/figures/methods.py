"""Test log-likelihood and evidence of every estimator, side by side."""

from __future__ import annotations

from pathlib import Path

from ntkmarglik.programs.paper.figures.style import rows_of, sheet
from ntkmarglik.runs.records import Row, grouped, mean_and_error, values
from ntkmarglik.runs.report import COLOURS

COLUMNS = {"test_log_likelihood": "test log-likelihood", "log_marglik": "log evidence / datum"}


def methods(folder: Path, target: Path) -> None:
    """Mean and standard error over seeds, a row per data set."""
    problems = grouped(rows_of(folder, "methods.csv"), "dataset", "n_data", "model")
    with sheet(target, len(problems), 2, (3.5, 0.25 + 1.55)) as grid:
        for line, ((dataset, n_data, model), rows) in zip(grid, problems.items(), strict=True):
            labels = list(dict.fromkeys(map(_label, rows)))
            for axes, (column, title) in zip(line, COLUMNS.items(), strict=True):
                for y, label in enumerate(labels):
                    mean, error = mean_and_error(
                        values([r for r in rows if _label(r) == label], column)
                    )
                    colour = COLOURS[1] if label == "map" else COLOURS[0]
                    axes.errorbar(
                        mean, y, xerr=error or 0, fmt="o", color=colour, capsize=2, markersize=4
                    )
                axes.set_yticks(
                    range(len(labels)), labels if axes is line[0] else [""] * len(labels)
                )
                axes.set_ylim(len(labels) - 0.5, -0.5)
                axes.set_title(f"{dataset}-{n_data}, {model}: {title}", fontsize=8)
                axes.locator_params(axis="x", nbins=5)
                axes.grid(axis="x", color="0.9")


def _label(row: Row) -> str:
    return row["estimator"] + (", affine" if row["augment"] == "affine" else "")


FIGURES = {"methods": methods}
