"""A job of several processes: what `torchrun` does, called from the process of the job."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence

from ntkmarglik.errors import INTERRUPTED, NtkMarglikError
from ntkmarglik.learn.config import Config

MODULE = "ntkmarglik.programs.classify"  # what Config.script runs, wherever that is
# options that say where processes meet
MEETING = ("standalone", "rdzv_endpoint", "rdzv_id", "master_port")


def checked(options: Sequence[str]) -> tuple[str, ...]:
    """Options of torchrun, refused if it would; without a meeting place, jobs choose a free one."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            settings = parser.parse_args([*options, Config.script])
    except SystemExit:
        reason = errors.getvalue().strip().rpartition("error: ")[2] or "--help makes no run"
        raise NtkMarglikError(f"torchrun refuses its options: {reason}.") from None
    _check_numbers(settings)
    if settings.training_script != Config.script or settings.module or settings.no_python:
        raise NtkMarglikError(
            f"a line is `torchrun ... {Config.script} ...`, without -m or --no-python."
        )
    for name in (*MEETING, "nnodes"):
        if getattr(settings, name) != parser.get_default(name):
            return tuple(options)
    return ("--standalone", *options)


def _check_numbers(settings: argparse.Namespace) -> None:
    """Refuse numbers of processes and machines that torchrun would only find to be none later."""
    for name, value, words in (
        ("nproc-per-node", settings.nproc_per_node, ("auto", "cpu", "gpu")),
        ("nnodes", settings.nnodes, ()),
    ):
        numbers = str(value).split(":") if name == "nnodes" else [str(value)]
        if str(value) in words:
            continue
        if len(numbers) > 2 or not all(n.isascii() and n.isdecimal() and int(n) for n in numbers):
            choices = f", or {', '.join(words)}" if words else ""
            raise NtkMarglikError(
                f"torchrun --{name} must be a number greater than 0{choices}, but is {value!r}."
            )


def main(arguments: Sequence[str]) -> int:
    """Run a line's torchrun options, program and flags; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        split = list(arguments).index(Config.script)
        torchrun([*arguments[:split], "--module", MODULE, *arguments[split + 1 :]])
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode or 1
    except SignalException:
        return INTERRUPTED
    return 0
