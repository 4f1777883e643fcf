"""Independent weights: Sigma = diag(1 / (delta + h)).

Of a linear map with a single position, J = g a^T, the variances come from the factors:
J Sigma J^T = sum_o g_o g_o^T (sum_d a_d^2 Sigma_od).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_marglik.posterior.covariance import (
    Covariance,
    Factored,
    Features,
    Rows,
    Shapes,
    normal,
    rows_of,
)


@dataclass(frozen=True)
class Elementwise(Covariance):
    """A variance for every element of one weight.

    Args:
        shapes: of the weight, by its name.
        variance: of each element, in float64, shaped as the weight.
    """

    shapes: Shapes
    variance: Tensor
    form = "elementwise"

    @property
    def name(self) -> str:
        return next(iter(self.shapes))

    def numbers_per_output(self, plan: Factored, copies: int) -> int:
        size = self.variance.numel()
        return len(self.variance) if has_single_position(plan, copies, self.name) else 3 * size

    def features(self, chunk: Rows) -> Features:
        rows = rows_of(chunk, self.name)
        yield 1.0, rows * self.variance.flatten().sqrt().to(rows.dtype)

    def of_outputs(self, chunk: Rows) -> Tensor:
        factors = single_position(chunk, self.name)
        if factors is None:
            return super().of_outputs(chunk)
        a, g = factors
        groups = a.shape[1]
        table = self.variance.to(a.dtype)
        table = table.mT if chunk.plan.rules[self.name] == "matmul" else table
        return of_factors(a, g, table.reshape(groups, g.shape[3], a.shape[2]))

    def sample(self, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        noise = normal(k, self.variance.numel(), self.variance, generator)
        deviations = noise * self.variance.flatten().sqrt()
        return {self.name: deviations.reshape(k, *self.variance.shape)}


def has_single_position(plan: Factored, copies: int, name: str) -> bool:
    """Whether rows of a weight are g a^T, for one use at one position.

    Args:
        plan: how the weights enter.
        copies: augmented copies of each input.
        name: of the weight.
    """
    if name not in plan.kronecker or copies * plan.positions[name] != 1:
        return False
    return len(plan.uses_of[name]) == 1 and plan.uses_of[name][0][1] != "bias"


def single_position(chunk: Rows, name: str) -> tuple[Tensor, Tensor] | None:
    """Factors a [n, groups, D] and g [n, C, groups, O] of rows g a^T; None if there are several.

    Args:
        chunk: some data points.
        name: of the weight.
    """
    if not has_single_position(chunk.plan, chunk.copies, name):
        return None
    (a,), (g,) = chunk.input_factors(name, "all"), chunk.output_factors(name, "all")
    if a is None or a.shape[1] != 1:
        return None
    return a.squeeze(1), g.squeeze(2)


def of_factors(a: Tensor, g: Tensor, variance: Tensor) -> Tensor:
    """sum_od g_co g_eo a_d^2 variance_od [n, C, C] in float64.

    Args:
        a: inputs [n, groups, D].
        g: cotangents [n, C, groups, O].
        variance: [groups, O, D].
    """
    by_output = torch.einsum("ngd,god->ngo", a.square(), variance)
    features = (g * by_output.clamp_min(0).sqrt().unsqueeze(1)).flatten(2)
    return (features @ features.mT).double()
