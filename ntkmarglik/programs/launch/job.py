"""What a job does: one line of a command file, in its own process."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ntkmarglik.errors import INTERRUPTED
from ntkmarglik.runs.lock import wait_for_writer

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


@dataclass(frozen=True)
class Job:
    """A program with its arguments; what submitit stores and calls elsewhere.

    The program is looked up in the job only, so that whatever reads a stored job need not import
    torch.
    """

    program: str  # "module:function" that takes arguments and returns an exit code
    arguments: tuple[str, ...]
    folder: Path  # of its results
    place: Path  # working directory, from which relative names count

    def __call__(self) -> int:
        local = os.environ.get("SUBMITIT_EXECUTOR") == "local"
        if local:
            os.setsid()  # Ctrl-C in the launcher's terminal is not meant for it
            # `--stop`; submitit would ignore it
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.chdir(self.place)
        wait_for_writer(self.folder)
        code = pkgutil.resolve_name(self.program)(list(self.arguments))
        if code == INTERRUPTED and not local:
            sys.exit(
                code
                # without a result: SLURM knows whether the job is put back in the queue, or was
                # cancelled
            )
        return code

    def checkpoint(self) -> DelayedSubmission:
        """What submitit queues before a time limit or pre-emption ends the job: the same job.

        Programs save checkpoints by themselves as they run, and continue from the last one.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
