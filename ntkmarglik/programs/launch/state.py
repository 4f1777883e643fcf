"""What a launcher writes down, so that another one finds its jobs: `state.json`, and a note beside
every job from which it can be made again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.launch.executors import Ticket
from ntkmarglik.runs import checkpoint

STATE = "state.json"
NOTE = "tickets.json"  # in the folder of submitted jobs: which they are


@dataclass(frozen=True)
class State:
    """The jobs of a command file.

    Args:
        executor: by which they were submitted.
        place: working directory from which their relative names count.
        lines: for every command that is not done, its failures and the ticket of its job.
    """

    executor: str
    place: str
    lines: dict[str, dict[str, Any]]

    def write(self, folder: Path) -> None:
        """Replace the file."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        checkpoint.replace(folder / STATE, text.encode())

    def tickets(self) -> dict[str, Ticket]:
        """The jobs that were not known to have ended."""
        return {
            command: Ticket(**line["ticket"])
            for command, line in self.lines.items()
            if line["ticket"]
        }


def note_tickets(executor: str, tickets: dict[str, Ticket]) -> None:
    """Write down jobs where they were submitted, in case the list of all jobs is damaged."""
    for folder in {ticket.folder for ticket in tickets.values()}:
        own = {
            command: {"failures": 0, "ticket": asdict(ticket)}
            for command, ticket in tickets.items()
            if ticket.folder == folder
        }
        note = State(executor, str(Path.cwd()), own)
        checkpoint.replace(Path(folder) / NOTE, json.dumps(asdict(note)).encode())


def read_state(folder: Path) -> State | None:
    """What the launcher before has written down; None without one.

    From a damaged list the jobs are found by the notes beside them: each command's last one.
    """
    path = folder / STATE
    if not path.exists():
        return None
    try:
        return _read(path)
    except NtkMarglikError as error:
        lines: dict[str, dict[str, Any]] = {}
        last: State | None = None
        for note in sorted(folder.glob(f"jobs/*/{NOTE}")):
            try:
                last = _read(note)
                lines |= last.lines
            except NtkMarglikError as fault:
                print(f"warning: {fault} The jobs in that folder are not known.", file=sys.stderr)
        print(
            f"warning: {error} Its {len(lines)} jobs are known by the notes beside them; failures "
            "are counted anew.",
            file=sys.stderr,
        )
        return None if last is None else State(last.executor, last.place, lines)


def _read(path: Path) -> State:
    """A list or a note; an error if it is damaged."""
    try:
        state = State(**json.loads(path.read_bytes().decode()))
        state.tickets()
        whole = all(isinstance(line["failures"], int) for line in state.lines.values())
        if not whole or not isinstance(state.executor + state.place, str):
            raise ValueError("of another kind")
        return state
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NtkMarglikError(f"{path} is damaged ({type(error).__name__}).") from error
