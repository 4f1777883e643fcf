"""What every program's settings can do: be read from flags and yaml, checked, and written again."""

from __future__ import annotations

import difflib
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import tyro
import yaml

from ntkmarglik.errors import NtkMarglikError

S = TypeVar("S", bound="Settings")


class Choices:
    """The names in a registry, for a setting that has one or several of them as its value.

    They are asked for when a command line is read: what is registered until then is on offer. Of a
    registry whose entries need the settings, and which they therefore cannot import, the names are
    given later: `offer`.
    """

    def __init__(self, registry: Collection[str] = ()):
        self._registry = registry

    def offer(self, registry: Collection[str]) -> None:
        """Take the names from this registry."""
        self._registry = registry

    def entry(self, name: str) -> Any:
        """What is registered under a name; None for one that is not, or names alone."""
        return self._registry.get(name) if isinstance(self._registry, Mapping) else None

    def one(self) -> Any:
        """Marks a setting whose value is one of the names: `Annotated[str, choices.one()]`."""
        return tyro.conf.arg(constructor_factory=self._name, help_behavior_hint=_default)

    def several(self) -> Any:
        """Marks a setting whose value is a tuple of the names."""
        return tyro.conf.arg(constructor_factory=self._names, help_behavior_hint=_default)

    def _name(self) -> Any:
        return Literal[tuple(self._registry)]

    def _names(self) -> Any:
        return tuple[self._name(), ...]  # type: ignore[misc]


def _default(shown: str) -> str:
    """The end of a help text; tyro shows the default of a setting with choices as a list."""
    names = re.findall(r"[\w-]+", shown)
    return f"(default: {' '.join(names)})"


@dataclass(frozen=True)
class Range:
    """The values that a number may have, stated with its type: `Annotated[int, POSITIVE]`.

    For several numbers, `Annotated[tuple[float, ...], POSITIVE]`, it is the range of each.

    Args:
        holds: whether a value is in the range.
        rule: what the sentence that refuses another value says about the flag.
        rule_of_several: the same for a flag that takes several numbers.
        infinite: whether infinity may be in it; NaN never is.
        empty: whether there may be none of several numbers.
    """

    holds: Callable[[float], bool]
    rule: str
    rule_of_several: str = ""
    infinite: bool = False
    empty: bool = False

    def refuse(self, flag: str, value: float | tuple[float, ...]) -> None:
        """Refuse a value outside the range with a sentence that names its flag."""
        several = isinstance(value, tuple)
        numbers = value if isinstance(value, tuple) else (value,)
        rule = (self.rule_of_several or self.rule) if several else self.rule
        if all(map(self._is_bounded, numbers)):
            if all(map(self.holds, numbers)) and (numbers or self.empty):
                return
        else:
            rule = "must be finite numbers" if several else "must be a finite number"
        verb = "are" if several else "is"
        shown = " ".join(map(str, numbers)) or "none"
        raise NtkMarglikError(f"{flag} {rule}, but {verb} {shown}.")

    def _is_bounded(self, number: float) -> bool:
        """Whether a number is finite, or infinite where that is allowed."""
        return math.isfinite(number) or (self.infinite and not math.isnan(number))


POSITIVE = Range(
    lambda value: value > 0, "must be greater than 0", "must be numbers greater than 0"
)
FRACTION = Range(lambda value: 0 <= value < 1, "must be at least 0 and below 1")
NOT_NEGATIVE = Range(lambda value: value >= 0, "must not be negative")
ANY_NUMBER = Range(lambda value: True, "must be a number")

Fraction = Annotated[float, FRACTION]
PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
PositiveFloats = Annotated[tuple[float, ...], POSITIVE]
NonNegativeInt = Annotated[int, NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, NOT_NEGATIVE]
NonNegativeInts = Annotated[tuple[int, ...], replace(NOT_NEGATIVE, empty=True)]
# a time or a size that may be without limit
Limit = Annotated[float, replace(NOT_NEGATIVE, infinite=True)]
AnyFloat = Annotated[float, ANY_NUMBER]


