"""The command `ntk-marglik`: every program of this package by name.

    ntk-marglik run --method ntk --dataset digits --epochs 20
    ntk-marglik doctor

What a program needs is imported when it is called: the list and a mistyped name take no time.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ntkmarglik.errors import REFUSED

NAME = "ntk-marglik"


@dataclass(frozen=True)
class Command:
    """A program by its name on the command line."""

    name: str
    target: str  # module:function; takes arguments, returns an exit code
    help: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def there(self) -> bool:
        """Whether its module is installed; nothing of it is run."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # its package is not there either
            return False

    def __call__(self, arguments: list[str]) -> int:
        function = self.target.partition(":")[2]
        sys.argv = [f"{NAME} {self.name}", *arguments]  # the name in its usage and errors
        return getattr(importlib.import_module(self.module), function)(arguments)


COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
PROGRAMS = "ntkmarglik.programs"
COMMANDS = (
    Command(
        "run", f"{PROGRAMS}.classify.command:main", "train, and learn hyperparameters by evidence"
    ),
    Command(
        "grid", f"{PROGRAMS}.grid.command:main", "bounds of the evidence over a grid of values"
    ),
    Command("finetune", f"{PROGRAMS}.finetune.command:main", "fine-tune a pretrained network"),
    Command("launch", f"{PROGRAMS}.launch.run:main", "run a file of commands as jobs, or on SLURM"),
    Command("report", f"{PROGRAMS}.report.run:main", "a page about runs that opens in a browser"),
    Command("figures", f"{PROGRAMS}.paper.draw:main", "draw figures from runs and csv files"),
    Command("doctor", f"{PROGRAMS}.doctor.run:main", "what is installed, and whether it works"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    commands = {command.name: command for command in COMMANDS if command.there()}
    if name in COMPLETION:
        from ntkmarglik.programs.completion import script

        script([name, *rest], {key: c.help for key, c in commands.items()}, NAME)
        return 0
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(commands)}."
        print(f"error: {NAME} has no command {name[:60]!r}. {hint}", file=sys.stderr)
        return REFUSED
    return _called(commands[name], rest)


def usage() -> str:
    """The commands that are installed, a line each."""
    lines = [f"  {command.name:10} {command.help}" for command in COMMANDS if command.there()]
    return "\n".join(
        [f"usage: {NAME} COMMAND ...", "", *lines, "", f"{NAME} COMMAND --help lists its flags."]
    )


def _called(command: Command, arguments: list[str]) -> int:
    """Call a command; libraries that it needs and are not there are named with their extra."""
    try:
        return command(arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ntkmarglik"):
            raise
        print(
            f"error: {NAME} {command.name} needs {error.name}: pip install 'ntk-marglik[runner]'",
            file=sys.stderr,
        )
        return REFUSED
