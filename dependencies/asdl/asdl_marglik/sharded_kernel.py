"""A kernel whose rows are on several ranks: they stay where they are and visit the others, one weight at a time.

Rank r makes its strip of the kernel, and on the way back the cotangents of its own rows:

    K_r = [V_r V_1^T, V_r V_2^T, ...],     V_r_bar = sum_q (K_bar + K_bar^T)_rq V_q

It keeps S K P / R numbers (and as many cotangents), so that a block may grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .chunk import Chunk
from .kernel import Gram
from .part import Groups, Memory
from .ranks import Ranks
from .stores import Rows, Store

if TYPE_CHECKING:
    from .structure import Problem


class ShardedGram(Gram):
    """A kernel whose rows are on several ranks. n_data: in the whole block."""

    label = "kernel (sharded)"

    def __init__(self, stores: Sequence[Store], groups: Groups, ranks: Ranks, n_data: int, *, packed: bool = True):
        super().__init__(stores, groups, packed=packed)
        self.ranks, self.n_data = ranks, n_data
        self._cotangents: list[list[Tensor]] = []

    def memory(self, problem: Problem) -> Memory:
        """Own rows and their cotangents; a weight's rows of another rank; the kernels and their determinant."""
        kept = [problem.held * store.bytes_per_datum(problem) for store in self.stores]
        head = super().memory(problem).working
        return Memory(2 * sum(kept), max(2 * max(kept), head))

    def _visits(self, kept: list[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """The data points of one rank after the other: where they are in the block, and what is kept of them."""
        visitors = self.ranks.visits(kept, self.n_data, "rows of the kernel")
        return zip(self.ranks.spans(self.n_data), visitors, strict=True)

    def summarise(self, observations: Iterable[Tensor], log_precision: Tensor) -> list[Tensor]:
        strips: list[Tensor | None] = [None] * (len(self.shared) + bool(self.elementwise))
        n_own = 0
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            inverse, index = self._inverse(store.name, log_precision, kept[0]), self._index(store.name)
            strip, n_own = torch.cat([store.cross(kept, v, inverse) for _, v in self._visits(kept)], 1), len(kept[0])
            known = strips[index]
            strips[index] = strip if known is None else known.add_(strip)
        stacked = torch.stack([strip for strip in strips if strip is not None], 1)  # [n_r K, groups, N K]
        by_datum = stacked.unflatten(0, (n_own, -1))
        whole = self.ranks.gather(by_datum, self.n_data, "strips of the kernel").flatten(0, 1)
        return [whole.transpose(0, 1).contiguous()]

    def _back(
        self, kept: list[Tensor], store: Store, bar: Tensor, inverse: Tensor | None, outputs: bool
    ) -> list[Tensor]:
        """Cotangents of what is kept of own data, from that of a whole kernel."""
        k = len(bar) // self.n_data
        own = _rows_of(self.ranks.spans(self.n_data)[self.ranks.rank], k)
        symmetric = bar[own] + bar[:, own].mT
        total: list[Tensor] = []
        for span, visitors in self._visits(kept):
            piece = symmetric[:, _rows_of(span, k)].contiguous()
            found = store.cotangents(kept, visitors, piece, inverse, of_outputs=outputs)
            total = [t.add_(f) for t, f in zip(total, found, strict=True)] if total else found
        return total

    def exchange(
        self, observations: list[Tensor], bars: list[Tensor], log_precision: Tensor, *, of_outputs: bool
    ) -> None:
        """Make the cotangents that `pull` will hand out."""
        self._cotangents = []
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            inverse, bar = self._inverse(store.name, log_precision, kept[0]), bars[0][self._index(store.name)]
            self._cotangents.append(self._back(kept, store, bar, inverse, of_outputs))

    def pull(
        self, chunk: Chunk, observations: list[Tensor], bars: list[Tensor], rows: slice, log_precision: Tensor
    ) -> None:
        for store, cotangents in zip(self.stores, self._cotangents, strict=True):
            store.hand(chunk, [c[rows] for c in cotangents])

    def precision_gradient(
        self, observations: list[Tensor], bars: list[Tensor], log_precision: Tensor
    ) -> Tensor | None:
        """That of own rows: a term of the sum over ranks."""
        if not self.elementwise:
            return None
        gradient = torch.zeros_like(log_precision)
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            inverse = self._inverse(store.name, log_precision, kept[0])
            if inverse is not None:
                assert isinstance(store, Rows)
                (rows_bar,) = self._back(kept, store, bars[0][-1], None, True)
                slope = -(rows_bar.flatten(0, 1) * store.all_rows(kept)).sum(0) * inverse / 2
                gradient[self.groups[store.name]] = slope.to(gradient.dtype)
        return gradient


def _rows_of(span: slice, k: int) -> slice:
    return slice(k * span.start, k * span.stop)
