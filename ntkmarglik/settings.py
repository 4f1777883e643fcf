"""What every program's settings can do: be read from flags and yaml, checked, and written again."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

import tyro
import yaml

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.values import Range, refuse_text

LARGEST_FILE = 2**20  # bytes of a file of settings
SHOWN = 60  # letters of a value in an error

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
class Settings:
    """Groups of settings, each a dataclass with defaults; names are unique over all groups."""

    script: ClassVar[str]  # the program that these are the settings of
    # what a newcomer needs first, in a few words each: the head of --help
    first: ClassVar[Mapping[str, str]] = {}
    note: ClassVar[str] = ""  # on what the program takes besides flags of settings

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

    def given(self, names: Collection[str]) -> list[str]:
        """Those of some settings that differ from the defaults, as flags with their values."""
        defaults = self.defaults().flat()
        settings = self.flat()
        changed = [name for name in settings if name in names and settings[name] != defaults[name]]
        return [" ".join(_flag(name, settings[name])) for name in changed]

    def command(self, script: str = "") -> str:
        """The command line that gives this configuration."""
        return shlex.join(["python", script or self.script, *self.arguments()])


def check_values(settings: Settings) -> None:
    """Refuse every value that its setting cannot have, whatever the program does with it.

    Numbers have to be in the range stated where the setting is declared; texts and paths have to be
    such that files and records can hold them.
    """
    for name, value, allowed in numbers_of(settings):
        if allowed is not None:
            allowed.refuse(flag_of(name), value)
    defaults = settings.defaults().flat()
    for name, value in settings.flat().items():
        if isinstance(value, str):
            refuse_text(flag_of(name), value, empty=defaults[name] == "")


def warn_unused(settings: Settings, names: Collection[str], where: str) -> None:
    """Say which settings are given although they change nothing: they were meant to do something.

    names: those that are not used. where: with what, in flags.
    """
    flags = settings.given(names)
    if flags:
        print(f"warning: not used with {where}: {', '.join(flags)}", file=sys.stderr)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


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
        description=f"{kind.__doc__}\n\n{_first(kind)}--config FILE.yaml reads settings from a "
        f"file; flags override it. {kind.note}".rstrip(),
    )


def _first(kind: type[Settings]) -> str:
    """The flags to begin with, a line each with what they are without being given."""
    if not kind.first:
        return ""
    defaults = kind().defaults().flat()
    lines = [
        f"  {flag_of(name):12} {words} [{defaults[name]}]" for name, words in kind.first.items()
    ]
    return "\n".join(["To begin with [default]; all flags are below:", *lines, "\n"])


def names_given(kind: type[Settings], arguments: Sequence[str] | None = None) -> set[str]:
    """The settings that a command line names, itself or by a file, whatever their values are.

    Args:
        kind: of settings.
        arguments: of the command line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    known = kind().flat()
    flags = [argument.partition("=")[0] for argument in _with_files(list(arguments), known)]
    names = {flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")}
    return names & known.keys()


def refusing(parse: Callable[[Sequence[str]], S], arguments: Sequence[str]) -> S:
    """What a parser makes of arguments; what it would print before it exits is raised."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return parse(arguments)
    except SystemExit as error:
        if not error.code:
            raise NtkMarglikError("--help makes no run; leave it out.") from None
        raise NtkMarglikError(_reason(said.getvalue())) from None


def _reason(said: str) -> str:
    """The parser's message without its frame, its title and its hints."""
    lines = [line.strip(" │|") for line in said.splitlines()]
    words = [line for line in lines if any(c.isalnum() for c in line)][1:]
    hints = [
        i
        for i, line in enumerate(words)
        if line.startswith(("For full helptext", "Argument helptext"))
    ]
    return " ".join(words[: hints[0] if hints else None]) or "the parser refuses it."


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
    _refuse_empty(from_files + rest, defaults)
    return from_files + rest


def _refuse_empty(arguments: list[str], defaults: dict[str, Any]) -> None:
    """Refuse a flag with an empty value, which would be taken for the working directory."""
    flag = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("--"):
            flag = name
        empty = not argument or (argument.startswith("--") and equals and not value)
        if empty and defaults.get(flag[2:].replace("-", "_")) != "":
            raise NtkMarglikError(f"{flag or 'a value'} must not be empty.")


def _flags_of(path: Path, defaults: dict[str, Any]) -> list[str]:
    """The settings of a yaml file as flags."""
    settings = read_yaml(path)
    flags: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in defaults:
            close = difflib.get_close_matches(name[:SHOWN], defaults, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise NtkMarglikError(
                f"{path}: unknown setting {_brief(key)}.{hint} --help lists all of them."
            )
        if value is not None:
            _refuse_other_kind(f"{path}: {key}", value, defaults[name])
            flags.extend(_flag(name, value))
    return flags


def read_yaml(path: Path) -> dict[Any, Any]:
    """The `name: value` lines of a yaml file; one that holds anything else is refused."""
    refuse_text("The name of a file of settings", path, empty=False)
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise NtkMarglikError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    if len(content) > LARGEST_FILE:
        raise NtkMarglikError(
            f"{path} has more than {LARGEST_FILE:,} bytes, which is no file of settings."
        )
    try:
        settings = yaml.load(content.decode(), _UniqueKeys)
    except UnicodeDecodeError as error:
        raise NtkMarglikError(f"{path} is not text in UTF-8 ({error.reason}).") from error
    except RecursionError:
        raise NtkMarglikError(
            f"{path} is nested too deeply; settings are `name: value` lines."
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise NtkMarglikError(f"{path} is not valid yaml: {error}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise NtkMarglikError(
            f"{path} must hold settings as `name: value` lines, but holds a "
            f"{type(settings).__name__}."
        )
    return settings


class _UniqueKeys(yaml.SafeLoader):
    """Plain yaml in which every name stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{_brief(key.value)} stands there twice", node.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                names.add(key.value)
        return super().construct_mapping(node, deep)


def _refuse_other_kind(setting: str, value: Any, default: Any) -> None:
    """Refuse a value of a file that is of another kind than the default; tyro reads the rest."""
    several = isinstance(default, tuple) and isinstance(value, list)
    if isinstance(value, dict | list) and not several:
        raise NtkMarglikError(f"{setting} must be a single value, but is a {type(value).__name__}.")
    if several and any(isinstance(entry, dict | list) for entry in value):
        raise NtkMarglikError(f"{setting} must be a list of single values.")
    if isinstance(value, bool) == isinstance(default, bool):
        return
    expected = "true or false" if isinstance(default, bool) else f"a value like {default!r}"
    raise NtkMarglikError(f"{setting} must be {expected}, but is {_brief(value)}.")


def _brief(value: Any) -> str:
    """A value in an error, however long it is."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _flag(name: str, value: Any) -> list[str]:
    flag = flag_of(name)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    values = value if isinstance(value, tuple | list) else [value]
    return [flag, *map(str, values)]
