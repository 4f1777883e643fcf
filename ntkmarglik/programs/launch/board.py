"""The state of a sweep: a table that redraws itself on a terminal, else one line per change."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ntkmarglik.programs.launch.sweep import Sweep

ROWS = 30  # of the table; the rest is counted


def heading(sweep: Sweep) -> str:
    """Counts of lines."""
    return ", ".join(f"{number} {status}" for status, number in sweep.counts().items())


def table(sweep: Sweep) -> Table:
    """Running lines with their latest numbers, then failed ones, then those tried before."""
    shown = [entry for entry in sweep.entries if entry.status == "running"]
    shown += [entry for entry in sweep.entries if entry.status == "failed"]
    shown += [
        entry
        for entry in sweep.entries
        if entry.status == "queued" and (entry.ticket or entry.failures)
    ]
    board = Table(title=heading(sweep), title_justify="left", expand=True)
    widths = {"line": None, "folder": 2, "state": None, "job": None, "latest": 3}
    for name, ratio in widths.items():
        board.add_column(name, ratio=ratio, overflow="fold", no_wrap=ratio is None)
    for entry in shown[:ROWS]:
        state: str = entry.status
        if entry.failures and entry.status != "failed":
            state += f", try {entry.failures + 1}"
        latest = entry.task.progress() if entry.status == "running" else entry.note
        job = entry.ticket.id if entry.ticket else ""
        folder = Text(str(entry.task.folder))
        board.add_row(str(entry.task.number), folder, state, job, Text(latest))
    if len(shown) > ROWS:
        board.caption = f"and {len(shown) - ROWS} more"
    return board


class Board:
    """Shows a sweep until it is left."""

    def __init__(self, sweep: Sweep, console: Console | None = None):
        self.sweep = sweep
        self.console = console or Console()
        self._live = (
            Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        )

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, changes: Iterable[str]) -> None:
        """The state now; what changed stays above a table."""
        for change in changes:
            self.console.print(Text(change), soft_wrap=True)
            self.console.file.flush()
        if self._live is not None:
            self._live.update(table(self.sweep), refresh=True)
