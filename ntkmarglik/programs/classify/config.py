"""The command line of the runner."""

from __future__ import annotations

from collections.abc import Sequence

from ntkmarglik.learn.config import METHOD, UNNAMED, Config
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.settings import names_given, parse_as

__all__ = ["Config", "given", "parse"]

METHOD.offer(METHODS)


def given(arguments: Sequence[str] | None = None) -> set[str]:
    """The settings that a command line names; the others are defaults."""
    return names_given(Config, arguments)


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Settings from flags; `--config file.yaml` stands for the flags in that file."""
    method = parse_as(Config, arguments, Config().updated(method=UNNAMED)).estimator.method
    return parse_as(Config, arguments, Config().updated(method=method))
