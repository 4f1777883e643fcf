"""Curvature in weight space: sums over data of products of root rows."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.curvature.term import Memory, Settled, Term, inverse_precision, mix
from asdl_marglik.linalg import (
    eigenvalues,
    is_coarse,
    log_det_identity_plus,
    precision_of_sums,
    resolved,
)
from asdl_marglik.passes.forward import Chunk, Request
from asdl_marglik.watch.plan import Plan


class _SumOverRows(Term):
    """A statistic that adds a function of the root rows of each chunk.

    keep: the seeded rows of all data are kept instead and the function is applied at the end: then
    a second pass need not make them again. weighted: of a single number's cotangents it then asks
    for a weighted sum over seeds only. double: sums in float64, whatever the rows are; of kept rows
    they always are.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        groups: Groups,
        *,
        keep: bool = False,
        weighted: bool = False,
        double: bool = False,
    ):
        self.names = tuple(sizes)
        self.sizes = sizes
        self.groups = groups
        self.double = double and not keep
        self.keep = keep
        self.weighted = keep and weighted
        self.kinds = ("rows",) if keep else ("sum",)

    @abstractmethod
    def reduce(self, rows: Tensor) -> Tensor:
        """The chunk's term, from root rows [n, R, P]."""

    def requests(self) -> list[Request]:
        return [(name, "rows") for name in self.names]

    def pulls(self, plan: Plan) -> list[Request]:
        rows = [] if self.keep else self.requests()  # the sum is quadratic in the rows
        single = {name for name, size in self.sizes.items() if size == 1 and self.weighted}
        return [
            *rows,
            *((name, "weighted" if name in single else form) for name, form in super().pulls(plan)),
        ]

    def memory(self, problem: Problem) -> Memory:
        """The sum, with what its determinant takes in float64; rows of a chunk, their cotangents,
        and a product.
        """
        size = sum(self.sizes.values())
        side = self._numbers(size)
        kept = size * problem.n_rows if self.keep else side
        return Memory(
            problem.element * kept,
            4 * 8 * side,
            3 * problem.element * problem.rows_per_datum * size,
        )

    @abstractmethod
    def _numbers(self, size: int) -> int:
        """How many numbers the sum has for so many weights."""

    def _rows(self, chunk: Chunk) -> Tensor:
        rows = [chunk.rows(name).reshape(chunk.n, chunk.k, -1) for name in self.names]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 2)

    def observe(self, chunk: Chunk, out: list[Tensor] | None = None) -> list[Tensor]:
        rows = self._rows(chunk)
        return [rows] if self.keep else [self._reduced(rows, chunk.weights())]

    def _reduced(self, rows: Tensor, mixing: Tensor | None) -> Tensor:
        """The chunk's term from seeded rows."""
        rows = rows.double() if self.double else rows
        return self.reduce(mix(rows, None if mixing is None else mixing.to(rows.dtype)))

    def _sum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        """The sum over all data, in float64."""
        given = statistics[0].to(torch.float64)
        return self.reduce(mix(given, mixing)) if self.keep else given

    def pull(
        self,
        chunk: Chunk,
        observations: list[Tensor],
        bars: list[Tensor],
        rows: slice,
        log_precision: Tensor,
    ) -> None:
        if self.keep:
            self._pull_rows(chunk, bars[0][rows])
            return
        v, mixing = self._rows(chunk).requires_grad_(), chunk.weights()
        leaves = [v] if mixing is None else [v, mixing.requires_grad_()]
        with torch.enable_grad():
            found = torch.autograd.grad(self._reduced(v, mixing), leaves, bars[0])
        self._pull_rows(chunk, found[0])
        if mixing is not None:
            chunk.pull_mixing(found[1])

    def _pull_rows(self, chunk: Chunk, bar: Tensor) -> None:
        for name, own in zip(self.names, bar.split(list(self.sizes.values()), dim=2), strict=True):
            chunk.pull_rows(name, own.reshape(chunk.n, chunk.k, *chunk.plan.weights[name].shape))

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        return self.settled(statistics, mixing)(scale, log_precision)

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        total, coarse = self._sum(statistics, mixing), not self.keep and is_coarse(statistics[0])
        return lambda scale, log_precision: self.log_det(total, scale, log_precision, coarse=coarse)

    @abstractmethod
    def log_det(
        self, total: Tensor, scale: Tensor, log_precision: Tensor, *, coarse: bool
    ) -> Tensor:
        """The log-determinant from the sum over all data; coarse: it was made in lower
        precision.
        """


class Dense(_SumOverRows):
    """Exact curvature of its weights: H = sum of outer products of root rows; log|I + P0^-1/2 H
    P0^-1/2|.
    """

    label = "dense"

    def _numbers(self, size: int) -> int:
        return size**2

    def reduce(self, rows: Tensor) -> Tensor:
        rows = rows.flatten(0, 1)
        return rows.mT @ rows

    def log_det(
        self, total: Tensor, scale: Tensor, log_precision: Tensor, *, coarse: bool
    ) -> Tensor:
        root = inverse_precision(log_precision, self.groups, self.sizes).sqrt()
        return log_det_identity_plus(scale * root[:, None] * total * root, coarse=coarse)

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        dtype = torch.float64 if self.keep else statistics[0].dtype
        return resolved(eigenvalues(self._sum(statistics, mixing)), precision_of_sums(dtype))


class Diagonal(_SumOverRows):
    """Diagonal curvature: h = sum of squared root rows; sum log(1 + h / precision)."""

    label = "diagonal"

    def _numbers(self, size: int) -> int:
        return size

    def reduce(self, rows: Tensor) -> Tensor:
        return rows.square().sum((0, 1))

    def log_det(
        self, total: Tensor, scale: Tensor, log_precision: Tensor, *, coarse: bool
    ) -> Tensor:
        inverse = inverse_precision(log_precision, self.groups, self.sizes)
        return torch.log1p(scale * total * inverse).sum()

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        return self._sum(statistics, mixing).clamp_min(0)
