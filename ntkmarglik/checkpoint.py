"""Checkpoints that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import NtkMarglikError

FORMAT = "ntkmarglik-checkpoint-1"


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` only once it is whole and on disk."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def save(path: Path, state: dict[str, Any]) -> None:
    """Store tensors, numbers and strings; loadable with `weights_only=True`."""
    with atomic(path) as file:
        torch.save({"format": FORMAT, **state}, file)


def load(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, or an error that says what is wrong with the file; the file is never changed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise NtkMarglikError(f"There is no checkpoint {path} to resume from; start without --resume.") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise NtkMarglikError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}): it is damaged or of another program. "
            "Move it away and start without --resume, or resume from another folder."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise NtkMarglikError(
            f"{path} is not a checkpoint of this program (format {FORMAT}); move it away and start without --resume."
        )
    return state
