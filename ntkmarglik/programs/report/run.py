"""From run folders to a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import source, target_file
from ntkmarglik.programs.report.folders import page_of
from ntkmarglik.runs import page


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Make the page of a run, or one page that compares several, from run folders."
    )
    parser.add_argument("runs", nargs="+", type=source, metavar="RUN", help="run folders")
    parser.add_argument(
        "--out",
        type=target_file,
        help=f"where to write; default: {page.FILE} of the run folder, or here for several",
    )
    given = parser.parse_args(arguments)
    return exit_code(lambda: report(given.runs, given.out))


def report(folders: list[Path], out: Path | None = None) -> Path:
    """Write the page of run folders; returns where it is."""
    target = out or (folders[0] / page.FILE if len(folders) == 1 else Path(page.FILE))
    target.write_text(page.rendered(page_of(folders)), encoding="utf-8")
    print(f"report: {target}")
    return target
