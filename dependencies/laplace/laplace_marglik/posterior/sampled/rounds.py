"""Minibatch gradients in rounds: each ends with the residual over all data, and the next mends it.

With the residual r = H z - b of the present z, a round looks for a correction d with H d = -r by
the gradients

    g_b(d) = B H_b d + A d + r,     H_b the curvature of one of B batches.

That is the objective L' of `system` in d: its noise is in proportion to d and so vanishes with the
residual, where plain minibatch gradients would hover around the solution. The same residual says
when to end, and whether the end was reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError
from laplace_marglik.posterior.sampled.solve import ConjugateGradients, norms, positive, ratios

NoiseIn = Literal["prior", "data"]
Gradient = Callable[[Tensor, Any], Tensor]
# step size times lambda_max: Nesterov's method with momentum mu is stable below
# 2 (1 + mu) / (1 + 2 mu) > 1.3, and batches differ in their lambda_max
RATE = 0.5
# momentum of the flattest spectra: the noise of batches grows with 1 / (1 - mu)
MOST_MOMENTUM = 0.98
# a round shrinks the slowest error by about exp(-ROUND): a residual over all data, which it ends
# with, is then a small part of its cost
ROUND = 2.0
LEAST_STEPS = 10  # of a round
# in all, where steps are not given
MOST_ROUNDS = 30
ENOUGH_STEPS = 2_000  # no less is given: calmer rounds take more of them
MOST_STEPS = 20_000  # no more: flat priors on steep data ask for millions
# of an objective, relative: what rounding in single precision may add to it
ROUNDING = 1e-5


@dataclass(frozen=True)
class Sgd:
    """Minibatch gradients with Nesterov momentum until every residual is below the tolerance.

    There is no preconditioner here: in a small test it made samples worse.

    Args:
        steps: minibatch steps, at most; None for as many as the spectrum asks for, within limits.
        tolerance: largest relative residual; where it is not reached there is a warning.
        momentum: of Nesterov's method, from 0 to below 1; None for the best one for the spectrum.
        rate: step size; None for 0.5 / lambda_max by power iterations on a batch, and less where
            that diverges.
        decay: the step size falls linearly in a round, to this share of its first.
        clip: longest gradient, in lengths of the residual that a round starts with.
        averaging: share of the steps of a round, at its end, that are averaged; 0 takes the last.
        noise_in: of samples, "prior" (the objective L') or "data" (L, in the first round); see
            `system`.
    """

    steps: int | None = None
    tolerance: float = 0.01
    momentum: float | None = None
    rate: float | None = None
    decay: float = 0.03
    clip: float = 10.0
    averaging: float = 0.25
    noise_in: NoiseIn = "prior"
    rows: ClassVar[int] = 0  # of a preconditioner

    def __post_init__(self) -> None:
        positive(
            steps=1 if self.steps is None else self.steps,
            tolerance=self.tolerance,
            clip=self.clip,
            rate=1.0 if self.rate is None else self.rate,
        )
        if self.steps is not None and self.steps != int(self.steps):
            raise MarglikError(f"steps must be a whole number of at least 1, got {self.steps}")
        if not 0 < self.decay <= 1:
            raise MarglikError(f"decay must be greater than 0 and at most 1, got {self.decay}")
        for name, share in (("momentum", self.momentum or 0.0), ("averaging", self.averaging)):
            if not 0 <= share < 1:
                raise MarglikError(f"{name} must be at least 0 and below 1, got {share}")
        if self.noise_in not in ("prior", "data"):
            raise MarglikError(f"noise_in must be prior or data, got {self.noise_in!r}")


Solver = ConjugateGradients | Sgd


def solver_for(spec: str | Solver) -> Solver:
    """A solver from its name ("cg", "sgd"), or as it is."""
    if isinstance(spec, ConjugateGradients | Sgd):
        return spec
    if spec == "cg":
        return ConjugateGradients()
    if spec == "sgd":
        return Sgd()
    raise MarglikError(f"solver must be 'cg', 'sgd', a ConjugateGradients or an Sgd, got {spec!r}")


@dataclass(frozen=True)
class Plan:
    """What a spectrum asks for."""

    rate: float
    momentum: float
    steps: int  # of a round
    most: int  # in all

    @staticmethod
    def of(settings: Sgd, steepest: float, flattest: float, n_batches: int) -> Plan:
        """The step size by the steepest direction, momentum and steps by the flattest too.

        Args:
            settings: what is given goes before.
            steepest: largest eigenvalue.
            flattest: smallest eigenvalue, or less.
            n_batches: least steps of a round.
        """
        rate = settings.rate or RATE / steepest
        share = min(
            rate * flattest, 1.0
        )  # of the slowest error, removed by a step without momentum
        best = (1 - math.sqrt(share)) / (1 + math.sqrt(share))
        given = settings.momentum
        momentum = min(best, MOST_MOMENTUM) if given is None else given
        removed = min(math.sqrt(share), share / (1 - momentum))
        steps = max(math.ceil(ROUND / removed), n_batches, LEAST_STEPS)
        most = settings.steps or min(max(MOST_ROUNDS * steps, ENOUGH_STEPS), MOST_STEPS)
        return Plan(rate, momentum, min(steps, most), most)

    def calmer(self) -> Plan:
        """Half the step size, half as many steps that momentum remembers, longer rounds."""
        momentum = max(1 - 2 * (1 - self.momentum), 0.0)
        return Plan(self.rate / 2, momentum, min(2 * self.steps, self.most), self.most)


class Residual(NamedTuple):
    """How far k points are from their solutions."""

    gradient: Gradient  # an estimate [k, P] of the gradient at corrections [k, P], from a batch
    lengths: Tensor  # of the gradients at the points themselves [k, 1]
    relative: float  # the largest of the relative residuals
    objectives: Tensor  # what the solutions minimise [k]; momentum lets only residuals oscillate

    def is_below(self, other: Residual) -> bool:
        """Whether all objectives have fallen, but for rounding."""
        slack = ROUNDING * other.objectives.abs()
        return bool((self.objectives <= other.objectives + slack).all())


class Reached(NamedTuple):
    """Where rounds ended."""

    steps: int
    residual: float


def descend(
    residual: Callable[[Tensor], Residual],
    batches: Callable[[], Iterable[Any]],
    z: Tensor,
    settings: Sgd,
    plan: Plan,
    first: Callable[[Tensor], Residual] | None = None,
) -> Reached:
    """Move z by minibatch gradients, in place, until its residual is below the tolerance.

    Args:
        residual: of a point [k, P]; a pass over the data.
        batches: an iterator over the data, for each pass.
        z: the start, and then the solutions [k, P].
        settings: tolerance and so on.
        plan: step size, momentum and steps.
        first: the residual of the start, where its gradients are others.
    """
    stream = _endless(batches)
    present = (first or residual)(z)
    steps = 0
    while present.relative > settings.tolerance and steps < plan.most:
        count = min(plan.steps, plan.most - steps)
        moved = _round(present, stream, torch.zeros_like(z), settings, plan, count).add_(z)
        steps += count
        after = residual(moved) if moved.isfinite().all() else None
        if after is not None and after.is_below(present):
            z.copy_(moved)
            present = after
        elif settings.rate is not None:
            raise MarglikError(
                f"steps of size {plan.rate:.3g} do not lower the objective; give Sgd(rate=...) a "
                "smaller one, or None for that of the spectrum"
            )
        else:
            plan = plan.calmer()
    return Reached(steps, present.relative)


def _endless(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """The batches of one pass after the other."""
    while True:
        yield from batches()


def _round(
    start: Residual,
    stream: Iterator[Any],
    d: Tensor,
    settings: Sgd,
    plan: Plan,
    steps: int,
) -> Tensor:
    """The correction [k, P] after some Nesterov steps from d = 0, which they move in place."""
    bound = settings.clip * start.lengths
    first_averaged = steps - math.ceil(settings.averaging * steps)
    velocity = torch.zeros_like(d)
    average = torch.zeros_like(d) if settings.averaging else d
    for step in range(steps):
        g = start.gradient(d, next(stream))
        g.mul_(ratios(bound, norms(g)).clamp_max(1.0).to(d.dtype))
        velocity.mul_(plan.momentum).add_(g)
        length = plan.rate * (1 - (1 - settings.decay) * step / steps)
        d.sub_(g, alpha=length)
        d.sub_(velocity, alpha=length * plan.momentum)
        if settings.averaging and step >= first_averaged:
            average.add_(d - average, alpha=1 / (step + 1 - first_averaged))
    return average