@dataclass(frozen=True)
class Settings:
    """Groups of settings, each a dataclass with defaults; names are unique over all groups."""

    script: ClassVar[str]  # the program that these are the settings of

    def flat(self) -> dict[str, Any]:
        """All settings by name, as plain values."""
        settings = {}
        for group in fields(self):
            part = getattr(self, group.name)
            for setting in fields(part):
                value = getattr(part, setting.name)
                settings[setting.name] = str(value) if isinstance(value, Path) else value
        return settings

    def free(self) -> set[str]:
        """Settings that do not change the numbers of a run, as each group marks its own: FREE."""
        groups = [getattr(self, group.name) for group in fields(self)]
        return {name for group in groups for name in getattr(group, "FREE", ())}

    def updated(self: S, **changes: Any) -> S:
        """A copy with some settings changed by name."""
        groups = {}
        for group in fields(self):
            part = getattr(self, group.name)
            names = [name for name in changes if hasattr(part, name)]
            groups[group.name] = replace(part, **{name: changes.pop(name) for name in names})
        if changes:
            raise NtkMarglikError(
                f"Unknown setting {next(iter(changes))!r}; known are {', '.join(self.flat())}."
            )
        return type(self)(**groups)

    def refuse_other(self, stored: dict[str, Any]) -> None:
        """Refuse to resume a run whose stored settings differ in any that changes its numbers."""
        free = self.free()
        for name, value in self.flat().items():
            if name not in free and _plain(stored.get(name, value)) != _plain(value):
                raise NtkMarglikError(
                    f"The run to resume was started with {name} = {stored[name]}, but {value} is "
                    "given now. Resume it with --config and its config.yaml, or start a new one "
                    "without --resume. Nothing was changed."
                )

    def defaults(self: S) -> S:
        """What settings are that a command does not give."""
        return type(self)()

    def arguments(self) -> list[str]:
        """The flags that differ from the defaults, as a shell would pass them."""
        defaults = self.defaults().flat()
        flags: list[str] = []
        for name, value in self.flat().items():
            if value != defaults[name]:
                flags.extend(_flag(name, value))
        return flags

    def command(self, script: str = "") -> str:
        """The command line that gives this configuration."""
        return shlex.join(["python", script or self.script, *self.arguments()])


def check_numbers(settings: Settings) -> None:
    """Refuse every number that is outside the range stated where the setting is declared."""
    for name, value, allowed in numbers_of(settings):
        if allowed is not None:
            allowed.refuse(f"--{name.replace('_', '-')}", value)


def numbers_of(settings: Settings) -> Iterator[tuple[str, Any, Range | None]]:
    """Name, value and stated range of every setting that is a number or several numbers."""
    for group in fields(settings):
        part = getattr(settings, group.name)
        hints = get_type_hints(type(part), include_extras=True)
        for setting in fields(part):
            kind = hints[setting.name]
            marks = getattr(kind, "__metadata__", ())
            stated = next((mark for mark in marks if isinstance(mark, Range)), None)
            if marks:
                kind = kind.__origin__
            if kind in (int, float, tuple[int, ...], tuple[float, ...]):
                yield setting.name, getattr(part, setting.name), stated


def _plain(value: Any) -> Any:
    """A value as it is read back from yaml or a checkpoint, where several values are a list."""
    return list(value) if isinstance(value, tuple) else value


def parse_as(kind: type[S], arguments: Sequence[str] | None = None, defaults: S | None = None) -> S:
    """Settings from flags; `--config file.yaml` stands for the flags in that file.

    Args:
        kind: of settings.
        arguments: of the command line; later flags override earlier ones and those of files.
        defaults: what settings are that are not given.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return tyro.cli(
        kind,
        default=defaults or kind(),
        config=(tyro.conf.OmitArgPrefixes,),
        args=_with_files(list(arguments), kind().flat()),
        prog=kind.script,
        description=f"{kind.__doc__}\n\n--config FILE.yaml reads settings from a file; "
        "flags override it.",
    )


def _with_files(arguments: list[str], defaults: dict[str, Any]) -> list[str]:
    """Arguments with the settings of `--config` files placed before all others."""
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
            from_files.extend(_flags_of(Path(inline), defaults))
        else:
            rest.append(argument)
        position += 1
    return from_files + rest


def _flags_of(path: Path, defaults: dict[str, Any]) -> list[str]:
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
            f"{path} must hold settings as `name: value` lines, but holds a "
            f"{type(settings).__name__}."
        )
    flags: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise NtkMarglikError(
                f"{path}: unknown setting {key!r}.{hint} --help lists all of them."
            )
        if value is not None:
            _refuse_other_kind(f"{path}: {key}", value, defaults[name])
            flags.extend(_flag(name, value))
    return flags


def _refuse_other_kind(setting: str, value: Any, default: Any) -> None:
    """Refuse a value of a file that is of another kind than the default; tyro reads the rest."""
    several = isinstance(default, tuple) and isinstance(value, list)
    if isinstance(value, dict | list) and not several:
        raise NtkMarglikError(f"{setting} must be a single value, but is {value!r}.")
    if isinstance(value, bool) == isinstance(default, bool):
        return
    expected = "true or false" if isinstance(default, bool) else f"a value like {default!r}"
    raise NtkMarglikError(f"{setting} must be {expected}, but is {value!r}.")


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = value if isinstance(value, tuple | list) else [value]
    return [f"--{flag}", *map(str, values)]
