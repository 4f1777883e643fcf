"""What a person sees at the end of a fine-tuning run: a table, and test accuracy against time."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.report import COLOURS, PREDICTIVE, STYLE, WIDTH


def table(summary: Metrics) -> Table:
    """One line per quantity."""
    result = Table()
    result.add_column("")
    result.add_column(summary["method"], justify="right")
    variance = summary["prior_variance"]
    rows = {
        "test accuracy": f"{100 * summary['test_accuracy']:.2f} %",
        "test accuracy, mean over classes": f"{100 * summary['test_macro_accuracy']:.2f} %",
        "test log-likelihood per datum": f"{summary['test_log_likelihood']:.4f}",
        "test calibration error": f"{summary['test_ece']:.4f}",
        **{
            f"test {label}": f"{summary[key]:.4f}"
            for label, key in PREDICTIVE.items()
            if key in summary
        },
        "training log-likelihood per datum": f"{summary['train_log_likelihood']:.4f}",
        "training objective per datum": f"{summary['objective']:.4f}",
        "learning rate": f"{summary['rate']:g}",
        "prior variance, backbone": f"{variance['backbone']:.3g}",
        "prior variance, head": f"{variance['head']:.3g}",
    }
    if "sigma" in summary:
        rows |= {
            "posterior width sigma": f"{summary['sigma']:.3g}",
            "emphasis kappa": f"{summary['kappa']:.4g}",
        }
    rows |= {"fits": str(len(summary["fits"])), "seconds": f"{summary['seconds_total']:.1f}"}
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def show(summary: Metrics) -> None:
    """Print the table."""
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(summary))


def save(method: str, lines: list[Metrics], summary: Metrics, path: Path) -> None:
    """Draw the figure into a file; a full disk is reported and costs the figure only."""
    try:
        figure(method, lines, summary, path)
        print(f"figure: {path}")
    except OSError as error:
        print(f"warning: {path} cannot be written ({error.strerror or error})", file=sys.stderr)


def figure(method: str, lines: list[Metrics], summary: Metrics, path: Path) -> None:
    """Test accuracy and log-likelihood of every fit over time; the chosen fit stands out."""
    titles = {
        "test_accuracy": "test accuracy",
        "test_log_likelihood": "test log-likelihood per datum",
    }
    with plt.rc_context(STYLE):
        picture, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
        try:
            for panel, (key, title) in zip(axes, titles.items(), strict=True):
                for number in dict.fromkeys(line["fit"] for line in lines):
                    points = [
                        (m["seconds"], m[key]) for m in lines if m["fit"] == number and key in m
                    ]
                    chosen = number == summary["fit"]
                    if points:
                        panel.plot(
                            *zip(*points, strict=True),
                            color=COLOURS[0] if chosen else "0.7",
                            marker=".",
                            linewidth=1.6 if chosen else 0.9,
                            zorder=2 if chosen else 1,
                        )
                panel.set_xlim(0)
                panel.set_xlabel("seconds of training")
                panel.set_title(title)
            axes[0].plot(
                [],
                [],
                color=COLOURS[0],
                label=f"{method}: chosen fit, {100 * summary['test_accuracy']:.1f} %",
            )
            axes[0].plot([], [], color="0.7", label="other fits")
            axes[0].legend(loc="lower right")
            picture.savefig(path)
        finally:
            plt.close(picture)
