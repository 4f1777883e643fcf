"""The log-determinant from effective dimensions on a ladder of precisions.

With the prior precision multiplied by t, the effective dimension is
gamma(t) = tr((t A + M)^-1 M) = sum_r l_r / (l_r + t), where l are the eigenvalues of A^-1 M, and

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

# width of the interval on either side of the bracket: covers about 95 % of a normal error, and
# somewhat less with few samples
STANDARD_ERRORS = 2.0


def rungs(trace: float, count: int) -> list[float]:
    """Factors t of the precision from 1 to max(2, trace), in geometric steps.

    Beyond the last there is at most one nat of the integral.

    Args:
        trace: tr(A^-1 M).
        count: number of factors, at least 2.
    """
    if count < 2:
        raise MarglikError(f"a ladder needs at least 2 precisions, got {count}")
    ratio = max(2.0, trace) ** (1 / (count - 1))
    return [ratio**i for i in range(count)]


def integral(factors: Sequence[float], gammas: Sequence[float], trace: float) -> float:
    """The trapezoidal rule in log t, limited to the bracket, and the bracket's middle at the end.

    Args:
        factors: the rungs t.
        gammas: effective dimensions gamma(t), one for each rung.
        trace: tr(A^-1 M).
    """
    inner = 0.0
    for s, t, first, last in zip(factors, factors[1:], gammas, gammas[1:], strict=False):
        low, high = _between(s, t, first, last)
        trapezoid = 0.5 * (first + last) * math.log(t / s)
        inner += min(max(trapezoid, low), high)
    low, high = _beyond(factors, gammas, trace)
    return inner + 0.5 * (low + high)


def bracket(factors: Sequence[float], gammas: Sequence[float], trace: float) -> tuple[float, float]:
    """Lower and upper bound of the log-determinant for exact gammas; with estimates, nearly.

    Args:
        factors: the rungs t.
        gammas: effective dimensions gamma(t), one for each rung.
        trace: tr(A^-1 M).
    """
    low, high = _beyond(factors, gammas, trace)
    for s, t, first, last in zip(factors, factors[1:], gammas, gammas[1:], strict=False):
        least, most = _between(s, t, first, last)
        low += least
        high += most
    return low, high


def _between(s: float, t: float, first: float, last: float) -> tuple[float, float]:
    """Bounds of the integral from s to t, by gamma(s) = first and gamma(t) = last."""
    if first <= 0:
        return 0.0, 0.0
    # noise may break the order that the exact ones have
    last = min(max(last, first * s / t), first)
    steps = math.log(last * t / (first * s))
    return first - last + last * steps, first - last + first * steps


def _beyond(factors: Sequence[float], gammas: Sequence[float], trace: float) -> tuple[float, float]:
    """Bounds of the integral from the last rung to infinity."""
    return gammas[-1], max(trace / factors[-1], gammas[-1])


@dataclass(frozen=True, repr=False)
class LadderEvidence(Evidence):
    """An evidence whose log-determinant is an integral over a ladder of effective dimensions.

    `bracket` is what the rule of integration leaves open, were the effective dimensions exact. It
    says nothing about the sampling error and is no interval for the evidence: that is `interval`.
    """

    bracket: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        """The interval is the bracket widened by standard errors; one sample has none."""
        if self.standard_error is not None:
            low, high = self.bracket
            margin = STANDARD_ERRORS * self.standard_error
            object.__setattr__(self, "interval", (low - margin, high + margin))

    def __repr__(self) -> str:
        evidence = super().__repr__().replace("Evidence", "LadderEvidence", 1)
        if self.interval is not None:
            return evidence
        return f"{evidence[:-1]}, interval=unknown: one sample has no standard error)"
