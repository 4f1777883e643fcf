"""Run folders: the record of a run is plain files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from ntkmarglik.errors import NtkMarglikError, of_system
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.runs import checkpoint, metrics
from ntkmarglik.runs.lock import FolderLock
from ntkmarglik.runs.loggers import Metrics, Mirrors
from ntkmarglik.settings import Settings, read_yaml

RUNS = Path("runs")
CHECKPOINT = "checkpoint.pt"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
LINES = "lines"  # of a checkpoint: the metrics up to it
DIGEST = "digest"  # of a summary: by which damage is noticed


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `summary.json` and `checkpoint.pt` of one run.

    A disk that becomes full is reported and does not stop the run: what is kept in memory is
    written once there is room again, and what is missing at the end is in `unwritten`.

    resume: take over the folder of an interrupted run. lines: those before its checkpoint, which
    has them. carried: what every checkpoint has besides the state of the run. unit: the name of
    what lines count, where it is not epochs.
    """

    def __init__(
        self,
        path: Path,
        config: Settings,
        *,
        resume: bool = False,
        lines: list[Metrics] | None = None,
        carried: dict[str, Any] | None = None,
        unit: str = "epoch",
    ):
        self.path = path
        if not resume and holds_run(path):
            raise NtkMarglikError(
                f"{path} already holds a run; continue it with --resume, or choose another folder "
                "with --out."
            )
        make_folder(path, new=False)
        self._lock = FolderLock(path)
        check_writable(path)
        self._config = config
        self._warned: set[str] = set()
        self._carried = carried or {}
        self.unwritten: set[str] = set()  # files whose last content found no room
        self.epochs: list[Metrics] = list(lines or [])
        if not holds_config(path, config):
            self._replace(CONFIG, _config_text(config))
        self._whole = self._replace_metrics()
        self._mirrors = Mirrors(path, config, unit)

    def log(self, line: Metrics) -> None:
        """Append one epoch."""
        self.epochs.append(line)
        if self._whole:
            self._whole = self._try(
                metrics.NAME, lambda: _append(self.path / metrics.NAME, metrics.as_text([line]))
            )
        else:  # an earlier line is missing or cut off
            self._whole = self._replace_metrics()
        self._mirrors.log(line)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; it has all lines too, so that none is lost with their file."""
        whole = {**state, **self._carried, LINES: metrics.as_text(self.epochs)}
        self._try(CHECKPOINT, lambda: checkpoint.save(self.path / CHECKPOINT, whole))

    def finish(self, summary: Metrics) -> None:
        """Write the summary, and once more what found no room before."""
        if not self._whole:
            self._whole = self._replace_metrics()
        if CONFIG in self.unwritten:
            self._replace(CONFIG, _config_text(self._config))
        self._replace(SUMMARY, summary_text(summary))

    def close(self, summary: Metrics) -> None:
        """Close the mirrors; the summary is empty if the run did not come to its end."""
        self._mirrors.close(summary)
        self._lock.release()

    def _replace_metrics(self) -> bool:
        return self._replace(metrics.NAME, metrics.as_text(self.epochs))

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

    def log(self, line: Metrics) -> None: ...

    def save(self, state: dict[str, Any]) -> None: ...

    def finish(self, summary: Metrics) -> None: ...

    def close(self, summary: Metrics) -> None: ...


def holds_run(path: Path) -> bool:
    """Whether a folder has results that a new run would overwrite."""
    return any((path / name).exists() for name in (metrics.NAME, CHECKPOINT, SUMMARY, "baseline"))


def mend(path: Path, config: Settings, lines: list[Metrics]) -> None:
    """Write the lines and settings of a finished run again, if its files have others."""
    text = metrics.as_text(lines)
    whole = {metrics.NAME: text} if _read(path / metrics.NAME) != text else {}
    if not holds_config(path, config):
        whole[CONFIG] = _config_text(config)
    for name, content in whole.items():
        try:
            checkpoint.replace(path / name, content.encode())
            print(f"{path / name} was damaged: restored from {CHECKPOINT}", file=sys.stderr)
        except OSError as error:
            print(
                f"warning: {path / name} is damaged and cannot be restored ({error.strerror})",
                file=sys.stderr,
            )


def _read(path: Path) -> str:
    """What a file holds; nothing if it cannot be read as text."""
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return ""


def summary_text(summary: Metrics) -> str:
    """A summary as it stands in its file, with a digest of itself."""
    return json.dumps({**summary, DIGEST: _digest(summary)}, indent=2) + "\n"


def _digest(summary: Metrics) -> str:
    return hashlib.sha256(json.dumps(summary, sort_keys=True).encode()).hexdigest()[:16]


def read_summary(path: Path) -> Metrics | None:
    """The summary of a finished run; None without one, and for one that is damaged."""
    try:
        summary = json.loads(_read(path / SUMMARY))
    except (ValueError, RecursionError):
        return None
    if not isinstance(summary, dict) or not summary:
        return None
    digest = summary.pop(DIGEST, None)  # earlier versions wrote none
    return summary if digest in (None, _digest(summary)) else None


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run; an error if they cannot be read."""
    settings = read_yaml(path / CONFIG)
    if not settings:
        raise NtkMarglikError(f"{path / CONFIG} is empty: the settings of this run are lost.")
    return settings


def holds_config(path: Path, config: Settings) -> bool:
    """Whether a folder has the settings of a run, whole, and no others."""
    try:
        stored = read_config(path)
        config.refuse_other(stored)
    except NtkMarglikError:
        return False
    return config.flat().keys() <= stored.keys()


def _config_text(config: Settings) -> str:
    return yaml.safe_dump(config.flat(), sort_keys=False)


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
    check_name(name)
    numbered = (RUNS / f"{name}.{number}" for number in itertools.count(2))
    paths = itertools.chain([RUNS / name], numbered)
    if resume:
        return [RUNS / name, *itertools.takewhile(Path.exists, paths)][-1]
    return next(path for path in paths if make_folder(path, new=True))


def check_name(name: str) -> None:
    """Refuse a name that would lead to another folder than the one it is put in."""
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise NtkMarglikError(f"{name!r} is not the name of one folder; choose it with --out.")


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Have a folder, which is made if need be, for this process alone."""
    make_folder(path, new=False)
    with FolderLock(path):
        yield


def make_folder(path: Path, *, new: bool) -> bool:
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
        raise of_system(
            error,
            f"The run folder {path} cannot be made ({error.strerror}); choose another with --out.",
        ) from error
    return True


def check_writable(path: Path) -> None:
    """Refuse a folder in which no file can be written, and remove what a killed process left.

    To be called before work starts whose results are to be written there, by the folder's only
    writer.
    """
    for partial in path.glob(f"*{checkpoint.PARTIAL}"):
        with contextlib.suppress(OSError):
            partial.unlink()
    probe = path / f"probe{checkpoint.PARTIAL}"
    try:
        checkpoint.replace(probe, b"can this folder be written to?")
        probe.unlink()
    except OSError as error:
        raise of_system(
            error,
            f"No file can be written to {path} ({error.strerror}); make room there or choose "
            "another folder with --out.",
        ) from error


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
        file.flush()
