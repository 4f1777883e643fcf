"""Which values a setting may have, stated with its type: `Annotated[int, POSITIVE]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Annotated

from ntkmarglik.errors import NtkMarglikError

# Numbers beyond these are mistakes: single precision has neither 1e39 nor 1e-46, and products of
# two settings have to fit as well; indices and the seeds of some libraries are 32-bit integers.
LARGEST_FLOAT = 1e30
SMALLEST_FLOAT = 1e-30
LARGEST_INT = 2**31 - 1
FINITE = "finite"  # the rule that NaN and infinity break
# bytes of a name and of a path that file systems take
LONGEST_NAME = 255
LONGEST_PATH = 1024


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most` that a setting may have.

    For several numbers, `Annotated[tuple[float, ...], POSITIVE]`, it is the range of each.

    Args:
        least: the smallest number.
        most: the largest number; None for the largest that makes sense of its type.
        above: `least` itself is not in the range.
        below: `most` itself is not in the range.
        infinite: whether infinity may be in it; NaN never is.
        empty: whether there may be none of several numbers.
    """

    least: float
    most: float | None = None
    above: bool = False
    below: bool = False
    infinite: bool = False
    empty: bool = False

    def refuse(self, flag: str, value: float | tuple[float, ...]) -> None:
        """Refuse a value outside the range with a sentence that names its flag."""
        several = isinstance(value, tuple)
        numbers = value if isinstance(value, tuple) else (value,)
        rules = [rule for number in numbers if (rule := self._broken_rule(number))]
        if not numbers and not self.empty:
            rules = [self._lower_rule()]
        if not rules:
            return
        kind = rules[0]
        if several:
            kind = "finite numbers" if kind == FINITE else f"numbers {kind}"
        verb = "are" if several else "is"
        shown = " ".join(map(_shown, numbers)) or "none"
        raise NtkMarglikError(f"{flag} must be {kind}, but {verb} {shown}.")

    def _broken_rule(self, number: float) -> str:
        """What a number outside the range must be; empty for one that is inside."""
        if isinstance(number, float) and not math.isfinite(number):
            return "" if self.infinite and number == math.inf else FINITE
        most = self._largest(number)
        too_small = number < self.least or (self.above and number == self.least)
        too_large = number > most or (self.below and number == most)
        if self.most is not None and (too_small or too_large):
            return f"{self._lower_rule()} and {self._upper_rule(most)}"
        if too_small:
            return self._lower_rule()
        smallest = SMALLEST_FLOAT if isinstance(number, float) else 0
        if self.above and self.least == 0 and number < smallest:
            return f"at least {smallest:g}"
        return self._upper_rule(most) if too_large else ""

    def _lower_rule(self) -> str:
        """What keeps a number above the least one."""
        return f"{'greater than' if self.above else 'at least'} {_shown(self.least)}"

    def _upper_rule(self, most: float) -> str:
        """What keeps a number below the largest one."""
        return f"{'below' if self.below else 'at most'} {_shown(most)}"

    def _largest(self, number: float) -> float:
        """The largest number of its type."""
        if self.most is not None:
            return self.most
        if self.infinite:
            return math.inf
        return LARGEST_FLOAT if isinstance(number, float) else LARGEST_INT


def _shown(number: float) -> str:
    """A number in a sentence, however long it is."""
    if isinstance(number, int):
        return str(number) if abs(number) < 10**20 else f"{_leading(number)}..."
    return str(number)


def _leading(number: int) -> int:
    """The first digits of a huge integer, which Python may refuse to write."""
    digits = max(0, int(abs(number).bit_length() * math.log10(2)) - 10)
    return number // 10**digits


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1, below=True)
SHARE = Range(0, 1, above=True, below=True)
ANY_NUMBER = Range(-LARGEST_FLOAT)
SEVERAL = Range(2, 1000)
# a year: timers of libraries overflow beyond a few of them
SECONDS = Range(0, 366 * 24 * 3600, above=True)
THREADS = Range(0, 1024)
# lines of a table or points of a figure that somebody can still look at
POINTS = Range(0, 100_000, above=True)
LAYERS = Range(0, 10_000, above=True)

Fraction = Annotated[float, FRACTION]
Share = Annotated[float, SHARE]
PositiveInt = Annotated[int, POSITIVE]
PositiveFloat = Annotated[float, POSITIVE]
PositiveFloats = Annotated[tuple[float, ...], POSITIVE]
NonNegativeInt = Annotated[int, NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, NOT_NEGATIVE]
NonNegativeInts = Annotated[tuple[int, ...], replace(NOT_NEGATIVE, empty=True)]
# a time or a size that may be without limit
Limit = Annotated[float, replace(NOT_NEGATIVE, infinite=True)]
AnyFloat = Annotated[float, ANY_NUMBER]
Several = Annotated[int, SEVERAL]
Seconds = Annotated[float, SECONDS]
Threads = Annotated[int, THREADS]
Points = Annotated[int, POINTS]
Layers = Annotated[int, LAYERS]


def refuse_text(flag: str, value: str | PurePath, *, empty: bool) -> None:
    """Refuse a text or a path that no file system or no record of a run could hold.

    empty: whether there may be no text at all.
    """
    text = str(value)
    shown = ascii(text if len(text) <= 40 else f"{text[:37]}...")
    if not text.strip() and not empty:
        raise NtkMarglikError(f"{flag} must not be empty.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise NtkMarglikError(f"{flag} must be text in UTF-8, but is {shown}.") from None
    if not text.isprintable():
        raise NtkMarglikError(
            f"{flag} must have no line breaks or control characters, but is {shown}."
        )
    parts = PurePath(text).parts
    longest = max((len(part.encode()) for part in parts), default=0)
    if longest > LONGEST_NAME or size > LONGEST_PATH:
        raise NtkMarglikError(
            f"{flag} must have names of at most {LONGEST_NAME} bytes, {LONGEST_PATH} in all, but "
            f"{shown} has {longest}, {size} in all."
        )
