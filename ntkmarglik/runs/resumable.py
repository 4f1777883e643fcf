"""A run that can be interrupted: from its start, or from its checkpoint, to its summary."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from laplace_marglik import Ranks, RanksError
from ntkmarglik.errors import NtkMarglikError, PassingProblem
from ntkmarglik.learn.distributed import by_first, rank
from ntkmarglik.machine.exits import explained
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.folder import (
    CHECKPOINT,
    LINES,
    NoFolder,
    RunFolder,
    mend,
    read_config,
    read_summary,
)
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.metrics import from_text, read_metrics
from ntkmarglik.runs.origin import Origin, changes, origin, refuse_other_task
from ntkmarglik.settings import Settings

ORIGIN = "origin"  # of a checkpoint: what its numbers depend on
CONTINUED = "continued"  # of checkpoint and summary: where that has changed
UNWRITTEN = "unwritten_files"  # in the summary of a run: what found no room on the disk


class Progress(Protocol):
    """What a run calls after each of its epochs or steps.

    metrics: of that epoch or step. part: what the run is busy with, if it has several parts.
    """

    def __call__(self, metrics: Metrics, part: str = "") -> None: ...


class Resumable(Protocol):
    """What `resumable_run` has to know about a run."""

    @property
    def config(self) -> Settings:
        """The settings that the run folder holds."""

    @property
    def ranks(self) -> Ranks | None:
        """The processes that share the run, if there are several."""

    @property
    def identity(self) -> Origin:
        """Fingerprints of the data, and of whatever else it learns from."""

    @property
    def unit(self) -> str:
        """What positions count: "epoch", "step"."""

    @property
    def position(self) -> int:
        """How many of them are done."""

    @property
    def total(self) -> int:
        """How many there are in the whole run."""

    @property
    def place(self) -> str:
        """The position in words: "epoch 3"."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do but the summary."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take up the run where the state of a checkpoint left it, or refuse that state."""

    def run(self, folder: RunFolder | NoFolder, progress: Progress | None = None) -> None:
        """Go on to the end; metrics and checkpoints go to the folder."""


R = TypeVar("R", bound=Resumable)


def resumable_run(
    task: R, summarise: Callable[[R], Metrics], path: Path, *, resume: bool, label: str = ""
) -> tuple[list[Metrics], Metrics]:
    """One run from its start or checkpoint to its summary; a finished one is read from its folder.

    Nothing is written before the checkpoint is read and its settings are accepted.

    Args:
        task: the run, at its start.
        summarise: the final numbers of the finished run.
        path: the run folder.
        resume: continue from the checkpoint in the folder, if there is one.
        label: the name of the run in messages and beside the progress bar.

    Returns:
        The metrics of all epochs or steps, and the summary.
    """
    past = by_first(task.ranks, lambda: _past(task, path, resume), "reading the checkpoint")
    if past.state is not None:
        task.restore(past.state)
    if past.summary is not None and (past.state is None or task.finished):
        return past.lines, past.summary
    if resume and rank() == 0:
        _say_where_it_starts(task, path, label, past)
    folder = _opened(task, path, resume, past)
    summary: Metrics = {}
    try:
        with _progress_bar(task, label) as progress:
            task.run(folder, progress)
        summary = {**summarise(task), **({CONTINUED: past.continued} if past.continued else {})}
        folder.finish(summary)
    finally:
        folder.close(summary)
    if folder.unwritten:
        summary = {**summary, UNWRITTEN: sorted(folder.unwritten)}
    return folder.epochs, summary


def check_written(summaries: Iterable[Metrics], path: Path) -> None:
    """An error, after everything is shown, if files of a finished run could not be written."""
    missing = sorted({name for summary in summaries for name in summary.get(UNWRITTEN, ())})
    if missing:
        raise PassingProblem(
            f"The run is finished, but {', '.join(missing)} in {path} could not be written. Make "
            f"room, then the same command with --resume --out {path} goes on from its last "
            "checkpoint."
        )


@contextlib.contextmanager
def how_to_continue(path: Path) -> Iterator[None]:
    """Say, if a run does not come to its end, which command continues it."""
    try:
        with explained():
            yield
    except (KeyboardInterrupt, RanksError, PassingProblem):
        if rank() == 0:
            message = f"the same command with --resume --out {path} continues this run"
            print(message, file=sys.stderr)
        raise


@dataclass(frozen=True)
class Past:
    """What a run folder holds of its run, before it is continued.

    Args:
        state: of the checkpoint to continue from; None to start.
        lines: the metrics up to it.
        summary: of the finished run; None for one that is not.
        continued: where the run went on in other circumstances than before, and which.
    """

    state: dict[str, Any] | None = None
    lines: list[Metrics] = field(default_factory=list)
    summary: Metrics | None = None
    continued: list[dict[str, Any]] = field(default_factory=list)


def _past(task: Resumable, path: Path, resume: bool) -> Past:
    """The newest checkpoint that the task accepts, with its lines, and the summary."""
    if not resume:
        return Past()
    summary = read_summary(path)
    faults: list[NtkMarglikError] = []
    for version, state in checkpoint.candidates(path / CHECKPOINT):
        try:
            past = _accepted(task, version, state, summary)
        except _Unusable as error:
            faults.append(error)
            continue
        for fault in faults:
            print(f"warning: {fault} Continuing from {version}, the one before.", file=sys.stderr)
        if past.summary is not None and task.finished:
            mend(path, task.config, past.lines)
        return past
    if faults:
        raise faults[0]
    if summary is not None:  # finished but for its checkpoint
        task.config.refuse_other(read_config(path))
        return Past(lines=read_metrics(path), summary=summary)
    return Past()


class _Unusable(NtkMarglikError):
    """A checkpoint that is damaged or does not belong to the run: the one before may do."""


def _accepted(
    task: Resumable, path: Path, state: dict[str, Any] | NtkMarglikError, summary: Metrics | None
) -> Past:
    """A checkpoint from which the task can go on, which it is restored to."""
    if isinstance(state, NtkMarglikError):
        raise _Unusable(str(state))
    try:
        task.config.refuse_other(state["settings"])
        refuse_other_task(state[ORIGIN], task.identity)
        task.restore(state)
        lines, lost = from_text(state[LINES])
        position = task.position
        if lost or not 0 <= position <= task.total:
            raise ValueError(f"{position} of {task.total} {task.unit}s and {lost} damaged lines")
    except (NtkMarglikError, MemoryError):
        raise
    except Exception as error:  # what is missing or of another shape fails in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise _Unusable(
            f"{path} is not a checkpoint of this run ({type(error).__name__}: {reason}). Nothing "
            "was changed; start again in another folder with --out."
        ) from error
    continued = list(state[CONTINUED])
    differences = changes(state[ORIGIN], _origin(task))
    if differences and not (task.finished and summary is not None):
        continued.append({"after": task.place, "with": differences})
    return Past(state, lines, summary, continued)


def _origin(task: Resumable) -> Origin:
    return origin(task.identity, 1 if task.ranks is None else task.ranks.size)


def _say_where_it_starts(task: Resumable, path: Path, label: str, past: Past) -> None:
    """Where a resumed run goes on, and whether it will end in the very same numbers."""
    message = f"there is no checkpoint in {path} yet, starting from the first {task.unit}"
    if past.state is not None:
        message = f"continuing after {task.place}"
    if label:
        message = f"{label}: {message}"
    print(message, file=sys.stderr)
    last = past.continued[-1] if past.continued else {}
    if last.get("after") == task.place:
        print(
            f"warning: it goes on with {', '.join(last['with'])}: its numbers will not be bit for "
            "bit those of an uninterrupted run (the summary says so too)",
            file=sys.stderr,
        )


def _opened(task: Resumable, path: Path, resume: bool, past: Past) -> RunFolder | NoFolder:
    """The run folder, opened by the first rank; the others have none."""
    folder: RunFolder | NoFolder = NoFolder()

    def open_folder() -> None:
        nonlocal folder
        carried = {ORIGIN: _origin(task), CONTINUED: past.continued}
        folder = RunFolder(
            path, task.config, resume=resume, lines=past.lines, carried=carried, unit=task.unit
        )

    by_first(task.ranks, open_folder, "opening the run folder")
    return folder


@contextlib.contextmanager
def _progress_bar(task: Resumable, label: str) -> Iterator[Progress]:
    """A bar of the whole run, on the terminal of the first rank."""
    shown: dict[str, str] = {}
    quiet = rank() > 0 or not sys.stderr.isatty()
    with tqdm(
        total=task.total,
        initial=task.position,
        desc=label or None,
        unit=task.unit,
        disable=quiet,
    ) as bar:

        def progress(metrics: Metrics, part: str = "") -> None:
            if part:
                bar.set_description(part, refresh=False)
            if "loss" in metrics:
                shown["loss"] = f"{metrics['loss']:.4f}"
            if "log_marglik" in metrics:
                shown["evidence"] = f"{metrics['log_marglik']:.4f}"
            bar.set_postfix(shown, refresh=False)
            bar.update()

        yield progress
