"""The log-determinant from effective dimensions on a ladder of precisions.

Of M and t A the effective dimension gamma(t) = tr((t A + M)^-1 M) = sum_r l_r / (l_r + t), l the eigenvalues of A^-1 M,
and

    log|I + A^-1 M| = int_1^inf gamma(t) dt / t.

gamma falls and t gamma(t) rises with t, so between rungs s < t, with gamma(s) and gamma(t) known,

    max(gamma(t), s gamma(s) / v)  <=  gamma(v)  <=  min(gamma(s), t gamma(t) / v),        s <= v <= t,

and beyond the last rung t gamma(t) / v <= gamma(v) <= tr(A^-1 M) / v. Integrated, these are a bracket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MarglikError
from ..evidence import Evidence


def rungs(trace: float, count: int) -> list[float]:
    """Factors from 1 to at least 2, geometric, the last so large that at most one nat lies beyond it."""
    if count < 2:
        raise MarglikError(f"a ladder needs at least 2 precisions, got {count}")
    ratio = max(2.0, trace) ** (1 / (count - 1))
    return [ratio**i for i in range(count)]


def integral(factors: Sequence[float], gammas: Sequence[float], trace: float) -> float:
    """The trapezoidal rule in log t, with the middle of the bracket beyond the last rung."""
    inner = sum(
        0.5 * (gammas[i] + gammas[i + 1]) * math.log(factors[i + 1] / factors[i]) for i in range(len(factors) - 1)
    )
    return inner + 0.5 * (gammas[-1] + max(trace / factors[-1], gammas[-1]))


def bracket(factors: Sequence[float], gammas: Sequence[float], trace: float) -> tuple[float, float]:
    """Lower and upper bound of the log-determinant for exact gammas; with estimates, nearly."""
    low, high = gammas[-1], max(trace / factors[-1], gammas[-1])
    for s, t, first, last in zip(factors, factors[1:], gammas, gammas[1:], strict=False):
        last = min(max(last, first * s / t), first)  # noise may break the order that the exact ones have
        if first <= 0:
            continue
        turn = first * s / last  # where s gamma(s) / v falls to gamma(t)
        low += first - last + last * math.log(t / turn)
        turn = last * t / first  # where t gamma(t) / v falls below gamma(s)
        high += first * math.log(turn / s) + first - last
    return low, high


@dataclass(frozen=True)
class LadderEvidence(Evidence):
    """An evidence whose log-determinant is an integral: `bracket` holds its total for exact effective dimensions."""

    bracket: tuple[float, float] = (-math.inf, math.inf)
