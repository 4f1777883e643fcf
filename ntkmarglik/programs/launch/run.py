"""Run a file of commands as jobs, here or on a SLURM cluster, until every line is done.

    python scripts/generate_cifar_commands.py > scripts/cifar_commands.sh
    ntk-marglik launch scripts/cifar_commands.sh --executor slurm --gpus 1 --partition gpu \
        --time 12:00:00 --array

Finished lines are skipped, failed ones tried again from their checkpoints. Jobs do not need the
launcher: after Ctrl-C, or if it dies, they go on, and the same command finds them again; with
--stop it ends them. Logs and the list of jobs are in TABLE.launch/ beside the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.programs.finetune import rows as finetuning
from ntkmarglik.programs.launch.lines import FinetuneLine, Line, RunLine, read_lines
from ntkmarglik.programs.paper import tables as paper
from ntkmarglik.runs import over_seeds, records
from ntkmarglik.runs.folder import make_folder
from ntkmarglik.runs.lock import FolderLock

if TYPE_CHECKING:
    from ntkmarglik.programs.launch.executors import Executor
    from ntkmarglik.programs.launch.sweep import Sweep

LEFT_RUNNING = """
interrupted: submitted jobs go on, lines not yet submitted wait. The same command follows them
again and submits the rest; with --stop it ends the jobs."""


def minutes(text: str) -> int:
    """A time limit: minutes, or as SLURM writes it, [DAYS-]HOURS:MINUTES[:SECONDS]."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?|(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither minutes nor [DAYS-]HOURS:MINUTES[:SECONDS]"
        )
    days, hours, rest, seconds, only = (int(part or 0) for part in found.groups())
    return only or (24 * days + hours) * 60 + rest + (seconds > 0)


def count(text: str) -> int:
    """A number of jobs or cores."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def setting(text: str) -> tuple[str, str]:
    """A setting of SLURM, NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return f"slurm_{name.replace('-', '_')}", value


