"""Solvers of H z = b for several right-hand sides, from products with H or from minibatch
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError

NoiseIn = Literal["prior", "data"]
Product = Callable[[Tensor], Tensor]
POWER_ITERATIONS = 20
PIECE = 2**16  # weights whose products are added up at once
# times 1 / lambda_max: Nesterov's method with momentum mu is stable below 2 (1 + mu) / (1 + 2 mu) >
# 1.3
RATE = 0.5


@dataclass(frozen=True)
class ConjugateGradients:
    """Passes over all data until every residual |b - H z| / |b| is below the tolerance.

    Where groups have different precisions, squares of residuals are divided by delta_l + tr(M) / P.
    rows: of the preconditioner (0: none); it keeps as many vectors of P numbers.
    """

    tolerance: float = 1e-3
    max_iterations: int = 200
    rows: int = 0

    def __post_init__(self) -> None:
        _positive(tolerance=self.tolerance, max_iterations=self.max_iterations)


@dataclass(frozen=True)
class Sgd:
    """Minibatch gradients with Nesterov momentum and an average over the last steps.

    rate: first step size, None for 0.5 / lambda_max by power iterations on a batch; it falls in
    proportion to the steps taken, to `decay` times that. clip: gradients are not longer than this
    many times the noise, |u| or |A^{1/2} n|, whichever is longer. averaging: share of the steps, at
    the end, that are averaged; 0 takes the last. noise_in: "prior" (the objective L', of small
    variance) or "data" (L). There is no preconditioner here: in a small test it made samples worse.
    """

    passes: int = 20
    momentum: float = 0.9
    rate: float | None = None
    decay: float = 0.03
    clip: float = 10.0
    averaging: float = 0.25
    noise_in: NoiseIn = "prior"

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
    """What is known of samples besides themselves: effective dimensions [k, G], residuals and
    errors [k], steps.
    """

    function: Tensor
    weight: Tensor
    pull: Tensor
    residuals: Tensor
    errors: Tensor
    steps: int

    @staticmethod
    def all(parts: Sequence[Solved]) -> Solved:
        """Those of several groups of samples, in their order."""
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
    """Move z [k, P] to H^-1 b, in place, from where it is; returns the number of iterations.
    Overwrites b.

    norm: of residuals [k, P] -> [k, 1], for the tolerance.
    """
    norm = norm or _norm
    target = settings.tolerance * norm(b)
    residual = b.sub_(product(z))
    preconditioned = residual if precondition is None else precondition(residual)
    direction, inner = preconditioned.clone(), _dot(residual, preconditioned)
    for iteration in range(settings.max_iterations):
        if (norm(residual) <= target).all():
            return iteration
        image = product(direction)
        length = _ratio(inner, _dot(direction, image)).to(z.dtype)
        z.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        del image
        preconditioned = residual if precondition is None else precondition(residual)
        new = _dot(residual, preconditioned)
        direction.mul_(_ratio(new, inner).to(z.dtype)).add_(preconditioned)
        inner = new
    return settings.max_iterations


def nesterov(
    gradient: Callable[[Tensor, Any], Tensor],
    batches: Callable[[], Iterable[Any]],
    z: Tensor,
    settings: Sgd,
    rate: float,
    bound: Tensor,
) -> int:
    """Move z [k, P] by minibatch gradients(z, batch), in place; returns the number of steps.

    bound: longest gradient [k, 1].
    """
    steps = settings.passes * sum(1 for _ in batches())
    first_averaged = steps - math.ceil(settings.averaging * steps)
    velocity, average = torch.zeros_like(z), torch.zeros_like(z) if settings.averaging else None
    step = 0
    for _ in range(settings.passes):
        for batch in batches():
            g = gradient(z, batch)
            g.mul_(_ratio(bound, _norm(g)).clamp_max(1.0).to(z.dtype))
            velocity.mul_(settings.momentum).add_(g)
            length = rate * (1 - (1 - settings.decay) * step / steps)
            z.sub_(g, alpha=length).sub_(velocity, alpha=length * settings.momentum)
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
    """The largest eigenvalue, nearly, of a positive semi-definite matrix by power iterations from a
    fixed start.
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
    """Inner products [k, 1] in float64, in pieces: a product of all weights in float64 is three
    vectors more.
    """
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
