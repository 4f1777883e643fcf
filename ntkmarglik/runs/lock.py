"""One writer for a folder: two programs in one would mix their lines and checkpoints."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """Held from its making until `release`, or until the process ends, however that happens.

    On file systems without locks it is not noticed that a folder has two writers.

    path: the folder, which must exist.
    """

    def __init__(self, path: Path):
        self._file: int | None = None
        if fcntl is None:
            return
        try:
            self._file = os.open(path, os.O_RDONLY)  # the folder itself: no file is left behind
        except OSError:  # the first file that is written will say what is wrong
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise NtkMarglikError(
                f"another process is writing to {path}; wait for it, or choose another folder "
                "with --out."
            ) from None
        except OSError:  # no locks on this file system
            self.release()

    def release(self) -> None:
        """Let others write."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
