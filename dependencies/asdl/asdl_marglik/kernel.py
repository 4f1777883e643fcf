"""The neural tangent kernel: the Gram matrix of Jacobian rows, kept apart by prior group so that the prior can move.

    log|I + V P0^-1 V^T|,   V P0^-1 V^T = sum_g exp(-log_precision_g) V_g V_g^T

A weight's rows are held as they are (N P numbers, N^2 P operations) or, where that is cheaper, as the factors of which
they are sums of outer products: v_i = sum_t g_it a_it^T, <v_i, v_j> = sum_tt' <a_it, a_jt'> <g_it, g_jt'>.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .chunk import Chunk, Form, Request
from .combination import Combination
from .linalg import eigenvalues, log_det_identity_plus, weighted_sum
from .part import Groups, Memory, Part, Settled

if TYPE_CHECKING:
    from .structure import Problem


class _Store(ABC):
    """How the rows of one weight are kept."""

    slots: int  # number of observations
    asks: Form | Literal["rows"]  # of the output cotangents

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def bytes_per_datum(self, problem: Problem) -> int:
        """Memory that is kept of each datum."""

    @abstractmethod
    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        """The chunk's observations, each [n, ...], possibly written to `out`."""

    @abstractmethod
    def gram(self, kept: list[Tensor], inverse_precision: Tensor | None) -> Tensor:
        """V P^-1 V^T [N, N] for a precision per element, V V^T without."""

    @abstractmethod
    def pull(self, chunk: Chunk, kept: list[Tensor], own: slice, bar: Tensor, inverse_precision: Tensor | None) -> None:
        """Hand the chunk of data `own` its cotangents, from the symmetric cotangent of its rows of the Gram matrix."""


class _Rows(_Store):
    """Rows as they are, [n, K, P]."""

    slots = 1
    asks = "rows"

    def bytes_per_datum(self, problem: Problem) -> int:
        return problem.element * problem.rows_per_datum * problem.sizes[self.name]

    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        if out is None:
            return [chunk.rows(self.name).reshape(chunk.n, chunk.k, -1)]
        chunk.rows(self.name, out[0].view(chunk.n, chunk.k, *chunk.plan.weights[self.name].shape))
        return out

    def all_rows(self, kept: list[Tensor]) -> Tensor:
        """Rows of all data [N, P]."""
        return kept[0].flatten(0, 1)

    def gram(self, kept: list[Tensor], inverse_precision: Tensor | None) -> Tensor:
        v = self.all_rows(kept)
        return (v if inverse_precision is None else v * inverse_precision) @ v.mT

    def pull(self, chunk: Chunk, kept: list[Tensor], own: slice, bar: Tensor, inverse_precision: Tensor | None) -> None:
        v = self.all_rows(kept)
        rows_bar = torch.mm(bar, v, out=chunk.scratch.take(v, len(bar), v.shape[1]))
        if inverse_precision is not None:
            rows_bar *= inverse_precision
        chunk.pull_rows(self.name, rows_bar.reshape(chunk.n, chunk.k, *chunk.plan.weights[self.name].shape))


