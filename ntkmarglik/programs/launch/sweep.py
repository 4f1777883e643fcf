"""All lines of a command file as jobs: submitted, watched, tried again, and found again later."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import submitit

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.launch.executors import Executor, Ticket
from ntkmarglik.programs.launch.job import Job
from ntkmarglik.programs.launch.state import State, note_tickets, read_state

Status = Literal["queued", "running", "done", "failed"]


class Task(Protocol):
    """What a line has to know about itself."""

    @property
    def number(self) -> int: ...

    @property
    def command(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    def job(self) -> Job: ...

    def finished(self) -> bool | None: ...

    def progress(self) -> str: ...


@dataclass
class Entry:
    """A line and what has become of it."""

    task: Task
    before: Entry | None  # has to be done first: it works in the same folder
    status: Status = "queued"
    failures: int = 0
    ticket: Ticket | None = None  # of its job, if it has one now
    job: submitit.Job[int] | None = None
    note: str = ""

    def __str__(self) -> str:
        return f"line {self.task.number}, {self.task.folder}"


class Sweep:
    """The jobs of some lines.

    folder: of `state.json`, with the tickets of submitted jobs, and `jobs/`, with submitit's files
    and logs. retries: how often a line that failed is tried again.
    """

    def __init__(self, tasks: Sequence[Task], executor: Executor, folder: Path, retries: int):
        self.executor = executor
        self.folder = folder
        self.retries = retries
        self.entries: list[Entry] = []
        self.removed: dict[str, Ticket] = {}  # jobs of lines that are no longer in the file
        last: dict[Path, Entry] = {}
        for task in tasks:
            entry = Entry(task, last.get(task.folder))
            last[task.folder] = entry
            self.entries.append(entry)
        self._recall()
        for entry in self.entries:
            if entry.ticket is None and entry.task.finished():
                entry.status = "done"

    @property
    def over(self) -> bool:
        """Whether nothing is left to do or to wait for."""
        return all(entry.status in ("done", "failed") for entry in self.entries)

    @property
    def submitted(self) -> int:
        """How many jobs there are now, also of a launcher before."""
        return sum(entry.ticket is not None for entry in self.entries)

    def counts(self) -> dict[Status, int]:
        """How many lines are in which state."""
        numbers: dict[Status, int] = {"queued": 0, "running": 0, "done": 0, "failed": 0}
        for entry in self.entries:
            numbers[entry.status] += 1
        return numbers

    def step(self) -> list[str]:
        """Look after all jobs and submit what can be; returns what has changed, in words."""
        return [*self._watch(), *self._submit()]

    def stop(self) -> int:
        """End the jobs; returns how many there were."""
        tickets = [entry.ticket for entry in self.entries if entry.ticket is not None]
        tickets.extend(self.removed.values())
        for ticket in tickets:
            self.executor.stop(ticket)
        for entry in self.entries:
            entry.ticket = None
            entry.job = None
        self.removed = {}
        self._save()
        return len(tickets)

    def _watch(self) -> Iterator[str]:
        for entry in self.entries:
            if entry.ticket is None:
                continue
            job = entry.job or self.executor.attach(entry.ticket)
            entry.job = job
            status = self.executor.status(job)
            if status == "ended":
                entry.ticket = None
                entry.job = None
                yield self._ended(entry, job)
                self._save()
            elif status != entry.status:
                entry.status = status
                yield f"{entry}: {status} (job {job.job_id})"

    def _ended(self, entry: Entry, job: submitit.Job[int]) -> str:
        reason, again = self.executor.failure(job)
        finished = entry.task.finished()
        # its results count, whatever it said at its end, unless only it can tell
        if finished or (finished is None and not reason):
            entry.status = "done"
            entry.note = ""
            return f"{entry}: done"
        reason = reason or "it ended without an error, but its results are not there"
        entry.failures += again != "free"
        entry.note = f"{reason} (log: {job.paths.stderr})"
        left = self.retries + 1 - entry.failures
        if again == "never" or left <= 0:
            entry.status = "failed"
            return f"{entry}: failed: {entry.note}"
        entry.status = "queued"
        tries = "try" if left == 1 else "tries"
        return f"{entry}: ended early, to be continued ({left} more {tries}): {entry.note}"

    def _submit(self) -> Iterator[str]:
        ready = []
        for entry in self.entries:
            if entry.status != "queued" or entry.ticket is not None:
                continue
            if entry.before is not None and entry.before.status == "failed":
                entry.status = "failed"
                entry.note = f"line {entry.before.task.number}, which comes first, failed"
                yield f"{entry}: failed: {entry.note}"
            elif entry.before is None or entry.before.status == "done":
                ready.append(entry)
        taken = {entry.ticket.slot for entry in self.entries if entry.ticket is not None}
        free = (slot for slot in itertools.count() if slot not in taken)
        room = max(0, self.executor.limit - self.submitted)
        batches = (
            [ready] if self.executor.together and ready else [[entry] for entry in ready[:room]]
        )
        for batch in batches:  # each is written down before the next
            slots = list(itertools.islice(free, len(batch)))
            tickets = self.executor.submit(
                [entry.task.job() for entry in batch], self.folder / "jobs", slots
            )
            commands = [entry.task.command for entry in batch]
            note_tickets(self.executor.name, dict(zip(commands, tickets, strict=True)))
            for entry, ticket in zip(batch, tickets, strict=True):
                entry.ticket = ticket
            self._save()
            for entry, ticket in zip(batch, tickets, strict=True):
                yield f"{entry}: submitted (job {ticket.id})"

    def _save(self) -> None:
        lines: dict[str, dict[str, Any]] = {}
        for command, ticket in self.removed.items():
            lines[command] = {"failures": 0, "ticket": asdict(ticket)}
        for entry in self.entries:
            unfinished = entry.failures and entry.status != "done"
            if entry.ticket or unfinished:
                stored = None if entry.ticket is None else asdict(entry.ticket)
                lines[entry.task.command] = {"failures": entry.failures, "ticket": stored}
        State(self.executor.name, str(Path.cwd()), lines).write(self.folder)

    def _recall(self) -> None:
        """Take over the jobs of the launcher before; what it gave up has all its tries again."""
        state = read_state(self.folder)
        if state is None:
            return
        stored = state.tickets()
        ours = {"executor": self.executor.name, "place": str(Path.cwd())}
        for name, value in ours.items():
            theirs = getattr(state, name)
            if stored and theirs != value:
                raise NtkMarglikError(
                    f"{self.folder} has {len(stored)} jobs of {name} {theirs}, but this is "
                    f"{value}; follow or stop them there first."
                )
        for entry in self.entries:
            line = state.lines.get(entry.task.command)
            if line is not None:
                entry.failures = line["failures"] if line["failures"] <= self.retries else 0
                entry.ticket = stored.get(entry.task.command)
        for command in stored.keys() - {entry.task.command for entry in self.entries}:
            ticket = stored[command]
            if self.executor.status(self.executor.attach(ticket)) != "ended":
                self.removed[command] = ticket
