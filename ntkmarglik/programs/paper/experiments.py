"""The paper's experiments: settings by id and scale, and estimators by the paper's names."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.grid.config import parse as parse_grid
from ntkmarglik.programs.paper.presets import CONFIGS
from ntkmarglik.runs.folder import name_of
from ntkmarglik.settings import Settings

Scale = Literal["full", "small"]


@functools.cache  # a generator asks for the same settings many times
def load(*names: str, scale: Scale = "full") -> Config:
    """The settings of a run, in configs/NAME.yaml.

    At small scale with those of configs/small/NAME.yaml. Later names override, which puts one
    experiment upon another: the timing of bound-prior is `load("bound-prior", "timing")`.
    """
    return parse(_files(names, scale))


@functools.cache
def load_grid(*names: str, scale: Scale = "full") -> GridConfig:
    """The settings of a bound grid, in configs/NAME.yaml; later names override."""
    return parse_grid(_files(names, scale))


def _files(names: Sequence[str], scale: Scale) -> list[str]:
    files = [CONFIGS / f"{name}.yaml" for name in names]
    if scale == "small":
        files = [
            f
            for file in files
            for f in (file, CONFIGS / "small" / file.name)
            if f is file or f.exists()
        ]
    return [argument for file in files for argument in ("--config", str(file))]


def estimator(label: str) -> dict[str, Any]:
    """The settings of METHOD-S-K (N and C mean all), as in "KFAC-N-1"; also "MAP" and alike."""
    without_blocks = [name for name in METHODS if not METHODS[name].uses_blocks()]
    if label.lower() in without_blocks:
        return {"method": label.lower()}
    method, *sizes = label.lower().split("-")
    try:
        subset, outputs = sizes
        return {"method": method, "subset": _size(subset, "n"), "outputs": _size(outputs, "c")}
    except ValueError:
        known = ", ".join(without_blocks)
        raise NtkMarglikError(
            f"An estimator is METHOD-S-K or one of {known}, but {label!r} is none of these."
        ) from None


def _size(text: str, everything: str) -> int:
    return 0 if text == everything else int(text)


def label_of(config: Config) -> str:
    """The estimator's name in tables, with what differs from the paper's default choices."""
    estimator, name = config.estimator, name_of(config)
    if not METHODS.named(estimator.method).uses_blocks():
        return name
    root = [] if estimator.root in ("auto", "paper") else [f"({estimator.root})"]
    columns = ["iid"] if estimator.columns == "iid" else []
    grouped = ["grouped"] if estimator.partition == "class" else []
    return " ".join([name, *root, *columns, *grouped])


def difference(config: Settings, other: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings of what is computed that differ: name -> (value in config, value in other)."""
    ours, theirs = config.flat(), other.flat()
    unsaid = {*config.free(), "seed", "eval_every"}
    return {
        name: (ours[name], theirs[name])
        for name in ours
        if name not in unsaid and ours[name] != theirs[name]
    }


def described(changes: dict[str, tuple[Any, Any]]) -> str:
    """A difference in words: "epochs 300 -> 40, n_data all -> 2000"."""

    def word(name: str, value: Any) -> Any:
        return (
            "all"
            if value == 0
            and name
            in ("n_data", "subset", "outputs", "aug_block", "train_subset", "train_outputs")
            else value
        )

    return ", ".join(
        f"{name} {word(name, old)} -> {word(name, new)}" for name, (old, new) in changes.items()
    )