class _HalfRows(_Rows):
    """Rows in half precision [n, K, P], each with its own scale [n, K, 1]; arithmetic stays in the model's dtype."""

    slots = 2

    def bytes_per_datum(self, problem: Problem) -> int:
        return super().bytes_per_datum(problem) // problem.element * torch.float16.itemsize

    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        rows = chunk.rows(self.name).reshape(chunk.n, chunk.k, -1)
        scale = rows.abs().amax(2, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        found = [(rows / scale).half(), scale]
        return found if out is None else [place.copy_(t) for place, t in zip(out, found, strict=True)]

    def all_rows(self, kept: list[Tensor]) -> Tensor:
        rows, scale = kept
        return rows.to(scale.dtype).mul_(scale).flatten(0, 1)


class _Factors(_Store):
    """Inputs a [n, T, D] and output cotangents g [n, K, T, O] of a linear map with few shared positions T."""

    slots = 2
    asks = "all"

    def bytes_per_datum(self, problem: Problem) -> int:
        o, d = problem.plan.factor_sides[self.name]
        return problem.element * problem.copies * problem.plan.positions[self.name] * (d + problem.rows_per_datum * o)

    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        (patches,), (positions,) = chunk.input_factors(self.name, "all"), chunk.output_factors(self.name, "all")
        assert patches is not None
        return [patches.squeeze(2), positions.squeeze(3)]

    def _products(self, kept: list[Tensor], own: slice) -> tuple[Tensor, Tensor]:
        """<a, a'> [n, 1, T, N, 1, T] and <g, g'> [n, K, T, N, K, T] of some data points with all."""
        a, g = kept
        inputs = a[own].flatten(0, 1) @ a.flatten(0, 1).mT
        outputs = g[own].flatten(0, 2) @ g.flatten(0, 2).mT
        n, t, (k,) = len(a[own]), a.shape[1], g.shape[1:2]
        return inputs.view(n, 1, t, len(a), 1, t), outputs.view(n, k, t, len(a), k, t)

    def gram(self, kept: list[Tensor], inverse_precision: Tensor | None) -> Tensor:
        inputs, outputs = self._products(kept, slice(None))
        n, k = outputs.shape[:2]
        return (inputs * outputs).sum((2, 5)).reshape(n * k, n * k)

    def pull(self, chunk: Chunk, kept: list[Tensor], own: slice, bar: Tensor, inverse_precision: Tensor | None) -> None:
        a, g = kept
        inputs, outputs = self._products(kept, own)
        n, k, t = outputs.shape[:3]
        bar = bar.view(n, k, 1, len(a), k, 1)
        a_bar = (bar * outputs).sum((1, 4)).reshape(n * t, -1) @ a.flatten(0, 1)
        g_bar = (bar * inputs).reshape(n * k * t, -1) @ g.flatten(0, 2)
        chunk.pull_factors(self.name, "all", [(a_bar.view(n, t, 1, -1), g_bar.view(n, k, t, 1, -1))])


class Gram(Part):
    """Exact curvature of its weights, in the space of rows; `factored` names those kept as factors."""

    label = "kernel"

    def __init__(
        self, names: tuple[str, ...], groups: Groups, factored: Collection[str] = (), *, half: bool = False,
        packed: bool = True,
    ):  # fmt: skip
        self.names, self.groups, self.packed = names, groups, packed
        rows = _HalfRows if half else _Rows
        self.stores: list[_Store] = [
            _Factors(name) if name in factored and isinstance(groups[name], int) else rows(name) for name in names
        ]
        self.kinds = tuple("rows" for store in self.stores for _ in range(store.slots))
        self.shared = sorted({g for name in names if isinstance(g := groups[name], int)})
        self.elementwise = [name for name in names if isinstance(groups[name], slice)]

    def requests(self) -> list[Request]:
        return [(store.name, store.asks) for store in self.stores]

    def memory(self, problem: Problem) -> Memory:
        """Rows of all data; a weight's row cotangents, or the kernels and their determinant in float64."""
        kept = [problem.n_data * store.bytes_per_datum(problem) for store in self.stores]
        kernels = len(self.shared) + bool(self.elementwise)
        head = (2 * problem.element * kernels + 4 * 8) * problem.n_rows**2
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
        """One Gram matrix per shared prior group, then one for all weights with a precision per element."""
        grams: list[Tensor | None] = [None] * (len(self.shared) + bool(self.elementwise))
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            index = self._index(store.name)
            gram, known = store.gram(kept, self._inverse(store.name, log_precision, kept[0])), grams[index]
            grams[index] = gram if known is None else known.add_(gram)
        return [torch.stack([gram for gram in grams if gram is not None])]

    def precision_gradient(
        self, observations: list[Tensor], bars: list[Tensor], log_precision: Tensor
    ) -> Tensor | None:
        if not self.elementwise:
            return None
        gradient = torch.zeros_like(log_precision)
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            inverse = self._inverse(store.name, log_precision, kept[0])
            if inverse is not None:
                assert isinstance(store, _Rows)
                v = store.all_rows(kept)
                slope = -((bars[0][-1] @ v) * v).sum(0) * inverse
                gradient[self.groups[store.name]] = slope.to(gradient.dtype)
        return gradient

    def pull(
        self, chunk: Chunk, observations: list[Tensor], bars: list[Tensor], rows: slice, log_precision: Tensor
    ) -> None:
        own = slice(rows.start * chunk.k, rows.stop * chunk.k)
        for store, kept in zip(self.stores, self._kept(observations), strict=True):
            bar = bars[0][self._index(store.name)]
            symmetric = bar[own] + bar[:, own].mT
            store.pull(chunk, kept, rows, symmetric, self._inverse(store.name, log_precision, kept[0]))

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        total = weighted_sum(self._weights(scale, log_precision), statistics[0])
        return log_det_identity_plus(mixed_gram(total, mixing))

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        return eigenvalues(mixed_gram(statistics[0].sum(0).double(), mixing))

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        if not self.packed:
            return super().settled(statistics, mixing)
        grams = (mixed_gram(gram.double(), mixing) for gram in statistics[0])
        kernels = Combination(grams, torch.finfo(statistics[0].dtype).eps)
        return lambda scale, log_precision: kernels.log_det_identity_plus(self._weights(scale, log_precision))

    def _weights(self, scale: Tensor, log_precision: Tensor) -> Tensor:
        """What each Gram matrix is multiplied with in V P0^-1 V^T."""
        everything = len(self.shared) == len(log_precision)  # then taking entries would only cost time
        weights = scale * torch.exp(-(log_precision if everything else log_precision[self.shared]))
        return torch.cat([weights, scale.reshape(1)]) if self.elementwise else weights


def mixed_gram(gram: Tensor, mixing: Tensor | None) -> Tensor:
    """Gram matrix of the root rows, from that of the seeded rows."""
    if mixing is None:
        return gram
    n, k, r = mixing.shape
    if k == r == 1:
        return mixing.reshape(n, 1) * gram * mixing.reshape(1, n)
    gram = torch.einsum("ikr,ikjl->irjl", mixing, gram.reshape(n, k, n, k))
    return torch.einsum("irjl,jls->irjs", gram, mixing).reshape(n * r, n * r)
