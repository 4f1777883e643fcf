"""Settings as command-line flags, and yaml files that stand for flags."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import NtkMarglikError


def with_files(arguments: list[str], defaults: Mapping[str, Any]) -> list[str]:
    """Arguments with the settings of `--config` files placed before all others; `defaults` names all settings."""
    from_files: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--config" or argument.startswith("--config="):
            inline = argument.partition("=")[2]
            if not inline:
                position += 1
                if position == len(arguments):
                    raise NtkMarglikError("--config needs the name of a yaml file.")
                inline = arguments[position]
            from_files.extend(flags_of(Path(inline), defaults))
        else:
            rest.append(argument)
        position += 1
    return from_files + rest


def flags_of(path: Path, defaults: Mapping[str, Any]) -> list[str]:
    """The settings of a yaml file as flags."""
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise NtkMarglikError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise NtkMarglikError(f"{path} is not valid yaml: {error}") from error
    if settings is None:
        return []
    if not isinstance(settings, dict):
        raise NtkMarglikError(
            f"{path} must hold settings as `name: value` lines, but holds a {type(settings).__name__}."
        )
    flags: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise NtkMarglikError(f"{path}: unknown setting {key!r}.{hint} --help lists all of them.")
        if value is None:
            continue
        if isinstance(value, dict | list):
            raise NtkMarglikError(f"{path}: {key} must be a single value, but is {value!r}.")
        if isinstance(value, bool) != isinstance(defaults[name], bool):
            expected = "true or false" if isinstance(defaults[name], bool) else f"a value like {defaults[name]!r}"
            raise NtkMarglikError(f"{path}: {key} must be {expected}, but is {value!r}.")
        flags.extend(flag(name, value))
    return flags


def flag(name: str, value: Any) -> list[str]:
    """A setting as a shell would pass it."""
    spelled = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{spelled}" if value else f"--no-{spelled}"]
    return [f"--{spelled}", str(value)]
