"""Runs that were mirrored to wandb, written as run folders again: nothing else asks wandb."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePath
from typing import Any

import yaml

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.records import of_the_runner

LONGEST = 200  # letters of a name
# not numbers, or settings: from the configuration
TEXTS = ("method", "dataset", "model", "subset", "outputs", "seed")


def download(project: str, target: Path) -> list[Path]:
    """The finished runs of "entity/project" as run folders, one folder per experiment."""
    try:
        import wandb
    except ImportError as error:
        raise NtkMarglikError(
            "--source wandb needs wandb: pip install 'ntk-marglik[wandb]'; run folders need "
            "nothing."
        ) from error
    try:
        runs = list(wandb.Api().runs(project))
    except Exception as error:  # no account, no network, no such project
        raise NtkMarglikError(
            f"wandb gives no runs of {project!r} ({error}); use --source runs or csv."
        ) from error
    folders: list[Path] = []
    for run in runs:
        if "test_accuracy" in dict(run.summary) and of_the_runner(dict(run.config)):
            folder = target / _experiment(run) / _as_name(run.name)
            if folder in folders:  # names need not differ there
                folder = folder.with_name(f"{folder.name}-{_as_name(run.id)}")
            folders.append(_written(run, folder))
    return folders


def _experiment(run: Any) -> str:
    """The folder in which the run folder was."""
    out = dict(run.config).get("out")
    return _as_name(PurePath(out if isinstance(out, str) else "runs/run").parent.name)


def _as_name(text: Any) -> str:
    """What somebody else has written, as the name of one folder in the one it is put into."""
    name = re.sub(r"[^\w.+=-]", "-", str(text))[:LONGEST]
    return name if name.strip(".") else "run"


def _written(run: Any, folder: Path) -> Path:
    settings = {name: value for name, value in dict(run.config).items() if name in Config().flat()}
    summary: Metrics = {
        **{name: settings[name] for name in TEXTS if name in settings},
        **_numbers(dict(run.summary)),
    }
    # texts are not mirrored: claim no more than is known
    summary.setdefault("log_marglik_status", "approximation")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    lines = [
        json.dumps(_numbers(metrics)) + "\n" for metrics in run.scan_history() if "epoch" in metrics
    ]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return folder


def _numbers(metrics: Metrics) -> Metrics:
    """Plain numbers; what wandb adds of its own is left out."""
    return {
        k: v for k, v in metrics.items() if isinstance(v, int | float) and not k.startswith("_")
    }
