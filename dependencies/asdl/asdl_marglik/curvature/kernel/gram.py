"""The neural tangent kernel: a Gram matrix of root rows for each group, so that the prior can move.

log|I + V P0^-1 V^T|,   V P0^-1 V^T = sum_g exp(-log_precision_g) V_g V_g^T
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asdl_marglik.curvature.kernel.prior_steps import Combination
from asdl_marglik.curvature.kernel.row_storage import Rows, Store
from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.curvature.term import Kind, Memory, Settled, Term
from asdl_marglik.linalg import (
    Conditioning,
    eigenvalues,
    is_coarse,
    log_det_identity_plus,
    precision_of_sums,
    product_in_double,
    resolved,
    weighted_sum,
)
from asdl_marglik.passes.forward import Chunk, Request
from asdl_marglik.passes.pullback import PullBack


class Gram(Term):
    """Exact curvature of its weights, in the space of rows; a piece is the rows of one weight.

    Args:
        stores: how the rows of each weight are kept.
        groups: of the prior.
        packed: kernels of a cached block by their lower halves.
        double: kernels in float64, whatever the rows are.
        conditioning: of the rows.
    """

    label = "kernel"
    additive = False
    has_rows = True

    def __init__(
        self,
        stores: Sequence[Store],
        groups: Groups,
        *,
        packed: bool = True,
        double: bool = False,
        conditioning: Conditioning | None = None,
    ):
        self.conditioning = conditioning
        self.stores = stores
        self.groups = groups
        self.packed = packed
        self.double = double
        self.names = names = tuple(store.name for store in stores)
        rows: Kind = "rows"
        self.pieces = tuple((rows,) * store.slots for store in stores)
        self.shared = sorted({g for name in names if isinstance(g := groups[name], int)})
        self.elementwise = [name for name in names if isinstance(groups[name], slice)]
        self.depends_on_precision = bool(self.elementwise)

    @property
    def n_kernels(self) -> int:
        """One per prior group that weights share, and one for all with a precision per element."""
        return len(self.shared) + bool(self.elementwise)

    def requests(self) -> list[Request]:
        return [(store.name, store.asks) for store in self.stores]

    def memory(self, problem: Problem) -> Memory:
        """Rows of all data; a weight's row cotangents, or the kernels and a float64 determinant."""
        kept = [problem.n_data * store.bytes_per_datum(problem) for store in self.stores]
        element = 8 if self.double else problem.element
        algebra = (2 * element * self.n_kernels + 4 * 8) * problem.n_rows**2
        return Memory(kept=sum(kept), working=max(*kept, algebra))

    def observe(
        self, chunk: Chunk, piece: int = 0, out: list[Tensor] | None = None
    ) -> list[Tensor]:
        return self.stores[piece].observe(chunk, out)

    def _inverse_precision(
        self, store: Store, log_precision: Tensor, like: list[Tensor]
    ) -> Tensor | None:
        """That of each element of a weight, in the dtype of its rows; None if it shares one."""
        group = self.groups[store.name]
        if isinstance(group, int):
            return None
        return torch.exp(-log_precision[group]).to(like[-1].dtype)

    def _index(self, name: str) -> int:
        """Which Gram matrix a weight belongs to: that of its prior group, or the last one."""
        group = self.groups[name]
        return self.shared.index(group) if isinstance(group, int) else -1

    def summarise(
        self,
        statistics: list[Tensor],
        piece: int,
        observations: list[Tensor],
        log_precision: Tensor,
    ) -> list[Tensor]:
        """Add a weight's Gram matrix to that of its group."""
        store = self.stores[piece]
        inverse = self._inverse_precision(store, log_precision, observations)
        gram = self._gram(store, observations, inverse)
        grams = statistics[0] if statistics else gram.new_zeros(self.n_kernels, *gram.shape)
        grams[self._index(store.name)] += gram
        return [grams]

    def _gram(self, store: Store, kept: list[Tensor], inverse: Tensor | None) -> Tensor:
        """A weight's Gram matrix [S K, S K]; with several ranks, this rank's term of it."""
        return store.gram(kept, inverse, double=self.double)

    def precision_gradient(
        self, observations: list[list[Tensor]], bars: list[Tensor], log_precision: Tensor
    ) -> Tensor:
        gradient = torch.zeros_like(log_precision)
        bar = bars[0][-1]
        for store, kept in zip(self.stores, observations, strict=True):
            inverse = self._inverse_precision(store, log_precision, kept)
            if inverse is None:
                continue
            assert isinstance(store, Rows)
            v = self._columns(store, kept)
            pulled = bar @ v if bar.dtype == v.dtype else product_in_double(bar, v)
            slope = -(pulled * v).sum(0) * self._of_columns(inverse)
            entries = self._of_columns(gradient[self.groups[store.name]])
            entries[:] = slope.to(gradient.dtype)
        return gradient

    def _columns(self, store: Rows, kept: list[Tensor]) -> Tensor:
        """Rows of all data [S K, P]; with several ranks, some columns of them."""
        return store.all_rows(kept)

    def _of_columns(self, per_weight: Tensor) -> Tensor:
        """The entries of a vector with one per element of a weight that belong to `_columns`."""
        return per_weight

    def pull(
        self,
        back: PullBack,
        observations: list[list[Tensor]],
        bars: list[Tensor],
        span: slice,
        log_precision: Tensor,
    ) -> None:
        rows = slice(span.start * back.chunk.k, span.stop * back.chunk.k)
        for store, kept in zip(self.stores, observations, strict=True):
            bar = bars[0][self._index(store.name)]
            symmetric = bar[rows] + bar[:, rows].mT
            inverse = self._inverse_precision(store, log_precision, kept)
            store.pull(back, kept, span, symmetric, inverse)
            back.finished(store.name)

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        kernel = self.kernel(statistics, mixing, scale, log_precision)
        coarse = is_coarse(statistics[0])
        return log_det_identity_plus(kernel, coarse=coarse, conditioning=self.conditioning)

    def kernel(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        total = weighted_sum(self._coefficients(scale, log_precision), statistics[0])
        return mixed_gram(total, mixing)

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        values = eigenvalues(mixed_gram(statistics[0].sum(0).double(), mixing))
        return resolved(values, precision_of_sums(statistics[0].dtype))

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        if not self.packed:
            return super().settled(statistics, mixing)
        grams = statistics[0]
        mixed = grams if mixing is None else (mixed_gram(gram.double(), mixing) for gram in grams)
        kernels = Combination(mixed, len(grams), grams.dtype, self.conditioning)
        return lambda scale, log_precision: kernels.log_det_identity_plus(
            self._coefficients(scale, log_precision)
        )

    def _coefficients(self, scale: Tensor, log_precision: Tensor) -> Tensor:
        """What each Gram matrix is multiplied with in V P0^-1 V^T."""
        # then taking entries would only cost time
        everything = len(self.shared) == len(log_precision)
        shared = log_precision if everything else log_precision[self.shared]
        coefficients = scale * torch.exp(-shared)
        if self.elementwise:
            return torch.cat([coefficients, scale.reshape(1)])
        return coefficients


def mixed_gram(gram: Tensor, mixing: Tensor | None) -> Tensor:
    """Gram matrix of the root rows, from that of the rows before mixing.

    Args:
        gram: [n K, n K], of rows before mixing.
        mixing: [n, K, R]; None leaves the rows as they are.
    """
    if mixing is None:
        return gram
    n, k, r = mixing.shape
    if k == r == 1:
        return mixing.reshape(n, 1) * gram * mixing.reshape(1, n)
    half = (mixing.mT @ gram.reshape(n, k, n * k)).reshape(n * r, n * k)
    # the other side from the transpose: by symmetry it is the same product again, and both are
    # along rows
    return (mixing.mT @ half.mT.reshape(n, k, n * r)).reshape(n * r, n * r)
