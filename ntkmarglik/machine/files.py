"""Files that a command line names: refused before work starts rather than after it."""

from __future__ import annotations

import argparse
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.values import refuse_text


def target_file(text: str) -> Path:
    """A file to be written, as a `type` of argparse; its folder is there and can be written to."""
    path = _named(text)
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror})") from error
    return path


def source(text: str) -> Path:
    """A file or folder to be read, as a `type` of argparse."""
    path = _named(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no {path}")
    return path


def _named(text: str) -> Path:
    try:
        refuse_text("the name", text, empty=False)
    except NtkMarglikError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)
