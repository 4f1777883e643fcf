"""Solvers of H z = b for several b, from products with H or from minibatch gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError

NoiseIn = Literal["prior", "data"]
Product = Callable[[Tensor], Tensor]
# for the largest eigenvalue: a step of RATE / lambda is stable even if lambda is 2.6 times too low
POWER_ITERATIONS = 20
# weights whose products are added up at once: copies of them in float64 take little memory
PIECE = 2**16
# first step size times lambda_max: Nesterov's method with momentum mu is stable below
# 2 (1 + mu) / (1 + 2 mu) > 1.3
RATE = 0.5


@dataclass(frozen=True)
class ConjugateGradients:
    """Passes over all data until every residual |b - H z| / |b| is below the tolerance.

    Where groups have different precisions, squares of residuals are divided by delta_l + tr(M) / P.

    Args:
        tolerance: largest relative residual.
        max_iterations: products with H, at most.
        rows: root rows of the preconditioner (0: none), each a vector of P numbers in memory.
    """

    tolerance: float = 1e-3
    max_iterations: int = 200
    rows: int = 0

    def __post_init__(self) -> None:
        _positive(tolerance=self.tolerance, max_iterations=self.max_iterations)


@dataclass(frozen=True)
class Sgd:
    """Minibatch gradients with Nesterov momentum and an average over the last steps.

    There is no preconditioner here: in a small test it made samples worse.

    Args:
        passes: over the data.
        momentum: of Nesterov's method, from 0 to below 1.
        rate: first step size; None for 0.5 / lambda_max by power iterations on a batch.
        decay: the step size falls linearly, to this share of the first.
        clip: longest gradient, in lengths of the noise |u| or |A^{1/2} n|, whichever is longer.
        averaging: share of the steps, at the end, that are averaged; 0 takes the last.
        noise_in: "prior" (the objective L', of small variance) or "data" (L); see `system`.
    """

    passes: int = 20
    momentum: float = 0.9
    rate: float | None = None
    decay: float = 0.03
    clip: float = 10.0
    averaging: float = 0.25
    noise_in: NoiseIn = "prior"
    rows: ClassVar[int] = 0  # of a preconditioner

    def __post_init__(self) -> None:
        _positive(
            passes=self.passes,
            decay=self.decay,
            clip=self.clip,
            rate=1.0 if self.rate is None else self.rate,
        )
        for name, share in (("momentum", self.momentum), ("averaging", self.averaging)):
            if not 0 <= share < 1:
                raise MarglikError(f"{name} must be at least 0 and below 1, got {share}")
        if self.noise_in not in ("prior", "data"):
            raise MarglikError(f"noise_in must be prior or data, got {self.noise_in!r}")


Solver = ConjugateGradients | Sgd


class Solved(NamedTuple):
    """Effective dimensions [k, G] by k solutions, and how exact the solutions are."""

    function: Tensor  # effective dimensions in function space
    weight: Tensor  # in weight space
    pull: Tensor  # by the data's pull
    residuals: Tensor  # [k], relative
    errors: Tensor  # [k], in posterior standard deviations, at most
    steps: int  # of the solver

    @staticmethod
    def all(parts: Sequence[Solved]) -> Solved:
        """Those of several portions of the samples, in their order."""
        function, weight, pull, residuals, errors, steps = zip(*parts, strict=True)
        return Solved(
            torch.cat(function),
            torch.cat(weight),
            torch.cat(pull),
            torch.cat(residuals),
            torch.cat(errors),
            max(steps),
        )


def solver_for(spec: str | Solver) -> Solver:
    """A solver from its name ("cg", "sgd"), or as it is."""
    if isinstance(spec, ConjugateGradients | Sgd):
        return spec
    if spec == "cg":
        return ConjugateGradients()
    if spec == "sgd":
        return Sgd()
    raise MarglikError(f"solver must be 'cg', 'sgd', a ConjugateGradients or an Sgd, got {spec!r}")


def conjugate_gradients(
    product: Product,
    b: Tensor,
    z: Tensor,
    settings: ConjugateGradients,
    precondition: Product | None = None,
    norm: Product | None = None,
) -> int:
    """Move z from where it is to H^-1 b, in place; returns the number of iterations.

    Args:
        product: H v of vectors v [k, P].
        b: right-hand sides [k, P], overwritten.
        z: the start, and then the solutions [k, P].
        settings: tolerance and number of iterations.
        precondition: an approximate inverse of H, of vectors [k, P].
        norm: of residuals, [k, P] -> [k, 1], for the tolerance.
    """
    norm = norm or _norm
    target = settings.tolerance * norm(b)
    residual = b.sub_(product(z))
    preconditioned = residual if precondition is None else precondition(residual)
    direction = preconditioned.clone()
    inner = _dot(residual, preconditioned)
    for iteration in range(settings.max_iterations):
        if (norm(residual) <= target).all():
            return iteration
        image = product(direction)
        length = _ratio(inner, _dot(direction, image)).to(z.dtype)
        z.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        del image
        preconditioned = residual if precondition is None else precondition(residual)
        next_inner = _dot(residual, preconditioned)
        ratio = _ratio(next_inner, inner).to(z.dtype)
        direction.mul_(ratio).add_(preconditioned)
        inner = next_inner
    return settings.max_iterations


def nesterov(
    gradient: Callable[[Tensor, Any], Tensor],
    batches: Callable[[], Iterable[Any]],
    z: Tensor,
    settings: Sgd,
    rate: float,
    bound: Tensor,
) -> int:
    """Move z by minibatch gradients, in place; returns the number of steps.

    Args:
        gradient: an estimate of H z - b [k, P], of z and a batch.
        batches: an iterator over the data, for each pass.
        z: the start, and then the solutions [k, P].
        settings: passes, momentum and so on.
        rate: first step size.
        bound: longest gradient [k, 1].
    """
    steps = settings.passes * sum(1 for _ in batches())
    first_averaged = steps - math.ceil(settings.averaging * steps)
    velocity = torch.zeros_like(z)
    average = torch.zeros_like(z) if settings.averaging else None
    step = 0
    for _ in range(settings.passes):
        for batch in batches():
            g = gradient(z, batch)
            clipping = _ratio(bound, _norm(g)).clamp_max(1.0)
            g.mul_(clipping.to(z.dtype))
            velocity.mul_(settings.momentum).add_(g)
            length = rate * (1 - (1 - settings.decay) * step / steps)
            z.sub_(g, alpha=length)
            z.sub_(velocity, alpha=length * settings.momentum)
            step += 1
            if average is not None and step > first_averaged:
                average.add_(z - average, alpha=1 / (step - first_averaged))
    if average is not None and step > first_averaged:
        z.copy_(average)
    if not z.isfinite().all():
        raise MarglikError(
            f"sampling diverged with step size {rate:.3g}; give Sgd(rate=...) a smaller one"
        )
    return step


def largest_eigenvalue(product: Product, like: Tensor, iterations: int = POWER_ITERATIONS) -> float:
    """Nearly the largest eigenvalue of a PSD matrix, by power iterations from a fixed start.

    Args:
        product: the matrix times vectors [1, P].
        like: tensor [..., P] of the vectors' length, dtype and device.
        iterations: products.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, like.shape[-1], generator=generator, dtype=like.dtype).to(like.device)
    value = 0.0
    for _ in range(iterations):
        v = product(v / v.norm())
        value = v.norm().item()
        if value == 0:
            break
    return value


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products [k, 1] in float64, in pieces: no copies of whole vectors in float64."""
    total = torch.zeros(len(a), 1, dtype=torch.float64, device=a.device)
    for part, other in zip(a.split(PIECE, 1), b.split(PIECE, 1), strict=True):
        total += (part * other).sum(1, keepdim=True, dtype=torch.float64)
    return total


def _norm(a: Tensor) -> Tensor:
    return _dot(a, a).sqrt()


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where both vanish."""
    return torch.where(b == 0, torch.zeros_like(a), a / b)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise MarglikError(f"{name} must be greater than 0, got {value}")
