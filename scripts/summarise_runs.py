"""One row per run folder as csv, one per evaluated epoch, and a Markdown table of means over seeds.

python scripts/summarise_runs.py runs/bound-prior --csv illustrations/data/runs_bound_prior.csv \
    --traces illustrations/data/traces_bound_prior.csv
"""

from __future__ import annotations

import argparse
import sys

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import source, target_file
from ntkmarglik.runs import records

SHOWN = {
    "test_log_likelihood": 3,
    "test_accuracy": 2,
    "test_ece": 3,
    "train_log_likelihood": 3,
    "log_marglik": 3,
}


def table(rows: list[records.Row]) -> str:
    """Means over seeds with standard errors, in Markdown."""
    headings = (
        "data, model",
        "estimator",
        "seeds",
        "test log-lik.",
        "test acc. %",
        "test ECE",
        "train log-lik.",
    )
    lines = [f"| {' | '.join(headings)} | log evidence / datum |", "|---" * 8 + "|"]
    groups = records.grouped(rows, "dataset", "model", "n_data", "estimator", "augment")
    for (dataset, model, n_data, estimator, augment), members in groups.items():
        label = estimator + (", affine" if augment == "affine" else "")
        percent = {"test_accuracy": 100}
        cells = [
            records.as_text(
                [percent.get(name, 1) * value for value in records.values(members, name)], digits
            )
            for name, digits in SHOWN.items()
        ]
        status = members[0]["log_marglik_status"]
        status = "" if status == "approximation" else f" ({status})"
        lines.append(
            f"| {dataset}-{n_data}, {model} | {label} | {len(members)} | "
            f"{' | '.join(cells)}{status} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=source, help="run folders, or folders of run folders"
    )
    parser.add_argument("--csv", type=target_file, help="also write one row per run here")
    parser.add_argument(
        "--traces", type=target_file, help="also write one row per evaluated epoch here"
    )
    arguments = parser.parse_args()
    folders = records.run_folders(arguments.runs)
    if not folders:
        parser.error("none of these folders holds a finished run (summary.json)")
    rows = [records.run_row(folder) for folder in folders]
    if arguments.csv:
        records.write(arguments.csv, records.RUN_COLUMNS, rows)
    if arguments.traces:
        traces = [row for folder in folders for row in records.trace_rows(folder)]
        records.write(arguments.traces, records.TRACE_COLUMNS, traces)
    print(table(rows))


if __name__ == "__main__":
    sys.exit(exit_code(main))
