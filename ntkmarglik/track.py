"""Run folders: the record of a run is plain files; wandb and tensorboard only mirror them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import yaml

from . import checkpoint
from .config import Config
from .errors import NtkMarglikError

Metrics = dict[str, Any]


class Mirror(Protocol):
    """Somewhere else to show metrics; may fail without consequence."""

    def log(self, metrics: Metrics) -> None: ...

    def close(self, summary: Metrics) -> None: ...


class RunFolder:
    """`config.yaml`, `metrics.jsonl` (one line per epoch), `summary.json`, `checkpoint.pt` and the figure of one run.

    A full disk is reported once and does not stop the run: later results may still find room.
    """

    def __init__(self, path: Path, config: Config, *, resume: bool):
        self.path = path
        self._failed = False
        if not resume and any((path / name).exists() for name in ("metrics.jsonl", "checkpoint.pt", "summary.json")):
            raise NtkMarglikError(
                f"{path} already holds a run; continue it with --resume, or choose another folder with --out."
            )
        path.mkdir(parents=True, exist_ok=True)
        if not resume or not (path / "config.yaml").exists():
            self._keep("config.yaml", yaml.safe_dump(config.flat(), sort_keys=False).encode())
        self.mirrors = _mirrors(path, config)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    def metrics(self) -> list[Metrics]:
        """The recorded epochs; a last line cut off by a crash is ignored."""
        try:
            lines = (self.path / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found

    def log(self, metrics: Metrics) -> None:
        """Append one epoch."""

        def write() -> None:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")
                file.flush()

        self._try(write)
        self._mirror(lambda mirror: mirror.log(metrics))

    def rewind(self, epochs: int) -> None:
        """Forget the lines after the checkpoint one resumes from."""
        kept = [m for m in self.metrics() if m["epoch"] <= epochs]
        self._keep("metrics.jsonl", "".join(json.dumps(m) + "\n" for m in kept).encode())

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint."""
        self._try(lambda: checkpoint.save(self.checkpoint, state))

    def finish(self, summary: Metrics) -> None:
        """Write the summary and close the mirrors."""
        self._keep("summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        self._mirror(lambda mirror: mirror.close(summary))

    def _keep(self, name: str, content: bytes) -> None:
        def write() -> None:
            with checkpoint.atomic(self.path / name) as file:
                file.write(content)

        self._try(write)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failed:
                print(f"warning: cannot write to {self.path} ({error.strerror}); the run goes on", file=sys.stderr)
            self._failed = True

    def _mirror(self, send: Callable[[Mirror], None]) -> None:
        for mirror in list(self.mirrors):
            try:
                send(mirror)
            except Exception as error:  # whatever a tracking service raises, the run goes on
                warnings.warn(f"{type(mirror).__name__} failed and is switched off: {error}", stacklevel=2)
                self.mirrors.remove(mirror)


class Wandb:
    """wandb, offline unless it is configured."""

    def __init__(self, path: Path, config: Config):
        import wandb

        self._run = wandb.init(project="ntk-marglik", name=path.name, dir=str(path), config=config.flat())

    def log(self, metrics: Metrics) -> None:
        self._run.log(_numbers(metrics), step=metrics["epoch"])

    def close(self, summary: Metrics) -> None:
        self._run.summary.update(_numbers(summary))
        self._run.finish()


class Tensorboard:
    """Event files in the run folder."""

    def __init__(self, path: Path, config: Config):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path / "tensorboard"))

    def log(self, metrics: Metrics) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics["epoch"])

    def close(self, summary: Metrics) -> None:
        self._writer.close()


def _mirrors(path: Path, config: Config) -> list[Mirror]:
    wanted: list[type] = [Wandb] if config.run.wandb else []
    wanted += [Tensorboard] if config.run.tensorboard else []
    mirrors: list[Mirror] = []
    for kind in wanted:
        try:
            mirrors.append(kind(path, config))
        except Exception as error:  # not installed, not logged in, no network
            warnings.warn(f"{kind.__name__} is not available ({error}); the run folder has everything", stacklevel=2)
    return mirrors


def _numbers(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Nested metrics as `name/key: number`."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            numbers |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[prefix + name] = value
    return numbers


def commit() -> str | None:
    """The git commit of this code, if it is a checkout."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
