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
from ntkmarglik.runs.over_seeds import table


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
