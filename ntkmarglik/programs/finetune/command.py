"""The command of fine-tuning: its flags are read before torch is imported."""

from __future__ import annotations

from asdl_marglik.lazy import Later
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.programs.finetune.config import parse

run = Later("ntkmarglik.programs.finetune.run:run")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return exit_code(lambda: run(parse(arguments)))
