"""A script by which a shell completes the commands and flags of `ntk-marglik`, made by tyro."""

from __future__ import annotations

import functools
import operator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.paper.presets import presets

# commands whose flags tyro knows; of the others it completes the names
SETTINGS = {"run": Config, "grid": GridConfig, "finetune": FinetuneConfig}


def with_files(settings: type) -> type:
    """Settings with the flags that stand for files of them, which parsing replaces before tyro."""
    names = ("list", *presets(settings().flat()))
    files: list[tuple[str, Any, Any]] = [("config", Path, Path("FILE.yaml"))]
    if settings is Config:
        files.append(("preset", Literal[names], names[0]))
    return make_dataclass(settings.__name__, files, bases=(settings,), frozen=True)


def script(shell: list[str], names: dict[str, str], program: str) -> None:
    """Let tyro print the script, or write it, and end the program.

    shell: the flag of tyro with its values. names: help of every command by its name.
    """
    kinds: list[Any] = [
        Annotated[
            with_files(SETTINGS[name]) if name in SETTINGS else type(None),
            tyro.conf.subcommand(name, description=text),
        ]
        for name, text in names.items()
    ]
    tyro.cli(
        functools.reduce(operator.or_, kinds),
        args=shell,
        prog=program,
        config=(tyro.conf.OmitArgPrefixes,),
    )
