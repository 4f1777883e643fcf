"""The lines of a run, `metrics.jsonl`: one per epoch or evaluation, written as they come."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from ntkmarglik.runs.loggers import Metrics

NAME = "metrics.jsonl"
POSITIONS = ("epoch", "step")  # what lines count


def as_text(lines: Iterable[Metrics]) -> str:
    """Lines as they stand in the file."""
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def from_text(text: str) -> tuple[list[Metrics], int]:
    """The lines that can be read, each position once and in order, and how many others there are.

    What follows the last line break is left out without a word: a program may be writing it.
    """
    *whole, _ = text.split("\n")
    lines: list[Metrics] = []
    last = -1
    for written in whole:
        try:
            line = dict(json.loads(written).items())
            position = next((line[name] for name in POSITIONS if name in line), last + 1)
            if position > last:
                last = position
                lines.append(line)
        except (
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # not json, or not a line of a run
            continue
    return lines, len(whole) - len(lines)


def read_metrics(path: Path, *, quiet: bool = False) -> list[Metrics]:
    """The lines recorded in a run folder; those that are damaged or doubled are left out.

    quiet: do not say how many these are.
    """
    try:
        text = (path / NAME).read_bytes().decode(errors="replace")
    except OSError:
        return []
    lines, lost = from_text(text)
    if not quiet:
        _name_the_loss(path / NAME, lines, lost)
    return lines


def _name_the_loss(path: Path, lines: list[Metrics], lost: int) -> None:
    """Say what is missing from a file."""
    epochs = {line["epoch"] for line in lines if "epoch" in line}
    missing = sorted(set(range(1, max(epochs, default=0))) - epochs)
    if not lost and not missing:
        return
    parts = [f"{lost} damaged or doubled lines are left out"] if lost else []
    if missing:
        first = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        parts.append(f"{len(missing)} epochs are missing ({first})")
    print(
        f"warning: {path}: {'; '.join(parts)}. The checkpoint has all lines: --resume writes them "
        "again.",
        file=sys.stderr,
    )
