"""Fine-tuning: test accuracy and log-likelihood of every method against the time of its search."""

from __future__ import annotations

from pathlib import Path

from ntkmarglik.programs.finetune.rows import PROBLEM
from ntkmarglik.programs.paper.figures.style import rows_of, sheet
from ntkmarglik.runs.records import grouped, mean_and_error, values
from ntkmarglik.runs.report import COLOURS

METHODS = dict(
    zip(("de-elbo", "map-gs", "la-lml", "la-clml", "elbo", "map-bo"), COLOURS, strict=True)
) | {"map": "0.5"}
TITLES = {"test_accuracy": "test accuracy, %", "test_log_likelihood": "test log-likelihood"}
SCALE = {"test_accuracy": 100}


def finetune(folder: Path, target: Path) -> None:
    """Mean and standard error over training sets; a column per data set and size."""
    problems = grouped(rows_of(folder, "finetune.csv"), *PROBLEM)
    with sheet(target, 2, len(problems), (2.5, 2.3)) as grid:
        for column, (problem, rows) in zip(grid.T, problems.items(), strict=True):
            for axes, (quantity, title) in zip(column, TITLES.items(), strict=True):
                for (method,), members in grouped(rows, "method").items():
                    seconds, seconds_error = mean_and_error(values(members, "seconds_cpu"))
                    found = [SCALE.get(quantity, 1) * v for v in values(members, quantity)]
                    mean, error = mean_and_error(found)
                    axes.errorbar(
                        seconds,
                        mean,
                        xerr=seconds_error or 0,
                        yerr=error or 0,
                        fmt="o",
                        markersize=4,
                        capsize=2,
                        color=METHODS[method],
                        label=method,
                    )
                axes.margins(0.15)
                axes.set_xlim(left=0)
                axes.grid(color="0.92")
                axes.set_ylabel(title if axes in grid[:, 0] else "")
            column[0].set_title(f"{problem[0]}, N = {problem[3]}")
            column[1].set_xlabel("CPU seconds of the whole search")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        grid[0, 0].figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


FIGURES = {"finetune": finetune}
