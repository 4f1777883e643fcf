"""Curvature in weight space: sums over data of products of root rows."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.curvature.term import Memory, Settled, Term, inverse_precision, mix
from asdl_marglik.linalg import (
    Conditioning,
    eigenvalues,
    is_coarse,
    log_det_identity_plus,
    precision_of_sums,
    resolved,
)
from asdl_marglik.passes.forward import Chunk, Request
from asdl_marglik.passes.pullback import PullBack
from asdl_marglik.watch.plan import Plan


class _SumOverRows(Term):
    """A statistic that adds a function of the root rows of each chunk.

    Args:
        sizes: numbers in each weight.
        groups: of the prior.
        keep: the rows of all data are kept instead and the function is applied at the end: then a
            second pass need not make them again.
        weighted: of a single number's cotangents it then asks for a weighted sum only.
        double: sums in float64, whatever the rows are; those of kept rows always are.
        conditioning: of the kept rows.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        groups: Groups,
        *,
        keep: bool = False,
        weighted: bool = False,
        double: bool = False,
        conditioning: Conditioning | None = None,
    ):
        self.conditioning = conditioning
        self.names = tuple(sizes)
        self.sizes = sizes
        self.groups = groups
        self.double = double and not keep
        self.keep = keep
        self.weighted = keep and weighted
        self.pieces = (("rows",),) if keep else (("sum",),)

    @abstractmethod
    def reduce(self, rows: Tensor) -> Tensor:
        """The chunk's term, from root rows [n, R, P]."""

    def requests(self) -> list[Request]:
        return [(name, "rows") for name in self.names]

    def pulls(self, plan: Plan) -> list[Request]:
        requests = [] if self.keep else self.requests()  # the sum is quadratic in the rows
        for name, form in super().pulls(plan):
            single = self.weighted and self.sizes[name] == 1
            requests.append((name, "weighted" if single else form))
        return requests

    def memory(self, problem: Problem) -> Memory:
        """The sum and its determinant in float64; rows of a chunk, their cotangents, a product."""
        size = sum(self.sizes.values())
        numbers = self._numbers(size)
        kept = size * problem.n_rows if self.keep else numbers
        return Memory(
            kept=problem.element * kept,
            working=4 * 8 * numbers,
            per_datum=3 * problem.element * problem.rows_per_datum * size,
        )

    @abstractmethod
    def _numbers(self, size: int) -> int:
        """How many numbers the sum has for so many weights."""

    def _rows(self, chunk: Chunk) -> Tensor:
        rows = [chunk.rows(name).reshape(chunk.n, chunk.k, -1) for name in self.names]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 2)

    def observe(
        self, chunk: Chunk, piece: int = 0, out: list[Tensor] | None = None
    ) -> list[Tensor]:
        rows = self._rows(chunk)
        return [rows] if self.keep else [self._reduced(rows, chunk.mixing)]

    def _reduced(self, rows: Tensor, mixing: Tensor | None) -> Tensor:
        """The chunk's term from the rows of its output cotangents."""
        rows = rows.double() if self.double else rows
        return self.reduce(mix(rows, None if mixing is None else mixing.to(rows.dtype)))

    def summed(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        """The sum over all data, in float64."""
        statistic = statistics[0].to(torch.float64)
        return self.reduce(mix(statistic, mixing)) if self.keep else statistic

    def pull(
        self,
        back: PullBack,
        observations: list[list[Tensor]],
        bars: list[Tensor],
        span: slice,
        log_precision: Tensor,
    ) -> None:
        if self.keep:
            self._pull_rows(back, bars[0][span])
            return
        rows = self._rows(back.chunk).requires_grad_()
        mixing = back.chunk.mixing
        leaves = [rows] if mixing is None else [rows, mixing.requires_grad_()]
        with torch.enable_grad():
            leaf_bars = torch.autograd.grad(self._reduced(rows, mixing), leaves, bars[0])
        self._pull_rows(back, leaf_bars[0])
        if mixing is not None:
            back.mixing(leaf_bars[1])

    def _pull_rows(self, back: PullBack, bar: Tensor) -> None:
        by_weight = bar.split(list(self.sizes.values()), dim=2)
        for name, weight_bar in zip(self.names, by_weight, strict=True):
            shape = back.chunk.plan.weights[name].shape
            back.rows(name, weight_bar.reshape(*weight_bar.shape[:2], *shape))

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        return self.settled(statistics, mixing)(scale, log_precision)

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        total = self.summed(statistics, mixing)
        coarse = not self.keep and is_coarse(statistics[0])
        return lambda scale, log_precision: self.log_det(total, scale, log_precision, coarse=coarse)

    @abstractmethod
    def log_det(
        self, total: Tensor, scale: Tensor, log_precision: Tensor, *, coarse: bool
    ) -> Tensor:
        """The log-determinant from the sum over all data.

        Args:
            total: the sum over all data.
            scale: multiplies H.
            log_precision: of the prior's groups.
            coarse: the sum was made in lower precision than float64.
        """


class Dense(_SumOverRows):
    """Exact curvature: H = sum of outer products of root rows; log|I + P0^-1/2 H P0^-1/2|."""

    label = "dense"
    has_rows = True

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

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        if self.conditioning is None:
            return super().settled(statistics, mixing)
        u, m = self.conditioning.n_inducing, self.conditioning.weight
        rows = mix(statistics[0].double(), mixing)
        inducing = self.reduce(rows[:u])
        total = inducing + self.reduce(rows[u:])

        def conditioned(scale: Tensor, log_precision: Tensor) -> Tensor:
            first = self.log_det(inducing, scale, log_precision, coarse=False)
            return m * self.log_det(total, scale, log_precision, coarse=False) + (1 - m) * first

        return conditioned

    def kernel(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        assert self.keep  # of the sum alone there is no kernel
        root = inverse_precision(log_precision, self.groups, self.sizes).sqrt()
        rows = mix(statistics[0].double(), mixing).flatten(0, 1) * root
        return scale * (rows @ rows.mT)

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        dtype = torch.float64 if self.keep else statistics[0].dtype
        return resolved(eigenvalues(self.summed(statistics, mixing)), precision_of_sums(dtype))


class Diagonal(_SumOverRows):
    """Diagonal curvature: h = sum of squared root rows; sum log(1 + h / precision).

    Rows g a^T of a linear map at a single position have squares (g^2)(a^2)^T, and no row is made.

    Args:
        sizes: numbers in each weight.
        groups: of the prior.
        keep: the rows of all data are kept.
        double: sums in float64, whatever the rows are.
        factored: its one weight has such rows.
        transposed: and is stored [inputs, outputs].
    """

    label = "diagonal"

    def __init__(
        self,
        sizes: dict[str, int],
        groups: Groups,
        *,
        keep: bool = False,
        double: bool = False,
        factored: bool = False,
        transposed: bool = False,
    ):
        super().__init__(sizes, groups, keep=keep, double=double)
        self.factored = factored and not keep
        self.transposed = transposed

    def memory(self, problem: Problem) -> Memory:
        memory = super().memory(problem)
        if not self.factored:
            return memory
        longest = max(problem.plan.weights[self.names[0]].shape)
        per_datum = 4 * problem.element * problem.rows_per_datum * longest
        return replace(memory, per_datum=per_datum)

    def observe(
        self, chunk: Chunk, piece: int = 0, out: list[Tensor] | None = None
    ) -> list[Tensor]:
        if not self.factored:
            return super().observe(chunk, piece, out)
        a, g = self._factors(chunk)
        return [self._of_factors(a, g, chunk.mixing)]

    def _factors(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Inputs [n, 1, groups, D] and output cotangents [n, K, 1, groups, O]."""
        (a,) = chunk.input_factors(self.names[0], "all")
        (g,) = chunk.output_factors(self.names[0], "all")
        assert a is not None
        return a, g

    def _of_factors(self, a: Tensor, g: Tensor, mixing: Tensor | None) -> Tensor:
        """The chunk's term."""
        if self.double:
            a, g = a.double(), g.double()
        squares = mix(g, None if mixing is None else mixing.to(g.dtype)).square().sum((1, 2))
        h = torch.einsum("ngo,ngd->god", squares, a.squeeze(1).square())
        return (h.mT if self.transposed else h).flatten()

    def pull(
        self,
        back: PullBack,
        observations: list[list[Tensor]],
        bars: list[Tensor],
        span: slice,
        log_precision: Tensor,
    ) -> None:
        if not self.factored:
            super().pull(back, observations, bars, span, log_precision)
            return
        a, g = (factor.detach().requires_grad_() for factor in self._factors(back.chunk))
        mixing = back.chunk.mixing
        leaves = [a, g] if mixing is None else [a, g, mixing.requires_grad_()]
        with torch.enable_grad():
            leaf_bars = torch.autograd.grad(self._of_factors(a, g, mixing), leaves, bars[0])
        back.factors(self.names[0], "all", [(leaf_bars[0], leaf_bars[1])])
        if mixing is not None:
            back.mixing(leaf_bars[2])

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
        return self.summed(statistics, mixing).clamp_min(0)
