"""Curvature in weight space: sums over data of products of root rows."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .chunk import Chunk, Request
from .linalg import eigenvalues, log_det_identity_plus
from .part import Groups, Memory, Part, inverse_precision, mix

if TYPE_CHECKING:
    from .plan import Plan
    from .structure import Problem


class _SumOverRows(Part):
    """A statistic that adds a function of the root rows of each chunk."""

    kinds = ("sum",)

    def __init__(self, sizes: dict[str, int], groups: Groups):
        self.names, self.sizes, self.groups = tuple(sizes), sizes, groups

    @abstractmethod
    def reduce(self, rows: Tensor) -> Tensor:
        """The chunk's term, from root rows [n, R, P]."""

    def requests(self) -> list[Request]:
        return [(name, "rows") for name in self.names]

    def pulls(self, plan: Plan) -> list[Request]:
        return [*self.requests(), *super().pulls(plan)]  # the sum is quadratic in the rows

    def memory(self, problem: Problem) -> Memory:
        """The sum, with what its determinant takes in float64; rows of a chunk, their cotangents, and a product."""
        size = sum(self.sizes.values())
        side = self._numbers(size)
        return Memory(problem.element * side, 4 * 8 * side, 3 * problem.element * problem.rows_per_datum * size)

    @abstractmethod
    def _numbers(self, size: int) -> int:
        """How many numbers the sum has for so many weights."""

    def _rows(self, chunk: Chunk) -> Tensor:
        rows = [chunk.rows(name).reshape(chunk.n, chunk.k, -1) for name in self.names]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 2)

    def observe(self, chunk: Chunk, out: list[Tensor] | None = None) -> list[Tensor]:
        return [self.reduce(mix(self._rows(chunk), chunk.weights()))]

    def pull(
        self, chunk: Chunk, observations: list[Tensor], bars: list[Tensor], rows: slice, log_precision: Tensor
    ) -> None:
        v, mixing = self._rows(chunk).requires_grad_(), chunk.weights()
        leaves = [v] if mixing is None else [v, mixing.requires_grad_()]
        with torch.enable_grad():
            found = torch.autograd.grad(self.reduce(mix(v, mixing)), leaves, bars[0])
        for name, bar in zip(self.names, found[0].split(list(self.sizes.values()), dim=2), strict=True):
            chunk.pull_rows(name, bar.reshape(chunk.n, chunk.k, *chunk.plan.weights[name].shape))
        if mixing is not None:
            chunk.pull_mixing(found[1])


class Dense(_SumOverRows):
    """Exact curvature of its weights: H = sum of outer products of root rows; log|I + P0^-1/2 H P0^-1/2|."""

    label = "dense"

    def _numbers(self, size: int) -> int:
        return size**2

    def reduce(self, rows: Tensor) -> Tensor:
        rows = rows.flatten(0, 1)
        return rows.mT @ rows

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        root = inverse_precision(log_precision, self.groups, self.sizes).sqrt()
        return log_det_identity_plus(scale * root[:, None] * statistics[0].to(torch.float64) * root)

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        return eigenvalues(statistics[0])


class Diagonal(_SumOverRows):
    """Diagonal curvature: h = sum of squared root rows; sum log(1 + h / precision)."""

    label = "diagonal"

    def _numbers(self, size: int) -> int:
        return size

    def reduce(self, rows: Tensor) -> Tensor:
        return rows.square().sum((0, 1))

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        inverse = inverse_precision(log_precision, self.groups, self.sizes)
        return torch.log1p(scale * statistics[0].to(torch.float64) * inverse).sum()

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        return statistics[0].double().clamp_min(0)
