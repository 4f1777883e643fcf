"""Which values settings may have: ranges of numbers, texts that files can hold."""

import math
from pathlib import Path

import pytest

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.values import (
    ANY_NUMBER,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SEVERAL,
    SHARE,
    Range,
    refuse_text,
)

LIMIT = Range(0, infinite=True)
SOME = Range(0, empty=True)


@pytest.mark.parametrize(
    "allowed, value, rule",
    [
        (POSITIVE, 0, "must be greater than 0, but is 0."),
        (POSITIVE, -3, "must be greater than 0, but is -3."),
        (POSITIVE, 0.0, "must be greater than 0, but is 0.0."),
        (POSITIVE, 1e-99, "must be at least 1e-30, but is 1e-99."),
        (POSITIVE, 1e99, "must be at most 1e+30, but is 1e+99."),
        (POSITIVE, 2**31, "must be at most 2147483647, but is 2147483648."),
        pytest.param(POSITIVE, 10**5000, "must be at most 2147483647, but is 1000", id="huge"),
        (POSITIVE, (0.1, 0.0), "must be numbers greater than 0, but are 0.1 0.0."),
        (POSITIVE, (), "must be numbers greater than 0, but are none."),
        (POSITIVE, (0.1, math.inf), "must be finite numbers, but are 0.1 inf."),
        (POSITIVE, math.nan, "must be finite, but is nan."),
        (NOT_NEGATIVE, -1, "must be at least 0, but is -1."),
        (SOME, (3, -1), "must be numbers at least 0, but are 3 -1."),
        (FRACTION, 1.0, "must be at least 0 and below 1, but is 1.0."),
        (FRACTION, -0.5, "must be at least 0 and below 1, but is -0.5."),
        (SHARE, 0.0, "must be greater than 0 and below 1, but is 0.0."),
        (SEVERAL, 1, "must be at least 2 and at most 1000, but is 1."),
        (LIMIT, -1.0, "must be at least 0, but is -1.0."),
        (LIMIT, math.nan, "must be finite, but is nan."),
        (LIMIT, -math.inf, "must be finite, but is -inf."),
        (ANY_NUMBER, -math.inf, "must be finite, but is -inf."),
        (ANY_NUMBER, -1e99, "must be at least -1e+30, but is -1e+99."),
    ],
)
def test_a_number_outside_its_range_is_refused_in_a_sentence(allowed, value, rule):
    with pytest.raises(NtkMarglikError) as error:
        allowed.refuse("--flag", value)
    assert str(error.value).startswith(f"--flag {rule}")


@pytest.mark.parametrize(
    "allowed, value",
    [
        (POSITIVE, 1),
        (POSITIVE, 1e-30),
        (POSITIVE, 2**31 - 1),
        (POSITIVE, (1.0, 2.0)),
        (SOME, ()),
        (LIMIT, math.inf),
        (LIMIT, 1e99),
        (FRACTION, 0.0),
        (ANY_NUMBER, -2.0),
    ],
)
def test_a_number_in_its_range_is_accepted(allowed, value):
    allowed.refuse("--flag", value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "must not be empty"),
        ("  ", "must not be empty"),
        ("a\0b", "control characters"),
        ("a\nb", "line breaks"),
        ("\udcff", "UTF-8"),
        ("x" * 300, "at most 255 bytes"),
        (Path("a") / ("ü" * 150), "at most 255 bytes"),
        ("/".join(["part"] * 400), "1024 in all"),
    ],
)
def test_a_text_that_no_file_could_hold_is_refused(text, words):
    with pytest.raises(NtkMarglikError, match=words) as error:
        refuse_text("--out", text, empty=False)
    assert len(str(error.value)) < 250


def test_other_texts_are_accepted():
    for text in ("run", "x" * 255, Path("a/b/ü"), "../elsewhere"):
        refuse_text("--out", text, empty=False)
    refuse_text("--exclude", "", empty=True)
