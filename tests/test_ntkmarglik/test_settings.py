"""Numbers of settings: each states its range where it is declared, and others are refused."""

import math
from dataclasses import dataclass, field

import pytest

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.settings import (
    ANY_NUMBER,
    AnyFloat,
    Limit,
    NonNegativeInts,
    PositiveFloats,
    PositiveInt,
    Settings,
    check_numbers,
    numbers_of,
)

PROGRAMS = (Config, GridConfig, FinetuneConfig)
NUMBERS = [(program, *number) for program in PROGRAMS for number in numbers_of(program())]
NAMES = [f"{program.__name__}.{name}" for program, name, *_ in NUMBERS]


def refused(settings):
    with pytest.raises(NtkMarglikError) as error:
        check_numbers(settings)
    return str(error.value)


def is_number(value):
    numbers = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_walk_misses_no_number_and_accepts_the_defaults(program):
    numbers = {name for name, value in program().flat().items() if is_number(value)}
    walked = {name for name, *_ in numbers_of(program())}
    assert numbers <= walked
    assert walked - numbers <= {"classes"}  # none by default
    check_numbers(program())


@pytest.mark.parametrize("program, name, default, allowed", NUMBERS, ids=NAMES)
def test_every_number_states_its_range_and_others_are_refused(program, name, default, allowed):
    assert allowed is not None, f"{name} states no range"
    flag = f"--{name.replace('_', '-')} "
    several = isinstance(default, tuple)
    outside = [math.nan]
    if not allowed.infinite:
        outside.append(math.inf)
    if allowed is not ANY_NUMBER:
        outside.append(-1)
    for value in outside:
        message = refused(program().updated(**{name: (value,) if several else value}))
        assert message.startswith(flag) and message.endswith(f" {value}.")


@dataclass(frozen=True)
class Group:
    steps: PositiveInt = 1
    rates: PositiveFloats = (0.1,)
    labels: NonNegativeInts = ()
    patience: Limit = 0.0
    offset: AnyFloat = 0.0
    name: str = ""


@dataclass(frozen=True)
class Program(Settings):
    script = "program.py"

    group: Group = field(default_factory=Group)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"steps": 0}, "--steps must be greater than 0, but is 0."),
        ({"steps": -3}, "--steps must be greater than 0, but is -3."),
        ({"rates": (0.1, 0.0)}, "--rates must be numbers greater than 0, but are 0.1 0.0."),
        ({"rates": ()}, "--rates must be numbers greater than 0, but are none."),
        ({"rates": (0.1, math.inf)}, "--rates must be finite numbers, but are 0.1 inf."),
        ({"labels": (3, -1)}, "--labels must not be negative, but are 3 -1."),
        ({"patience": -1.0}, "--patience must not be negative, but is -1.0."),
        ({"patience": math.nan}, "--patience must be a finite number, but is nan."),
        ({"offset": -math.inf}, "--offset must be a finite number, but is -inf."),
    ],
)
def test_a_number_outside_its_range_is_refused_in_a_sentence(changes, sentence):
    assert refused(Program().updated(**changes)) == sentence


def test_numbers_within_their_ranges_are_accepted():
    check_numbers(Program().updated(steps=5, labels=(0, 1), patience=math.inf, offset=-2.0))
