"""The log-determinant from effective dimensions on a ladder of precisions.

Of M and t A the effective dimension gamma(t) = tr((t A + M)^-1 M) = sum_r l_r / (l_r + t), l the
eigenvalues of A^-1 M, and

    log|I + A^-1 M| = int_1^inf gamma(t) dt / t.

gamma falls and t gamma(t) rises with t, so between rungs s < t, with gamma(s) and gamma(t) known,

    max(gamma(t), s gamma(s) / v)  <=  gamma(v)  <=  min(gamma(s), t gamma(t) / v),   s <= v <= t,

and beyond the last rung t gamma(t) / v <= gamma(v) <= tr(A^-1 M) / v. Integrated, these are a
bracket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence

# on either side of the bracket: about 95 % of a normal error, somewhat less for few samples
STANDARD_ERRORS = 2.0


def rungs(trace: float, count: int) -> list[float]:
    """Factors from 1 to at least 2, geometric, the last so large that at most one nat lies beyond
    it.
    """
    if count < 2:
        raise MarglikError(f"a ladder needs at least 2 precisions, got {count}")
    ratio = max(2.0, trace) ** (1 / (count - 1))
    return [ratio**i for i in range(count)]


def integral(factors: Sequence[float], gammas: Sequence[float], trace: float) -> float:
    """The trapezoidal rule in log t, kept inside the bracket; its middle beyond the last rung."""
    inner = 0.0
    for s, t, first, last in zip(factors, factors[1:], gammas, gammas[1:], strict=False):
        low, high = _between(s, t, first, last)
        inner += min(max(0.5 * (first + last) * math.log(t / s), low), high)
    return inner + 0.5 * (gammas[-1] + max(trace / factors[-1], gammas[-1]))


def bracket(factors: Sequence[float], gammas: Sequence[float], trace: float) -> tuple[float, float]:
    """Lower and upper bound of the log-determinant for exact gammas; with estimates, nearly."""
    low, high = gammas[-1], max(trace / factors[-1], gammas[-1])
    for s, t, first, last in zip(factors, factors[1:], gammas, gammas[1:], strict=False):
        least, most = _between(s, t, first, last)
        low, high = low + least, high + most
    return low, high


def _between(s: float, t: float, first: float, last: float) -> tuple[float, float]:
    """Bounds of the integral from s to t, given gamma(s) and gamma(t)."""
    if first <= 0:
        return 0.0, 0.0
    # noise may break the order that the exact ones have
    last = min(max(last, first * s / t), first)
    steps = math.log(last * t / (first * s))
    return first - last + last * steps, first - last + first * steps


@dataclass(frozen=True, repr=False)
class LadderEvidence(Evidence):
    """An evidence whose log-determinant is an integral over a ladder of estimated effective
    dimensions.

    bracket: what the rule of integration leaves open, were the effective dimensions exact. It says
    nothing about the sampling error and is no interval for the evidence: that is `interval`.
    """

    bracket: tuple[float, float] = (-math.inf, math.inf)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The bracket widened by two standard errors on either side; None for one sample, whose
        error is not known.
        """
        if self.standard_error is None:
            return None
        low, high = self.bracket
        return (
            low - STANDARD_ERRORS * self.standard_error,
            high + STANDARD_ERRORS * self.standard_error,
        )

    def __repr__(self) -> str:
        interval = "unknown: one sample has no standard error"
        if self.interval is not None:
            interval = f"({self.interval[0]:.6g}, {self.interval[1]:.6g})"
        return f"{super().__repr__()[:-1]}, interval={interval})".replace(
            "Evidence", "LadderEvidence", 1
        )
