"""Checkpoints that are either whole or not there, and are not taken for whole when damaged."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ntkmarglik.errors import NtkMarglikError

FORMAT = "ntkmarglik-checkpoint-2"
PARTIAL = ".partial"  # ends the name of a file that is being written


def replace(path: Path, content: bytes | memoryview) -> None:
    """Give a file new content; whatever happens, it is the old or the new one, never a part."""
    temporary = _beside(path)
    try:
        with temporary.open("xb") as file:  # never through a link that somebody has put there
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    """A new name beside a file, which nobody has guessed."""
    return path.with_name(f"{path.name[:200]}.{secrets.token_hex(8)}{PARTIAL}")


def save(path: Path, state: dict[str, Any]) -> None:
    """Store tensors, numbers and strings; loadable with `weights_only=True`.

    The checkpoint of before stays beside it, in case this one is damaged later.
    """
    import torch  # jobs of the launcher lock a folder and write notes without it

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
    linked = _beside(older)
    with contextlib.suppress(OSError):
        os.link(path, linked)
        os.replace(linked, older)
        linked.unlink(missing_ok=True)  # still there if both were names of one file already


def candidates(path: Path) -> Iterator[tuple[Path, dict[str, Any] | NtkMarglikError]]:
    """The checkpoint and the one before, each with its state or with what is wrong with it."""
    for version in (path, previous(path)):
        if version.exists():
            try:
                yield version, load(version)
            except NtkMarglikError as error:
                yield version, error


def load(path: Path) -> dict[str, Any]:
    """The state of a checkpoint; an error says what is wrong with the file."""
    import torch

    try:
        # torch does not compare the checksums that its files have
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
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
