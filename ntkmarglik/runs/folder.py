"""Run folders: the record of a run is plain files."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.lock import FolderLock
from ntkmarglik.runs.loggers import Metrics, Mirrors
from ntkmarglik.settings import Settings

RUNS = Path("runs")


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `summary.json` and `checkpoint.pt` of one run.

    A full disk is reported and does not stop the run: what is kept in memory is written once there
    is room again, and what is missing at the end is in `unwritten`.

    resume: take over the folder of an interrupted run and its lines up to `epoch`, those before its
    checkpoint. unit: the name of what lines count, where it is not epochs.
    """

    def __init__(
        self,
        path: Path,
        config: Settings,
        *,
        resume: bool = False,
        epoch: int = 0,
        unit: str = "epoch",
    ):
        self.path = path
        if not resume and holds_run(path):
            raise NtkMarglikError(
                f"{path} already holds a run; continue it with --resume, or choose another folder "
                "with --out."
            )
        _make_folder(path, new=False)
        self._lock = FolderLock(path)
        _remove_partial_files(path)
        self._warned: set[str] = set()
        self.unwritten: set[str] = set()  # files whose last content found no room
        self.epochs: list[Metrics] = []
        if resume:
            self.epochs = [line for line in read_metrics(path) if line[unit] <= epoch]
        if not (path / "config.yaml").exists():
            self._replace("config.yaml", yaml.safe_dump(config.flat(), sort_keys=False))
        self._whole = self._replace_metrics()
        self._mirrors = Mirrors(path, config, unit)

    def log(self, metrics: Metrics) -> None:
        """Append one epoch."""
        self.epochs.append(metrics)
        if self._whole:
            self._whole = self._try(
                "metrics.jsonl", lambda: _append(self.path / "metrics.jsonl", _line(metrics))
            )
        else:  # an earlier line is missing or cut off
            self._whole = self._replace_metrics()
        self._mirrors.log(metrics)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint."""
        self._try("checkpoint.pt", lambda: checkpoint.save(self.path / "checkpoint.pt", state))

    def finish(self, summary: Metrics) -> None:
        """Write the summary."""
        if not self._whole:
            self._whole = self._replace_metrics()
        self._replace("summary.json", json.dumps(summary, indent=2) + "\n")

    def close(self, summary: Metrics) -> None:
        """Close the mirrors; the summary is empty if the run did not come to its end."""
        self._mirrors.close(summary)
        self._lock.release()

    def _replace_metrics(self) -> bool:
        return self._replace("metrics.jsonl", "".join(map(_line, self.epochs)))

    def _replace(self, name: str, text: str) -> bool:
        return self._try(name, lambda: checkpoint.replace(self.path / name, text.encode()))

    def _try(self, name: str, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            if name not in self._warned:
                reason = error.strerror or error
                print(
                    f"warning: {self.path / name} cannot be written ({reason}); the run goes on",
                    file=sys.stderr,
                )
            self._warned.add(name)
            self.unwritten.add(name)
            return False
        self.unwritten.discard(name)
        return True


class NoFolder:
    """The run folder of a rank that is not the first: its methods do nothing."""

    epochs: list[Metrics] = []
    unwritten: frozenset[str] = frozenset()

    def log(self, metrics: Metrics) -> None: ...

    def save(self, state: dict[str, Any]) -> None: ...

    def finish(self, summary: Metrics) -> None: ...

    def close(self, summary: Metrics) -> None: ...


def holds_run(path: Path) -> bool:
    """Whether a folder has results that a new run would overwrite."""
    return any(
        (path / name).exists()
        for name in ("metrics.jsonl", "checkpoint.pt", "summary.json", "baseline")
    )


def read_metrics(path: Path) -> list[Metrics]:
    """The epochs recorded in a run folder; a line cut off by a crash ends them."""
    try:
        lines = (path / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    epochs = []
    for line in lines:
        try:
            epochs.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return epochs


def read_summary(path: Path) -> Metrics | None:
    """The summary of a finished run."""
    try:
        return json.loads((path / "summary.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None


def name_of(config: Config) -> str:
    """What the method calls a run of it."""
    return METHODS.named(config.estimator.method).run_name(config)


def folder_of(config: Config) -> Path:
    """The run folder: as given; else named by the settings."""
    if config.run.out is not None:
        return config.run.out
    problem = config.problem
    name = f"{problem.dataset}-{problem.model}-{name_of(config)}-seed{config.run.seed}"
    return folder_named(name, resume=config.run.resume)


def folder_named(name: str, *, resume: bool) -> Path:
    """A new folder of this name, numbered if that is taken; the last one to resume."""
    numbered = (RUNS / f"{name}.{number}" for number in itertools.count(2))
    paths = itertools.chain([RUNS / name], numbered)
    if resume:
        return [RUNS / name, *itertools.takewhile(Path.exists, paths)][-1]
    return next(path for path in paths if _make_folder(path, new=True))


def _make_folder(path: Path, *, new: bool) -> bool:
    """Make a folder; False if it is there and has to be new.

    Of two runs that ask at once, one gets it.
    """
    try:
        path.mkdir(parents=True, exist_ok=not new)
    except FileExistsError:
        if new:
            return False
        raise NtkMarglikError(f"{path} is a file; choose another run folder with --out.") from None
    except OSError as error:
        reason = error.strerror
        raise NtkMarglikError(
            f"The run folder {path} cannot be made ({reason}); choose another with --out."
        ) from error
    return True


def _remove_partial_files(path: Path) -> None:
    """Those that a killed process has left; this one is the folder's only writer."""
    for partial in path.glob("*.partial"):
        with contextlib.suppress(OSError):
            partial.unlink()


def _line(metrics: Metrics) -> str:
    return json.dumps(metrics) + "\n"


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
        file.flush()
