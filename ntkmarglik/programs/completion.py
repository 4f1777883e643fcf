"""A script by which a shell completes the commands and flags of `ntk-marglik`, made by tyro."""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any

import tyro

from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.grid.config import GridConfig

# commands whose flags tyro knows; of the others it completes the names
SETTINGS = {"run": Config, "grid": GridConfig, "finetune": FinetuneConfig}


def script(shell: list[str], names: dict[str, str], program: str) -> None:
    """Let tyro print the script, or write it, and end the program.

    shell: the flag of tyro with its values. names: help of every command by its name.
    """
    kinds: list[Any] = [
        Annotated[SETTINGS.get(name, type(None)), tyro.conf.subcommand(name, description=text)]
        for name, text in names.items()
    ]
    tyro.cli(
        functools.reduce(operator.or_, kinds),
        args=shell,
        prog=program,
        config=(tyro.conf.OmitArgPrefixes,),
    )
