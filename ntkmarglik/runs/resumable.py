"""A run that can be interrupted: from its start, or from its checkpoint, to its summary."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from laplace_marglik import Ranks, RanksError
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.distributed import by_first, rank
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.folder import NoFolder, RunFolder, read_metrics, read_summary
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.settings import Settings

CHECKPOINT = "checkpoint.pt"

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
    state, summary = by_first(task.ranks, lambda: _stored(path, resume), "reading the checkpoint")
    if state is not None:
        task.restore(state)
        if task.finished and summary is not None:
            return read_metrics(path), summary
    if resume and rank() == 0:
        _say_where_it_starts(task, path, label, continued=state is not None)
    folder = _opened(task, path, resume)
    summary = {}
    try:
        with _progress_bar(task, label) as progress:
            task.run(folder, progress)
        summary = summarise(task)
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
        raise NtkMarglikError(
            f"The run is finished, but {', '.join(missing)} in {path} could not be written. Make "
            f"room, then the same command with --resume --out {path} goes on from its last "
            "checkpoint."
        )


@contextlib.contextmanager
def how_to_continue(path: Path) -> Iterator[None]:
    """Say, if a run does not come to its end, which command continues it."""
    try:
        yield
    except (KeyboardInterrupt, RanksError):
        if rank() == 0:
            message = f"the same command with --resume --out {path} continues this run"
            print(message, file=sys.stderr)
        raise


def _stored(path: Path, resume: bool) -> tuple[dict[str, Any] | None, Metrics | None]:
    """The checkpoint to continue from and the summary of a folder, if they are there."""
    summary = read_summary(path)
    if not resume:
        return None, summary
    if (path / CHECKPOINT).exists():
        return checkpoint.load(path / CHECKPOINT), summary
    if summary is not None:
        raise NtkMarglikError(
            f"{path} holds a finished run without its checkpoint; choose another folder with --out."
        )
    return None, None


def _say_where_it_starts(task: Resumable, path: Path, label: str, *, continued: bool) -> None:
    message = f"there is no checkpoint in {path} yet, starting from the first {task.unit}"
    if continued:
        message = f"continuing after {task.place}"
    if label:
        message = f"{label}: {message}"
    print(message, file=sys.stderr)


def _opened(task: Resumable, path: Path, resume: bool) -> RunFolder | NoFolder:
    """The run folder, opened by the first rank; the others have none."""
    folder: RunFolder | NoFolder = NoFolder()

    def open_folder() -> None:
        nonlocal folder
        folder = RunFolder(path, task.config, resume=resume, epoch=task.position, unit=task.unit)

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
