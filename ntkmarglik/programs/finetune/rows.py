"""Rows of tables and figures, one per finished fine-tuning run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.runs.folder import read_config, read_summary
from ntkmarglik.runs.records import Row, as_text, grouped, values

COLUMNS = (
    "dataset",
    "classes",
    "checkpoint",
    "n_data",
    "prior",
    "method",
    "seed",
    "test_accuracy",
    "test_log_likelihood",
    "sampled_test_log_likelihood",
    "test_ece",
    "train_log_likelihood",
    "seconds_total",
    "seconds_cpu",
    "n_fits",
    "rate",
    "variance_backbone",
    "variance_head",
    "sigma",
    "kappa",
    "command",
)
SHOWN = {
    "test_accuracy": 1,
    "test_log_likelihood": 3,
    "sampled_test_log_likelihood": 3,
    "test_ece": 3,
    "seconds_total": 1,
    "seconds_cpu": 1,
}
PROBLEM = ("dataset", "classes", "checkpoint", "n_data")
COSTS = ("seconds_total", "seconds_cpu", "n_fits")


def run_row(folder: Path) -> Row:
    """The summary of one run, with the command that makes it."""
    summary = read_summary(folder)
    if summary is None:
        raise NtkMarglikError(
            f"{folder} holds no finished run (summary.json); finish it with --resume."
        )
    settings = read_config(folder)
    default, free = FinetuneConfig().flat(), FinetuneConfig().free()
    known = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in settings.items()
        if k in default and k not in free
    }
    checkpoint = Path(summary["checkpoint"])
    if checkpoint.is_absolute():  # where a folder was is not part of what it is
        known["checkpoint"] = f"checkpoints/{checkpoint.name}"
    variance = summary["prior_variance"]
    held_out = summary["held_out_score"]
    return {
        **summary,
        "prior": summary.get("prior", "l2-sp"),  # which older runs all have
        "score": summary["objective"] if held_out is None else held_out,
        "classes": " ".join(map(str, summary["classes"])),
        "checkpoint": checkpoint.name,
        "n_fits": len(summary["fits"]),
        "variance_backbone": variance["backbone"],
        "variance_head": variance["head"],
        "command": FinetuneConfig().updated(**known).command(),
    }


def over_rates(rows: Iterable[Row]) -> list[Row]:
    """Of the runs of one search, each with its own learning rates, the one of the highest score.

    It has the time and the fits of all of them.
    """
    chosen = []
    for members in grouped(rows, *PROBLEM, "prior", "method", "seed").values():
        best = max(members, key=lambda row: row["score"])
        chosen.append({**best, **{name: sum(row[name] for row in members) for name in COSTS}})
    return chosen


def table(rows: list[Row]) -> str:
    """Means over seeds with standard errors, in Markdown."""
    headings = (
        "data",
        "method",
        "seeds",
        "test acc. %",
        "test log-lik.",
        "averaged",
        "test ECE",
        "seconds",
        "CPU seconds",
        "fits",
    )
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for problem, members in grouped(rows, *PROBLEM, "prior", "method").items():
        dataset, classes, _, n_data, prior, method = problem
        method = method if prior == "l2-sp" else f"{method}, {prior}"
        name = f"{dataset}-{n_data}" + (f", classes {classes}" if classes else "")
        percent = {"test_accuracy": 100}
        cells = [
            as_text([percent.get(c, 1) * v for v in values(members, c)], d)
            for c, d in SHOWN.items()
        ]
        lines.append(
            f"| {name} | {method} | {len(members)} | {' | '.join(cells)} | {members[0]['n_fits']} |"
        )
    return "\n".join(lines)
