"""Interrupts that wait for the end of an epoch, or of a step."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupts(unit: str = "epoch") -> Iterator[Callable[[], bool]]:
    """Whether an interrupt (Ctrl-C, SIGTERM) has come; a second one acts at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        print(f"\nstopping after this {unit}; interrupt again to stop at once", file=sys.stderr)

    try:
        previous = {
            number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not in the main thread: leave signals alone
        previous = {}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
