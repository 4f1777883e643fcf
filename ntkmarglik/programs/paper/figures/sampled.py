"""What samples of the posterior choose and predict, beside the network itself and the bounds."""

from __future__ import annotations

from pathlib import Path

from matplotlib.ticker import NullFormatter

from ntkmarglik.programs.paper.figures.style import rows_of, sheet
from ntkmarglik.runs.records import Row
from ntkmarglik.runs.report import COLOURS

PRECISIONS = {
    "outputs_precision": ("precision by samples", COLOURS[0], "o"),
    "averaged_precision": ("precision by samples, averaged curvature", COLOURS[4], "D"),
    "precision_ntk": ("precision by the NTK bound", COLOURS[2], "s"),
    "precision_kfac": ("precision by KFAC", COLOURS[1], "^"),
    "initial_precision": ("precision in training", "#777777", "|"),
}
PREDICTIONS = {
    "map": ("network (MAP)", "#777777", "|"),
    "outputs_mc": ("samples", COLOURS[0], "o"),
    "averaged_mc": ("samples, averaged curvature", COLOURS[4], "D"),
}
PANELS = {
    "log_likelihood": "test log-likelihood",
    "joint": "joint test log-likelihood",
    "ece": "test calibration error",
}
CONVERGED = 0.1  # largest error of samples that can be trusted, in posterior standard deviations


def sampled(folder: Path, target: Path) -> None:
    """Precision, log-likelihood of labels alone and together, calibration: a line per data set."""
    rows = rows_of(folder, "sampled.csv")
    with sheet(target, 1, 1 + len(PANELS), (2.6, 1.2 + 0.5 * len(rows))) as grid:
        left, *others = grid[0]
        for y, row in enumerate(rows):
            for column, (label, colour, marker) in PRECISIONS.items():
                shown = label if y == 0 else None
                left.scatter(float(row[column]), y, color=colour, marker=marker, s=30, label=shown)
            for axes, key in zip(others, PANELS, strict=True):
                for name, (label, colour, marker) in PREDICTIONS.items():
                    value, named = float(row[f"{name}_{key}"]), y == 0 and axes is others[0]
                    axes.scatter(
                        value, y, color=colour, marker=marker, s=30, label=label if named else None
                    )
        left.set_xscale("log")
        for axes, title in zip(grid[0], ("prior precision", *PANELS.values()), strict=True):
            names = [
                f"{row['dataset']}-{row['n_data']}\n{row['model']}{_warning(row)}" for row in rows
            ]
            axes.set_yticks(range(len(rows)), names if axes is left else [""] * len(rows))
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_title(title)
            axes.grid(axis="x", color="0.9")
            axes.set_axisbelow(True)
            if axes is not left:
                axes.locator_params(axis="x", nbins=5)
        left.xaxis.set_minor_formatter(NullFormatter())
        left.set_xlim(0.5, 2 * max(float(row[column]) for row in rows for column in PRECISIONS))
        left.figure.legend(loc="outside lower center", ncols=4, fontsize=7)


def _warning(row: Row) -> str:
    """A warning that samples which solve their systems badly say little."""
    errors = [float(row[f"{curvature}_error"]) for curvature in ("outputs", "averaged")]
    return "\nnot converged" if max(errors) > CONVERGED else ""


FIGURES = {"sampled": sampled}
