"""Checkpoints that are either whole or not there, and are not taken for whole when damaged."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from ntkmarglik.errors import NtkMarglikError

FORMAT = "ntkmarglik-checkpoint-1"


def replace(path: Path, content: bytes | memoryview) -> None:
    """Give a file new content; whatever happens, it is the old or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process that had this number
        with temporary.open("xb") as file:  # never through a link that somebody has put there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def save(path: Path, state: dict[str, Any]) -> None:
    """Store tensors, numbers and strings; loadable with `weights_only=True`.

    The checkpoint of before stays beside it, in case this one is damaged later.
    """
    # Written by torch itself, a checkpoint that meets a full disk ends in an internal error of its
    # zip writer.
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    _keep_previous(path)
    replace(path, buffer.getbuffer())


def previous(path: Path) -> Path:
    """Where the checkpoint before this one is."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _keep_previous(path: Path) -> None:
    """Give the present checkpoint its second name; without room or links there is none."""
    older = previous(path)
    linked = older.with_name(f"{older.name}.{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        linked.unlink(missing_ok=True)
        os.link(path, linked)
        os.replace(linked, older)


def load(path: Path) -> dict[str, Any]:
    """The state of a checkpoint; of the one before, with a warning, if it is damaged.

    If both are, an error says what is wrong with the file.
    """
    try:
        return _read(path)
    except NtkMarglikError as error:
        older = previous(path)
        if not older.exists():
            raise
        state = _read(older)
        print(f"warning: {error} Continuing from {older}, the one before.", file=sys.stderr)
        return state


def _read(path: Path) -> dict[str, Any]:
    try:
        # torch does not compare the checksums that its files have
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
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
