"""A kernel whose rows are on several ranks.

Each rank has the rows of its own data points, V_r [n_r K, P]. For the kernel they are exchanged,
one weight at a time, so that each has its own columns of all rows, W_r [S K, P_r]; back go the
cotangents of columns, as those of own rows:

    K = sum_r W_r W_r^T,     W_r_bar = (K_bar + K_bar^T) W_r

It keeps S K P / R numbers (and as many cotangents), so that a block may grow with the number of
ranks, and sends as many. Factors of rows, which are small, visit the other ranks instead: rank r
makes its strip K_r = [V_r V_1^T, ...].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from asdl_marglik.curvature.kernel.gram import Gram
from asdl_marglik.curvature.kernel.row_storage import Factors, Rows, Store, in_double
from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.curvature.term import Memory
from asdl_marglik.linalg import Conditioning, gram_in_double, gram_of, product_in_double
from asdl_marglik.passes.pullback import PullBack
from asdl_marglik.ranks.ranks import Ranks

STEP = "rows of the kernel"


class ShardedGram(Gram):
    """A kernel whose rows are on several ranks.

    Args:
        stores: how the rows of each weight are kept.
        groups: of the prior.
        ranks: that share the rows.
        n_data: data points of the whole block.
        packed: as in a `Gram`.
        double: as in a `Gram`.
        conditioning: as in a `Gram`.
    """

    label = "kernel (sharded)"

    def __init__(
        self,
        stores: Sequence[Store],
        groups: Groups,
        ranks: Ranks,
        n_data: int,
        *,
        packed: bool = True,
        double: bool = False,
        conditioning: Conditioning | None = None,
    ):
        super().__init__(stores, groups, packed=packed, double=double, conditioning=conditioning)
        self.ranks = ranks
        self.n_data = n_data
        self.own = ranks.spans(n_data)[ranks.rank]
        self._cotangents: list[list[Tensor]] = []

    def memory(self, problem: Problem) -> Memory:
        """Own rows and their cotangents; a weight's rows as they are exchanged; the kernels."""
        kept = [problem.held * store.bytes_per_datum(problem) for store in self.stores]
        algebra = super().memory(problem).working
        return Memory(kept=2 * sum(kept), working=max(3 * max(kept), algebra))

    def _gram(self, store: Store, kept: list[Tensor], inverse: Tensor | None) -> Tensor:
        """This rank's term of a weight's kernel [S K, S K]; the passes add up those of all."""
        if isinstance(store, Rows):
            columns = self._columns(store, kept)
            own_inverse = None if inverse is None else self._of_columns(inverse)
            if self.double:
                return gram_in_double(columns, own_inverse)
            return gram_of(columns) if own_inverse is None else (columns * own_inverse) @ columns.mT
        assert isinstance(store, Factors)
        kept = in_double(kept) if self.double else kept
        strip = torch.cat([store.cross(kept, visitors) for _, visitors in self._visits(kept)], 1)
        whole = strip.new_zeros(strip.shape[1], strip.shape[1])
        whole[_rows_of(self.own, len(strip) // len(kept[0]))] = strip
        return whole

    def _columns(self, store: Rows, kept: list[Tensor]) -> Tensor:
        """Own columns of all rows [S K, P_r]."""
        rows = store.all_rows(kept)
        return self.ranks.columns(rows, self.n_data, len(rows) // len(kept[0]), STEP)

    def _of_columns(self, per_weight: Tensor) -> Tensor:
        return per_weight[self.ranks.spans(len(per_weight))[self.ranks.rank]]

    def _visits(self, kept: list[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """One rank after the other: where its data are in the block, and what is kept of them."""
        visitors = self.ranks.visits(kept, self.n_data, STEP)
        return zip(self.ranks.spans(self.n_data), visitors, strict=True)

    def exchange(
        self, observations: list[list[Tensor]], bars: list[Tensor], log_precision: Tensor
    ) -> None:
        """Make the cotangents that `pull` will hand out, also those only a full graph will need."""
        self._cotangents = []
        for store, kept in zip(self.stores, observations, strict=True):
            inverse = self._inverse_precision(store, log_precision, kept)
            bar = bars[0][self._index(store.name)]
            self._cotangents.append(self._back(store, kept, bar + bar.mT, inverse))

    def _back(
        self, store: Store, kept: list[Tensor], symmetric: Tensor, inverse: Tensor | None
    ) -> list[Tensor]:
        """Cotangents of what is kept of own data, from that of a whole kernel."""
        n_own, k = len(kept[0]), len(symmetric) // self.n_data
        if isinstance(store, Rows):
            v = self._columns(store, kept)
            same = symmetric.dtype == v.dtype
            columns = symmetric @ v if same else product_in_double(symmetric, v)
            if inverse is not None:
                columns *= self._of_columns(inverse)
            size = store.all_rows([t[:1] for t in kept]).shape[1]
            return [self.ranks.rows(columns, n_own * k, size, k, STEP).view(n_own, k, size)]
        total: list[Tensor] = []
        for span, visitors in self._visits(kept):
            piece = symmetric[_rows_of(self.own, k), _rows_of(span, k)].contiguous()
            terms = store.cotangents(kept, visitors, piece, inverse)
            total = [t.add_(term) for t, term in zip(total, terms, strict=True)] if total else terms
        return total

    def pull(
        self,
        back: PullBack,
        observations: list[list[Tensor]],
        bars: list[Tensor],
        span: slice,
        log_precision: Tensor,
    ) -> None:
        for store, cotangents in zip(self.stores, self._cotangents, strict=True):
            store.hand(back, [c[span] for c in cotangents])


def _rows_of(span: slice, k: int) -> slice:
    return slice(k * span.start, k * span.stop)
