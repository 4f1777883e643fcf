"""Other places to watch a run in, wandb and tensorboard, which may fail."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from ntkmarglik.settings import Settings

Metrics = dict[str, Any]
PROJECT = "ntk-marglik"  # at wandb


class Mirror(Protocol):
    """Somewhere else to show metrics."""

    def log(self, metrics: Metrics) -> None: ...

    def close(self, summary: Metrics) -> None: ...


class Wandb:
    """wandb; offline, for a later `wandb sync`, where no account is set up."""

    def __init__(self, path: Path, config: Settings, unit: str):
        import wandb

        mode: Literal["online", "offline"] | None = None  # as WANDB_MODE says
        if not os.environ.get("WANDB_MODE"):  # nobody may be there to answer a prompt
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
        self._run = wandb.init(
            project=PROJECT,
            name=path.name,
            dir=str(path),
            config=config.flat(),
            mode=mode,
            reinit="create_new",  # a run before this one may have failed and not been closed
        )
        self._unit = unit

    def log(self, metrics: Metrics) -> None:
        self._run.log(numbers(metrics), step=metrics[self._unit])

    def close(self, summary: Metrics) -> None:
        self._run.summary.update(numbers(summary))
        self._run.finish()


class Tensorboard:
    """Event files in the run folder."""

    def __init__(self, path: Path, config: Settings, unit: str):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path / "tensorboard"))
        self._unit = unit

    def log(self, metrics: Metrics) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics[self._unit])

    def close(self, summary: Metrics) -> None:
        self._writer.close()


class Mirrors:
    """The mirrors a configuration asks for; one that fails is switched off, and the run goes on."""

    def __init__(self, path: Path, config: Settings, unit: str = "epoch"):
        self._open: list[Mirror] = []
        settings = config.flat()
        for kind, name in ((Wandb, "wandb"), (Tensorboard, "tensorboard")):
            if settings[name]:
                try:
                    self._open.append(kind(path, config, unit))
                except Exception as error:  # not installed, not logged in, no network
                    _warn(
                        f"{kind.__name__} is not available ({error}); the run folder has everything"
                    )

    def log(self, metrics: Metrics) -> None:
        self._send(lambda mirror: mirror.log(metrics))

    def close(self, summary: Metrics) -> None:
        self._send(lambda mirror: mirror.close(summary))

    def _send(self, send: Callable[[Mirror], None]) -> None:
        for mirror in list(self._open):
            try:
                send(mirror)
            except Exception as error:  # whatever a tracking service raises
                _warn(
                    f"{type(mirror).__name__} failed and is switched off ({error}); the run "
                    "folder has everything"
                )
                self._open.remove(mirror)


def numbers(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Nested metrics as `name/key: number`; the entries of a list are numbered."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            value = {str(index): entry for index, entry in enumerate(value)}
        if isinstance(value, dict):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + name] = value
    return flat


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
