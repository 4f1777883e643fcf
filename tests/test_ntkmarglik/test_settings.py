"""Settings of all programs: each states which values it may have, and others are refused."""

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify import command as classify
from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.finetune import command as finetune
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.grid import command as grid
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.settings import (
    Settings,
    check_values,
    flag_of,
    names_given,
    numbers_of,
    warn_unused,
)
from ntkmarglik.values import Limit, NonNegativeInts, PositiveInt

PROGRAMS = {Config: classify, GridConfig: grid, FinetuneConfig: finetune}
BAD = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "1e99": 1e99,
    "-1": -1,
    "0": 0,
    "": "",
    "9" * 25: int("9" * 25),
    "x" * 300: "x" * 300,
}


def is_number(value):
    numbers = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_walk_misses_no_number_and_accepts_the_defaults(program):
    numbers = {name for name, value in program().flat().items() if is_number(value)}
    walked = {name for name, *_ in numbers_of(program())}
    assert numbers <= walked
    assert walked - numbers <= {"classes"}  # none by default
    check_values(program())


def kinds(program):
    """Every setting of a program with its type."""
    for group in dataclasses.fields(program()):
        part = getattr(program(), group.name)
        for name, kind in typing.get_type_hints(type(part), include_extras=True).items():
            if name in program().flat():
                yield name, kind


def expectation(kind, default, text, value, allowed):
    """Whether a setting of this type must refuse a value; None if that depends on more."""
    if allowed is None:
        is_text = kind is str or "Path" in str(kind)
        empty_or_long = (text == "" and default != "") or len(text) > 255
        return True if is_text and empty_or_long else None
    if not isinstance(value, int | float):
        return True
    whole = kind.__origin__ in (int, tuple[int, ...])
    if whole and not isinstance(value, int):
        return True  # what is written is no whole number
    number = value if whole else float(value)
    try:
        allowed.refuse("--flag", (number,) if isinstance(default, tuple) else number)
    except NtkMarglikError:
        return True
    return False


WALK = [
    pytest.param(program, name, kind, id=f"{program.__name__}.{name}")
    for program in PROGRAMS
    for name, kind in kinds(program)
    if not isinstance(program().flat()[name], bool)  # flags without a value
]


class ReachedData(Exception):
    """A program did not refuse its settings before it looked for data."""


@pytest.mark.parametrize("program, name, kind", WALK)
def test_every_setting_refuses_bad_values_before_work_starts(
    program, name, kind, monkeypatch, tmp_path, capsys
):
    """By the command line, as a user would give them; those that a setting may have go through."""
    monkeypatch.chdir(tmp_path)

    def load(*_, **__):
        raise ReachedData

    for place in ("classify.run.load", "grid.run.load", "finetune.run.find"):
        monkeypatch.setattr(f"ntkmarglik.programs.{place}", load)
    default = program().flat()[name]
    ranges = {number: allowed for number, _, allowed in numbers_of(program())}
    for text, value in BAD.items():
        expected = expectation(kind, default, text, value, ranges.get(name))
        others = ["--method", "ntk"] if program is Config and name != "method" else []
        try:
            # one word, as a value that begins with a minus has to be given
            code = PROGRAMS[program].main([*others, f"{flag_of(name)}={text}"])
        except ReachedData:
            code = 0
        except SystemExit as refused:  # by the parser
            code = refused.code
        said = capsys.readouterr().err
        assert code in (0, 2) and "Traceback" not in said, (text, said)
        if expected is not None:
            assert (code == 2) == expected, (text, said)
        if code == 2:
            shown = "".join(said.split())
            assert flag_of(name) in shown or f"Unknowndataset'{text[:20]}" in shown, said
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Group:
    steps: PositiveInt = 1
    labels: NonNegativeInts = ()
    patience: Limit = 0.0
    name: str = ""
    place: Path = Path("here")


@dataclass(frozen=True)
class Program(Settings):
    script = "program.py"

    group: Group = field(default_factory=Group)


def test_values_are_refused_by_the_flag_of_their_setting():
    for changes, words in (
        ({"steps": 0}, "--steps must be greater than 0"),
        ({"labels": (-1,)}, "--labels must be numbers at least 0"),
        ({"patience": math.nan}, "--patience must be finite"),
        ({"name": "x" * 300}, "--name must have names of at most 255"),
        ({"place": Path("a\0b")}, "--place must have no line breaks"),
    ):
        with pytest.raises(NtkMarglikError, match=words):
            check_values(Program().updated(**changes))
    check_values(Program().updated(steps=5, labels=(0, 1), patience=math.inf))


def test_settings_that_change_nothing_are_told(capsys):
    settings = Program().updated(steps=3, labels=(1, 2))
    warn_unused(settings, {"steps", "labels", "name"}, "--mode none")
    said = "warning: not used with --mode none: --steps 3, --labels 1 2\n"
    assert capsys.readouterr().err == said
    warn_unused(settings, {"name"}, "--mode none")
    assert capsys.readouterr().err == ""


def test_the_names_that_a_command_gives(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("n-data: 50\nlr_hyp: 0.2\n")
    arguments = ["--subset=500", "--lr", "-1", "--no-baseline", "--aug-steps", "3"]
    found = names_given(Config, [*arguments, "--config", str(file)])
    assert {"subset", "lr", "aug_steps", "n_data", "lr_hyp"} <= found
    assert names_given(Config, []) == set()
