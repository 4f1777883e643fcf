"""An approximate inverse of H from a few random root rows.

M is a sum over data. Of r of them, each has a random root row v_i = J_i^T U_i xi_i, so that
M ~= (N/r) V^T V, and

    (D + c V^T V)^-1 = D^-1 - D^-1 V^T (I/c + V D^-1 V^T)^-1 V D^-1,   c = N/r        (Woodbury)

with D = (1 + e) A. Here e, the smallest eigenvalue of c V A^-1 V^T, stands for the directions that
V does not span, as in Nystrom preconditioners: without it these would be the steepest.
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
    """Random root rows V [r, P], one for each of the first r data of the loader.

    Args:
        system: whose data they are of.
        rows: r.
        like: tensor of the dtype and device of V.
    """
    if rows > system.n_data:
        raise MarglikError(
            f"a preconditioner of {rows} rows, one per datum, but there are {system.n_data} data "
            "points"
        )
    generator = torch.Generator().manual_seed(system.seed)
    V = torch.zeros(rows, system.layout.size).to(like)
    scale = system.curvature_scale**0.5
    row = 0

    def cotangents(y: Tensor, f: Tensor) -> Tensor:
        xi = torch.randn(1, *f.shape, generator=generator, dtype=f.dtype).to(f.device)
        return scale * system.likelihood.root_product(f, y, xi)

    for x, y, *_ in system.whole_batches():  # rows are few: every rank computes all of them
        for i in range(min(len(y), rows - row)):
            datum = slice(i, i + 1)
            out = V[row : row + 1]
            system.linear.vjp_(taken(x, datum), partial(cotangents, y[datum]), out)
            row += 1
        if row == rows:
            break
    return V


@dataclass
class RowPreconditioner:
    """The inverse of D + (N/r) V^T V, applied to vectors [k, P]."""

    system: System
    rows: Tensor  # V [r, P]

    def __post_init__(self) -> None:
        layout = self.system.layout
        r = len(self.rows)
        K = torch.empty(r, r, dtype=torch.float64, device=self.rows.device)  # V A^-1 V^T
        for i in range(r):  # one row at a time: no second copy of V
            scaled = layout.divided_(self.rows[i : i + 1].clone(), self.system.precision)
            K[i] = (self.rows @ scaled[0]).double()
        values, vectors = torch.linalg.eigh((K + K.mT) / 2)
        c = self.system.n_data / r
        spans_all = r >= layout.size
        rest = 1.0 if spans_all else 1 + c * max(values[0].item(), 0.0)  # 1 + e
        self._diagonal = rest * self.system.precision
        self._inner = (vectors / (1 / c + values.clamp_min(0) / rest)) @ vectors.mT

    def __call__(self, vectors: Tensor) -> Tensor:
        layout = self.system.layout
        scaled = layout.divided_(vectors.clone(), self._diagonal)
        inner = (scaled @ self.rows.mT).double() @ self._inner
        correction = layout.divided_(inner.to(vectors.dtype) @ self.rows, self._diagonal)
        return scaled.sub_(correction)
