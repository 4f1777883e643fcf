"""The command line of the runner."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ntkmarglik.learn.config import METHOD, UNNAMED, Config
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.programs.paper.presets import expanded
from ntkmarglik.settings import names_given, parse_as

__all__ = ["Config", "given", "parse"]

METHOD.offer(METHODS)


def given(arguments: Sequence[str] | None = None) -> set[str]:
    """The settings that a command line names; the others are defaults."""
    return names_given(Config, _with_presets(arguments))


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Settings from flags; `--config file.yaml` and `--preset name` stand for those of files."""
    arguments = _with_presets(arguments)
    config = parse_as(Config, arguments, Config().updated(method=UNNAMED))
    method = config.estimator.method
    if method == UNNAMED:
        return config
    return parse_as(Config, arguments, Config().updated(method=method))


def _with_presets(arguments: Sequence[str] | None) -> list[str]:
    return expanded(sys.argv[1:] if arguments is None else arguments, Config().flat())