def executor(given: argparse.Namespace, lines: int) -> Executor:
    """Where the jobs run, as asked for."""
    from ntkmarglik.programs.launch.executors import Local, Slurm

    if given.executor == "slurm":
        asked = {
            "timeout_min": given.time,
            "gpus_per_node": given.gpus,
            "slurm_partition": given.partition,
        }
        return Slurm(
            given.max_parallel or lines,
            together=given.array,
            threads=given.cpus or 1,
            **{name: value for name, value in asked.items() if value is not None},
            **dict(given.slurm),
        )
    for flag in ("partition", "time", "array", "slurm"):
        if getattr(given, flag):
            raise NtkMarglikError(f"--{flag} is for --executor slurm.")
    visible, cores = _gpus(), os.cpu_count() or 1
    each = (1 if visible else 0) if given.gpus is None else given.gpus
    if each > len(visible):
        raise NtkMarglikError(f"--gpus {each}, but this machine has {len(visible)}.")
    most = len(visible) // each if each else max(1, cores // (given.cpus or 1))
    limit = given.max_parallel or most
    if each and limit > most:
        raise NtkMarglikError(
            f"--max-parallel {limit} jobs with --gpus {each}, but {len(visible)} GPUs are for "
            f"{most}."
        )
    return Local(limit, given.cpus or max(1, cores // limit), visible, each)


def _gpus() -> tuple[int, ...]:
    """The numbers of the GPUs that may be used."""
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(number.isdecimal() for number in numbers):
        return tuple(map(int, numbers))
    return tuple(range(torch.cuda.device_count()))


def tables(lines: list[Line]) -> Iterator[str]:
    """The paper's tables that these runs are part of; of other runs, means over seeds."""
    runs = [line.folder for line in lines if isinstance(line, RunLine)]
    others = list(runs)
    for number, layout in paper.LAYOUTS.items():
        own = [folder for folder in runs if folder.parent.name in layout.experiments.values()]
        others = [folder for folder in others if folder not in own]
        roots = dict.fromkeys(folder.parent.parent for folder in own)
        text = paper.rendered(
            number, [r / name for r in roots for name in layout.experiments.values()]
        )
        if text is not None:
            yield text
    rows = [records.run_row(folder) for folder in records.run_folders(others)]
    if rows:
        yield over_seeds.table(rows)
    tuned = [line.folder for line in lines if isinstance(line, FinetuneLine) and line.finished()]
    if tuned:
        yield finetuning.table(finetuning.over_rates(map(finetuning.run_row, tuned)))


def launch(given: argparse.Namespace) -> bool:
    """Follow the lines to their end; returns whether all are done."""
    print(f"checking {given.table}", flush=True)
    lines = read_lines(given.table)
    if importlib.util.find_spec("submitit") is None:
        raise NtkMarglikError("The launcher needs submitit: pip install 'ntk-marglik[launch]'")
    from ntkmarglik.programs.launch.board import heading
    from ntkmarglik.programs.launch.sweep import Sweep

    folder = given.table.with_suffix(".launch")
    make_folder(folder, new=False)
    with FolderLock(folder, f"Another launcher follows {given.table}; there can be one at a time."):
        sweep = Sweep(lines, executor(given, len(lines)), folder, given.retries)
        if given.stop:
            print(
                f"{sweep.stop()} jobs are told to stop; their runs continue when the file is "
                "launched again"
            )
            return True
        follow(sweep, given.table, given.every)
    print(heading(sweep))
    for entry in sweep.entries:
        if entry.status == "failed":
            print(f"{entry}: {entry.note}\n    {entry.task.command}")
    print(*tables(lines), sep="\n\n")
    return not sweep.counts()["failed"]


def follow(sweep: Sweep, table: Path, every: float) -> None:
    """Show the state of the lines, again and again, until all are at their end."""
    from ntkmarglik.programs.launch.board import Board, heading

    print(
        f"{table}: {heading(sweep)}; {sweep.submitted} jobs from before. Ctrl-C leaves jobs "
        "running.",
        flush=True,
    )
    for command in sweep.removed:
        print(
            "warning: a job of a line that is no longer in the file goes on (--stop ends it): "
            f"{command}"
        )
    with Board(sweep) as board:
        while not sweep.over:
            board.show(sweep.step())
            time.sleep(0 if sweep.over else every)


def _given(arguments: list[str] | None) -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "table", type=Path, metavar="TABLE.sh", help="commands, of scripts/generate_*_commands.py"
    )
    parser.add_argument("--executor", choices=("local", "slurm"), default="local")
    parser.add_argument(
        "--retries", type=int, default=3, help="how often a line that fails is tried again"
    )
    parser.add_argument(
        "--every", type=float, default=2.0, help="seconds between looks at the jobs"
    )
    parser.add_argument("--stop", action="store_true", help="end the jobs of this file")
    _add_shares(parser)
    return parser.parse_args(arguments)


def _add_shares(parser: argparse.ArgumentParser) -> None:
    """The flags that say what each job gets of the machine or the cluster."""
    parser.add_argument(
        "--gpus", type=int, help="of each job; default: 1 on a machine with GPUs, none of a cluster"
    )
    parser.add_argument(
        "--cpus",
        type=count,
        help="cores of each job; default: equal shares of this machine, 1 of a cluster",
    )
    parser.add_argument(
        "--time",
        type=minutes,
        help="limit of each job on SLURM: minutes or D-HH:MM:SS; a run continues after it",
    )
    parser.add_argument(
        "--max-parallel",
        type=count,
        help="jobs at a time; default: as many as cores or GPUs, all on SLURM",
    )
    parser.add_argument("--partition", help="of the cluster")
    parser.add_argument("--array", action="store_true", help="submit job arrays")
    parser.add_argument(
        "--slurm",
        type=setting,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="account=me mem=32GB ...",
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = _given(arguments)
    done: list[bool] = []
    return exit_code(lambda: done.append(launch(given)), LEFT_RUNNING) or (0 if all(done) else 1)
