"""What a job does: one line of a command file, in its own process, alone in its folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

LOCK = ".lock"  # in the folder of a run
INTERRUPTED = 130  # exit code of a program that was asked to stop


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
        with alone(self.folder):
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


@contextlib.contextmanager
def alone(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder; a lock ends with its process, however that ends.

    A process can be alive that no launcher knows of: its parent was killed, or the launcher before
    it was written down. With `wait`, whoever comes second waits for it; else BlockingIOError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            print(f"waiting for another process that works in {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            print(
                f"warning: no locks in {folder} ({error.strerror}); two jobs could meet there",
                file=sys.stderr,
            )
        yield
