"""Checkpoints that are either whole or not there."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch

from ntkmarglik.errors import NtkMarglikError

FORMAT = "ntkmarglik-checkpoint-1"


def replace(path: Path, content: bytes | memoryview) -> None:
    """Give a file new content; whatever happens, it is the old or the new one, never a part."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def save(path: Path, state: dict[str, Any]) -> None:
    """Store tensors, numbers and strings; loadable with `weights_only=True`."""
    # Written by torch itself, a checkpoint that meets a full disk ends in an internal error of its
    # zip writer.
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    replace(path, buffer.getbuffer())


def load(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, or an error that says what is wrong with the file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
        raise NtkMarglikError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}): it is damaged or of "
            "another program. Nothing was changed; start again in another folder with --out."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise NtkMarglikError(
            f"{path} is not a checkpoint of this program (format {FORMAT}). Nothing was changed; "
            "start again in another folder with --out."
        )
    return state
