"""Draw the figures of illustrations/ from its small csv files: no account, no network.

ntk-marglik figures [--figures methods 8 pareto_lila]
ntk-marglik figures --source runs --runs runs/small --data illustrations/data
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.paper.figures import FIGURES, NUMBERS
from ntkmarglik.runs.records import collect

HOME = Path("illustrations")  # of a clone of the repository


def refresh(source: str, runs: Path, project: str, data: Path, *, keep: bool) -> None:
    """Write the csv files of `data` anew from run folders, here or at wandb."""
    if source == "runs":
        collect(runs, data, keep=keep)
    elif source == "wandb":
        from ntkmarglik.runs.wandb_runs import download

        with tempfile.TemporaryDirectory() as folder:
            download(project, Path(folder))
            collect(Path(folder), data, keep=keep)


def draw(names: list[str], data: Path, out: Path) -> int:
    """Draw the named figures, or all that have data; returns how many named ones were not drawn."""
    failed = 0
    out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(NUMBERS.get(name, name) for name in names) or FIGURES:
        try:
            FIGURES[name](data, out / f"{name}.png")
            print(out / f"{name}.png")
        except NtkMarglikError as error:
            failed += bool(names)
            print(f"{'error' if names else 'left out'}: {name}: {error}", file=sys.stderr)
    return failed


def main(arguments: list[str] | None = None, home: Path = HOME) -> int:
    """The command line; returns the exit code.

    home: where pictures are, with their csv files in data/.
    """
    given = _given(arguments, home)
    try:
        refresh(given.source, given.runs, given.wandb_project, given.data, keep=given.keep)
    except NtkMarglikError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 2 if draw(given.figures, given.data, given.out) else 0


def _given(arguments: list[str] | None, home: Path) -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--figures",
        nargs="+",
        choices=[*FIGURES, *NUMBERS],
        default=[],
        metavar="NAME",
        help=f"{', '.join(FIGURES)}, or a number of the paper: {', '.join(NUMBERS)}; by default "
        "all that have data",
    )
    parser.add_argument("--out", type=Path, default=home, help="folder for the png files")
    parser.add_argument("--data", type=Path, default=home / "data", help="folder of the csv files")
    parser.add_argument(
        "--source",
        choices=("csv", "runs", "wandb"),
        default="csv",
        help="first write the csv from these",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        help="folder with a folder of runs per experiment",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="add to the csv files: rows of runs that are not among these stay",
    )
    parser.add_argument(
        "--wandb-project", default="ntk-marglik", help="entity/project, for --source wandb"
    )
    return parser.parse_args(arguments)
