"""A job of several processes: what `torchrun` does, called from the process of the job."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.programs.launch.job import INTERRUPTED

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
    if settings.training_script != Config.script or settings.module or settings.no_python:
        raise NtkMarglikError(
            f"a line is `torchrun ... {Config.script} ...`, without -m or --no-python."
        )
    for name in (*MEETING, "nnodes"):
        if getattr(settings, name) != parser.get_default(name):
            return tuple(options)
    return ("--standalone", *options)


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
