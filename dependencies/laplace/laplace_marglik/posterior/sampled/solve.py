"""Conjugate gradients for H z = b for several b, and what solvers share; `rounds` has the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError

Product = Callable[[Tensor], Tensor]
# for the largest eigenvalue: a step of RATE / lambda is stable even if lambda is 2.6 times too low
POWER_ITERATIONS = 20
# weights whose products are added up at once: copies of them in float64 take little memory
PIECE = 2**16


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
        positive(tolerance=self.tolerance, max_iterations=self.max_iterations)


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
    norm = norm or norms
    target = settings.tolerance * norm(b)
    residual = b.sub_(product(z))
    preconditioned = residual if precondition is None else precondition(residual)
    direction = preconditioned.clone()
    inner = _dot(residual, preconditioned)
    for iteration in range(settings.max_iterations):
        if (norm(residual) <= target).all():
            return iteration
        image = product(direction)
        length = ratios(inner, _dot(direction, image)).to(z.dtype)
        z.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        del image
        preconditioned = residual if precondition is None else precondition(residual)
        next_inner = _dot(residual, preconditioned)
        ratio = ratios(next_inner, inner).to(z.dtype)
        direction.mul_(ratio).add_(preconditioned)
        inner = next_inner
    return settings.max_iterations


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


def norms(a: Tensor) -> Tensor:
    """Lengths [k, 1] of vectors [k, P], in float64."""
    return _dot(a, a).sqrt()


def ratios(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where both vanish."""
    return torch.where(b == 0, torch.zeros_like(a), a / b)


def positive(**values: float) -> None:
    """Raise an error that names the first of the values that is not greater than 0."""
    for name, value in values.items():
        if not value > 0:
            raise MarglikError(f"{name} must be greater than 0, got {value}")
