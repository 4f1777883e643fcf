"""A block of weights with all their covariances, in weight space.

Sigma = P0^-1/2 (I + s P0^-1/2 H P0^-1/2)^-1 P0^-1/2 = P0^-1/2 (L L^T)^-1 P0^-1/2
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
    by_weight,
    normal,
    rows_of,
)


@dataclass(frozen=True)
class DenseCovariance(Covariance):
    """Some weights together.

    Args:
        shapes: of the weights by name, in the order of the rows of `factor`.
        root: prior standard deviations P0^-1/2 [P].
        factor: lower Cholesky factor L of I + s P0^-1/2 H P0^-1/2 [P, P].
    """

    shapes: Shapes
    root: Tensor
    factor: Tensor
    form = "dense"

    @staticmethod
    def of_curvature(shapes: Shapes, H: Tensor, root: Tensor) -> DenseCovariance:
        """From curvature.

        Args:
            shapes: of the weights by name.
            H: scaled curvature s H [P, P] in float64.
            root: prior standard deviations [P] in float64.
        """
        identity_plus = root[:, None] * H * root
        identity_plus.diagonal().add_(1)
        return DenseCovariance(shapes, root, torch.linalg.cholesky(identity_plus))

    def numbers_per_output(self, plan: Factored, copies: int) -> int:
        return 4 * len(self.root)

    def features(self, chunk: Rows) -> Features:
        rows = torch.cat([rows_of(chunk, name) for name in self.shapes], 2).double() * self.root
        flat = rows.flatten(0, 1)
        solved = torch.linalg.solve_triangular(self.factor, flat.mT, upper=False)
        yield 1.0, solved.mT.reshape(rows.shape)

    def sample(self, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        noise = normal(k, len(self.root), self.root, generator)
        solved = torch.linalg.solve_triangular(self.factor.mT, noise.mT, upper=True)
        return by_weight(solved.mT * self.root, self.shapes)
