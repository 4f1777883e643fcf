"""One writer for a folder: two programs in one would mix their lines and checkpoints."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType

from ntkmarglik.errors import PassingProblem

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

_HELD: set[tuple[int, int]] = set()  # folders whose lock this process has: device and number


class FolderLock:
    """Held from its making until `release`, or until the process ends, however that happens.

    A process that holds it may take it again, in a part of what it does. On file systems without
    locks it is not noticed that a folder has two writers.

    path: the folder, which must exist. busy: what the error says if another process has it.
    """

    def __init__(self, path: Path, busy: str = ""):
        self._file: int | None = None
        self._folder = (0, 0)
        if fcntl is None:
            return
        try:
            file = os.open(path, os.O_RDONLY)  # the folder itself: no file is left behind
        except OSError:  # the first file that is written will say what is wrong
            return
        status = os.fstat(file)
        folder = (status.st_dev, status.st_ino)  # whatever its name
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if not isinstance(error, BlockingIOError) or folder in _HELD:
                return  # there are no locks on this file system, or it is this process's own
            message = (
                f"another process is writing to {path}; wait for it, or choose another folder "
                "with --out."
            )
            raise PassingProblem(busy or message) from None
        self._file = file
        self._folder = folder
        _HELD.add(folder)

    def release(self) -> None:
        """Let others write, unless the lock was taken again: then the first holder does."""
        if self._file is not None:
            _HELD.discard(self._folder)
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def wait_for_writer(path: Path) -> None:
    """Wait until no other process writes to a folder, which need not exist.

    A process can be alive that no launcher knows of: its parent was killed, or the launcher before
    it was written down.
    """
    try:
        FolderLock(path).release()
    except PassingProblem:
        print(f"waiting for another process that works in {path}", file=sys.stderr)
        file = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        finally:
            os.close(file)
