"""An approximate inverse of H from a few rows of the data.

M is a sum over data; r of them, each with a random root row v_i = J_i^T U_i xi_i, give M ~= (N/r)
V^T V, and

    (D + c V^T V)^-1 = D^-1 - D^-1 V^T (I/c + V D^-1 V^T)^-1 V D^-1,   c = N/r        (Woodbury)

with D = (1 + e) A, where e, the smallest eigenvalue of c V A^-1 V^T, stands for the directions that
the rows do not span, as in Nystrom preconditioners: without it these would be the steepest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from asdl_marglik import taken
from laplace_marglik.errors import MarglikError
from laplace_marglik.posterior.sampled.system import System


def root_rows(system: System, rows: int, like: Tensor) -> Tensor:
    """Random root rows V [r, P], one of each of the first r data of the loader."""
    if rows > system.n_data:
        raise MarglikError(
            f"a preconditioner of {rows} rows, one per datum, but there are {system.n_data} data "
            "points"
        )
    generator = torch.Generator().manual_seed(system.seed)
    found, scale = torch.zeros(rows, system.layout.size).to(like), system.curvature_scale**0.5
    row = 0

    def mixed(y: Tensor, f: Tensor) -> Tensor:
        xi = torch.randn(1, *f.shape, generator=generator, dtype=f.dtype).to(f.device)
        return scale * system.likelihood.root_product(f, y, xi)

    for x, y, *_ in system.whole_batches():  # few: every rank makes all of them
        for i in range(min(len(y), rows - row)):
            one = taken(x, slice(i, i + 1))
            system.linear.vjp_(one, partial(mixed, y[i : i + 1]), found[row : row + 1])
            row += 1
        if row == rows:
            break
    return found


@dataclass
class RowPreconditioner:
    """Multiplies vectors [k, P] with the inverse of D + (N/r) V^T V."""

    system: System
    rows: Tensor  # V [r, P]

    def __post_init__(self) -> None:
        layout, r = self.system.layout, len(self.rows)
        kernel = torch.empty(r, r, dtype=torch.float64, device=self.rows.device)
        for i in range(r):  # one row at a time: no second copy of V
            scaled = layout.divided_(self.rows[i : i + 1].clone(), self.system.precision)
            kernel[i] = (self.rows @ scaled[0]).double()
        values, vectors = torch.linalg.eigh((kernel + kernel.mT) / 2)
        c = self.system.n_data / r
        rest = 1 + c * max(values[0].item(), 0.0) if r < layout.size else 1.0
        self._diagonal = rest * self.system.precision
        self._inner = (vectors / (1 / c + values.clamp_min(0) / rest)) @ vectors.mT

    def __call__(self, vectors: Tensor) -> Tensor:
        layout = self.system.layout
        scaled = layout.divided_(vectors.clone(), self._diagonal)
        inner = (scaled @ self.rows.mT).double() @ self._inner
        correction = layout.divided_(inner.to(vectors.dtype) @ self.rows, self._diagonal)
        return scaled.sub_(correction)
