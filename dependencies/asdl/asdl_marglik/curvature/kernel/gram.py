"""The neural tangent kernel: the Gram matrix of Jacobian rows, kept apart by prior group so that
the prior can move.

log|I + V P0^-1 V^T|,   V P0^-1 V^T = sum_g exp(-log_precision_g) V_g V_g^T
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from asdl_marglik.curvature.kernel.prior_steps import Combination
from asdl_marglik.curvature.kernel.row_storage import Rows, Store
from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.curvature.term import Memory, Settled, Term
from asdl_marglik.linalg import (
    eigenvalues,
    is_coarse,
    log_det_identity_plus,
    precision_of_sums,
    product_in_double,
    resolved,
    weighted_sum,
)
from asdl_marglik.passes.forward import Chunk, Request


class Gram(Term):
    """Exact curvature of its weights, in the space of rows.

    packed: kernels of a cached block by their lower halves. double: kernels in float64, whatever
    the rows are.
    """

    label = "kernel"
    additive = False

    def __init__(
        self, stores: Sequence[Store], groups: Groups, *, packed: bool = True, double: bool = False
    ):
        self.stores = stores
        self.groups = groups
        self.packed = packed
        self.double = double
        self.names = names = tuple(store.name for store in stores)
        self.kinds = tuple("rows" for store in self.stores for _ in range(store.slots))
        self.shared = sorted({g for name in names if isinstance(g := groups[name], int)})
        self.elementwise = [name for name in names if isinstance(groups[name], slice)]
        self.depends_on_precision = bool(self.elementwise)

    def requests(self) -> list[Request]:
        return [(store.name, store.asks) for store in self.stores]

    def memory(self, problem: Problem) -> Memory:
        """Rows of all data; a weight's row cotangents, or the kernels and their determinant in
        float64.
        """
        kept = [problem.n_data * store.bytes_per_datum(problem) for store in self.stores]
        kernels = len(self.shared) + bool(self.elementwise)
        element = 8 if self.double else problem.element
        head = (2 * element * kernels + 4 * 8) * problem.n_rows**2
        return Memory(sum(kept), max(*kept, head))

    def observe(self, chunk: Chunk, out: list[Tensor] | None = None) -> Iterator[Tensor]:
        places: Iterable = [None] * len(self.stores) if out is None else self._kept(out)
        for store, place in zip(self.stores, places, strict=True):
            yield from store.observe(chunk, place)

    def _kept(self, observations: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Observations by weight, one weight at a time."""
        remaining = iter(observations)
        return ([next(remaining) for _ in range(store.slots)] for store in self.stores)

    def _inverse(self, name: str, log_precision: Tensor, like: Tensor) -> Tensor | None:
        group = self.groups[name]
        return None if isinstance(group, int) else torch.exp(-log_precision[group]).to(like.dtype)

    def _index(self, name: str) -> int:
        """Which Gram matrix a weight belongs to: that of its prior group, or the last one."""
        group = self.groups[name]
        return self.shared.index(group) if isinstance(group, int) else -1

    def summarise(self, observations: Iterable[Tensor], log_precision: Tensor) -> list[Tensor]:
        """One Gram matrix per shared prior group, then one for all weights with a precision per
        element.
        """
        grams: Tensor | None = None
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            gram = store.gram(
                kept, self._inverse(store.name, log_precision, kept[-1]), double=self.double
            )
            if grams is None:
                grams = gram.new_zeros(len(self.shared) + bool(self.elementwise), *gram.shape)
            grams[self._index(store.name)] += gram
        assert grams is not None
        return [grams]

    def precision_gradient(
        self, observations: list[Tensor], bars: list[Tensor], log_precision: Tensor
    ) -> Tensor | None:
        if not self.elementwise:
            return None
        gradient = torch.zeros_like(log_precision)
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            inverse = self._inverse(store.name, log_precision, kept[-1])
            if inverse is not None:
                assert isinstance(store, Rows)
                v = self._columns(store, kept)
                bar = bars[0][-1]
                pulled = bar @ v if bar.dtype == v.dtype else product_in_double(bar, v)
                slope = -(pulled * v).sum(0) * self._of_columns(inverse)
                self._of_columns(gradient[self.groups[store.name]])[:] = slope.to(gradient.dtype)
        return gradient

    def _columns(self, store: Rows, kept: list[Tensor]) -> Tensor:
        """Rows of all data [S K, P]; with several ranks, own columns of them."""
        return store.all_rows(kept)

    def _of_columns(self, per_weight: Tensor) -> Tensor:
        """The part of a vector with an entry per element of a weight that belongs to `_columns`."""
        return per_weight

    def pull(
        self,
        chunk: Chunk,
        observations: list[Tensor],
        bars: list[Tensor],
        rows: slice,
        log_precision: Tensor,
    ) -> None:
        own = slice(rows.start * chunk.k, rows.stop * chunk.k)
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            bar = bars[0][self._index(store.name)]
            symmetric = bar[own] + bar[:, own].mT
            store.pull(
                chunk, kept, rows, symmetric, self._inverse(store.name, log_precision, kept[-1])
            )

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        total = weighted_sum(self._weights(scale, log_precision), statistics[0])
        return log_det_identity_plus(mixed_gram(total, mixing), coarse=is_coarse(statistics[0]))

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        values = eigenvalues(mixed_gram(statistics[0].sum(0).double(), mixing))
        return resolved(values, precision_of_sums(statistics[0].dtype))

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        if not self.packed:
            return super().settled(statistics, mixing)
        grams = (mixed_gram(gram.double(), mixing) for gram in statistics[0])
        kernels = Combination(grams, statistics[0].dtype)
        return lambda scale, log_precision: kernels.log_det_identity_plus(
            self._weights(scale, log_precision)
        )

    def _weights(self, scale: Tensor, log_precision: Tensor) -> Tensor:
        """What each Gram matrix is multiplied with in V P0^-1 V^T."""
        # then taking entries would only cost time
        everything = len(self.shared) == len(log_precision)
        weights = scale * torch.exp(-(log_precision if everything else log_precision[self.shared]))
        return torch.cat([weights, scale.reshape(1)]) if self.elementwise else weights


def mixed_gram(gram: Tensor, mixing: Tensor | None) -> Tensor:
    """Gram matrix of the root rows, from that of the seeded rows."""
    if mixing is None:
        return gram
    n, k, r = mixing.shape
    if k == r == 1:
        return mixing.reshape(n, 1) * gram * mixing.reshape(1, n)
    half = (mixing.mT @ gram.reshape(n, k, n * k)).reshape(n * r, n * k)
    # the other side from the transpose: by symmetry it is the same product again, and both are
    # along rows
    return (mixing.mT @ half.mT.reshape(n, k, n * r)).reshape(n * r, n * r)
