"""A block of weights in the space of rows: the prior's covariance less what the rows explain.

    Sigma = P0^-1 - P0^-1 V^T (I + V P0^-1 V^T)^-1 V P0^-1             (Woodbury)

With all root rows V of the data this is the covariance of `dense`, for fewer rows than weights in
less memory. With some of the rows (an inducing set) the rest of the data is not known to it: its
variances are never below those of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asdl_marglik import Problem, Settled, log_det_identity_plus
from asdl_marglik.curvature.dense import Dense
from asdl_marglik.curvature.term import Memory, mix
from asdl_marglik.linalg import gram_in_double
from laplace_marglik.posterior.covariance import (
    Covariance,
    Factored,
    Features,
    Rows,
    Shapes,
    by_weight,
    normal,
    rows_of,
    sizes_of,
)


class RowSpace(Dense):
    """The exact curvature of some weights, by root rows that are kept."""

    label = "kernel"

    def memory(self, problem: Problem) -> Memory:
        """All rows; their kernel and its factor in float64; a chunk's rows."""
        size = sum(self.sizes.values())
        return Memory(
            kept=problem.element * size * problem.n_rows,
            working=3 * 8 * problem.n_rows**2,
            per_datum=2 * problem.element * problem.rows_per_datum * size,
        )

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        """Kernels of the groups are made once, unless a group has a precision for each element."""
        shared = {group for n in self.names if isinstance(group := self.groups[n], int)}
        if any(not isinstance(self.groups[name], int) for name in self.names):
            return lambda scale, log_precision: log_det_identity_plus(
                self.kernel(statistics, mixing, scale, log_precision)
            )
        rows = mix(statistics[0], mixing).flatten(0, 1)
        grams = {group: self._gram(rows, group) for group in shared}

        def log_det(scale: Tensor, log_precision: Tensor) -> Tensor:
            terms = [torch.exp(-log_precision[g]) * gram for g, gram in grams.items()]
            return log_det_identity_plus(scale * sum(terms[1:], terms[0]))

        return log_det

    def _gram(self, rows: Tensor, group: int) -> Tensor:
        """The kernel of the weights of one group, in float64."""
        member = [self.groups[name] == group for name in self.names]
        sizes = torch.tensor([self.sizes[name] for name in self.names])
        mask = torch.tensor(member).repeat_interleave(sizes).to(rows.device)
        return gram_in_double(rows[:, mask])


@dataclass(frozen=True)
class KernelCovariance(Covariance):
    """Some weights together, by root rows.

    Args:
        shapes: of the weights by name, in the order of the columns of `rows`.
        root: prior standard deviations P0^-1/2 [P].
        rows: scaled root rows s^1/2 V [m, P], in the dtype of the network.
        factor: lower Cholesky factor of I + s V P0^-1 V^T [m, m].
    """

    shapes: Shapes
    root: Tensor
    rows: Tensor
    factor: Tensor
    form = "kernel"

    @staticmethod
    def of_rows(shapes: Shapes, rows: Tensor, root: Tensor) -> KernelCovariance:
        """From root rows.

        Args:
            shapes: of the weights by name.
            rows: scaled root rows [m, P].
            root: prior standard deviations [P] in float64.
        """
        identity_plus = gram_in_double(rows, root.square())
        identity_plus.diagonal().add_(1)
        return KernelCovariance(shapes, root, rows, torch.linalg.cholesky(identity_plus))

    def numbers_per_output(self, plan: Factored, copies: int) -> int:
        largest = max(sizes_of(self.shapes).values())
        return 4 * largest + 4 * len(self.factor)

    def features(self, chunk: Rows) -> Features:
        cross = chunk.f.new_zeros(chunk.n, chunk.k, len(self.factor), dtype=torch.float64)
        start = 0
        for name, size in sizes_of(self.shapes).items():
            columns = slice(start, start + size)
            start += size
            root = self.root[columns]
            scaled = rows_of(chunk, name).double() * root
            cross = cross + scaled @ (self.rows[:, columns].double() * root).mT
            yield 1.0, scaled
        explained = torch.linalg.solve_triangular(self.factor, cross.flatten(0, 1).mT, upper=False)
        yield -1.0, explained.mT.reshape(cross.shape)

    def sample(self, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        """A draw of the prior, corrected by what the rows say about it (Matheron's rule)."""
        prior = normal(k, len(self.root), self.root, generator) * self.root
        noise = normal(k, len(self.factor), self.root, generator)
        rows = self.rows.double()
        seen = prior @ rows.mT + noise  # what the rows would have observed of these weights
        solved = torch.cholesky_solve(seen.mT, self.factor).mT
        return by_weight(prior - (solved @ rows) * self.root.square(), self.shapes)
