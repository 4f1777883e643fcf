"""How the rows of one weight are kept for their Gram matrix.

As they are (N P numbers, N^2 P operations) or, where that is cheaper, as the factors of which they
are sums of outer products: v_ik = sum_t g_ikt a_it^T for datum i and cotangent k, so that

    <v_ik, v_jl> = sum_tt' <a_it, a_jt'> <g_ikt, g_jlt'>

For one cotangent or one position all the products are formed. For more, in the order that costs
least for each pair of data points, T^2 D + K O T^2 + K^2 O T operations instead of the K^2 D O of
rows: inputs with inputs, cotangents of i with that, cotangents of j with that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from asdl_marglik.curvature.problem import Problem
from asdl_marglik.linalg import gram_in_double, gram_of, product_in_double
from asdl_marglik.passes.forward import Chunk, Form, Scratch
from asdl_marglik.passes.pullback import PullBack

BLOCK = 2**20  # entries of an intermediate of shared factors: it stays in the cache


class Store(ABC):
    """How the rows of one weight are kept.

    Args:
        name: of the weight.
    """

    slots: int  # number of observations
    asks: Form | Literal["rows"]  # of the output cotangents

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def bytes_per_datum(self, problem: Problem) -> int:
        """Memory that is kept of each datum."""

    @abstractmethod
    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        """The chunk's observations, each [n, ...].

        Args:
            chunk: some data points.
            out: where the observations may be written to.
        """

    @abstractmethod
    def gram(
        self, kept: list[Tensor], inverse_precision: Tensor | None, *, double: bool = False
    ) -> Tensor:
        """V P^-1 V^T [N K, N K] for a precision per element, V V^T without.

        Args:
            kept: observations of all data.
            inverse_precision: of each element of the weight [P].
            double: in float64, whatever the observations are.
        """

    @abstractmethod
    def cotangents(
        self,
        own: list[Tensor],
        others: list[Tensor],
        bar: Tensor,
        inverse_precision: Tensor | None,
        *,
        scratch: Scratch | None = None,
        of_outputs: bool = True,
    ) -> list[Tensor]:
        """Cotangents of some data's observations, from that of their rows of the Gram matrix.

        Computed in the dtype of `bar`: the null space of a Gram matrix cancels only in the
        precision of its inverse.

        Args:
            own: observations of these data.
            others: observations of the data along the columns of `bar`; the result is a sum over
                them.
            bar: cotangent of the Gram matrix, made symmetric.
            inverse_precision: for a precision per element.
            scratch: where the result may be put.
            of_outputs: whether anything depends on the output cotangents.
        """

    @abstractmethod
    def hand(self, back: PullBack, cotangents: list[Tensor]) -> None:
        """Give a chunk its part of the cotangents.

        Args:
            back: the way back through the chunk.
            cotangents: of the chunk's observations.
        """

    def pull(
        self,
        back: PullBack,
        kept: list[Tensor],
        span: slice,
        bar: Tensor,
        inverse_precision: Tensor | None,
    ) -> None:
        """Hand a chunk the cotangents of its data.

        Args:
            back: the way back through the chunk.
            kept: observations of all data.
            span: the chunk's data among all.
            bar: symmetric cotangent of their rows of the Gram matrix.
            inverse_precision: for a precision per element.
        """
        cotangents = self.cotangents(
            [t[span] for t in kept],
            kept,
            bar,
            inverse_precision,
            scratch=back.chunk.scratch,
            of_outputs=back.chunk.differentiable,
        )
        self.hand(back, cotangents)


class Rows(Store):
    """Rows as they are, [n, K, P].

    Args:
        name: of the weight.
        mirrored: half of their Gram matrix is made as the mirror image of the other.
    """

    slots = 1
    asks = "rows"

    def __init__(self, name: str, *, mirrored: bool = True):
        super().__init__(name)
        self.mirrored = mirrored

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

    def gram(
        self, kept: list[Tensor], inverse_precision: Tensor | None, *, double: bool = False
    ) -> Tensor:
        v = self.all_rows(kept)
        if double:
            return gram_in_double(v, inverse_precision)
        if inverse_precision is None and self.mirrored:
            return gram_of(v)
        return (v if inverse_precision is None else v * inverse_precision) @ v.mT

    def cotangents(
        self,
        own: list[Tensor],
        others: list[Tensor],
        bar: Tensor,
        inverse_precision: Tensor | None,
        *,
        scratch: Scratch | None = None,
        of_outputs: bool = True,
    ) -> list[Tensor]:
        v = self.all_rows(others)
        place = None if scratch is None else scratch.take(v, len(bar), v.shape[1])
        rows_bar = (
            torch.mm(bar, v, out=place)
            if bar.dtype == v.dtype
            else product_in_double(bar, v, place)
        )
        if inverse_precision is not None:
            rows_bar *= inverse_precision
        return [rows_bar.view(len(own[0]), -1, v.shape[1])]

    def hand(self, back: PullBack, cotangents: list[Tensor]) -> None:
        chunk = back.chunk
        shape = chunk.plan.weights[self.name].shape
        back.rows(self.name, cotangents[0].reshape(chunk.n, chunk.k, *shape))


class HalfRows(Rows):
    """Rows in half precision [n, K, P], each with a scale [n, K, 1]; arithmetic is not in half."""

    slots = 2

    def bytes_per_datum(self, problem: Problem) -> int:
        return super().bytes_per_datum(problem) // problem.element * torch.float16.itemsize

    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        rows = chunk.rows(self.name).reshape(chunk.n, chunk.k, -1)
        scale = rows.abs().amax(2, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        return _placed([(rows / scale).half(), scale], out)

    def all_rows(self, kept: list[Tensor]) -> Tensor:
        rows, scale = kept
        return rows.to(scale.dtype).mul_(scale).flatten(0, 1)


class Factors(Store):
    """Inputs a [n, T, D] and cotangents g [n, K, T, O] of a linear map with few positions T."""

    slots = 2
    asks = "all"

    def bytes_per_datum(self, problem: Problem) -> int:
        o, d = problem.plan.factor_sides[self.name]
        positions = problem.copies * problem.plan.positions[self.name]
        return problem.element * positions * (d + problem.rows_per_datum * o)

    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        (patches,) = chunk.input_factors(self.name, "all")
        (positions,) = chunk.output_factors(self.name, "all")
        assert patches is not None
        return [patches.squeeze(2), positions.squeeze(3)]

    def _products(self, own: list[Tensor], others: list[Tensor]) -> tuple[Tensor, Tensor]:
        """<a, a'> [n, 1, T, N, 1, T] and <g, g'> [n, K, T, N, K, T] of some data with others."""
        (a, g), (b, h) = own, others
        inputs = a.flatten(0, 1) @ b.flatten(0, 1).mT
        outputs = g.flatten(0, 2) @ h.flatten(0, 2).mT
        n, k, t = g.shape[:3]
        return inputs.view(n, 1, t, len(b), 1, t), outputs.view(n, k, t, len(b), k, t)

    def gram(
        self, kept: list[Tensor], inverse_precision: Tensor | None, *, double: bool = False
    ) -> Tensor:
        kept = in_double(kept) if double else kept
        return self.cross(kept, kept)

    def cross(self, own: list[Tensor], others: list[Tensor]) -> Tensor:
        """Some rows of the Gram matrix, with the columns of other data.

        Args:
            own: observations of the data along the rows.
            others: observations of the data along the columns.
        """
        inputs, outputs = self._products(own, others)
        n, k, _, m = outputs.shape[:4]
        return (inputs * outputs).sum((2, 5)).reshape(n * k, m * k)

    def cotangents(
        self,
        own: list[Tensor],
        others: list[Tensor],
        bar: Tensor,
        inverse_precision: Tensor | None,
        *,
        scratch: Scratch | None = None,
        of_outputs: bool = True,
    ) -> list[Tensor]:
        own, others = ([t.to(bar.dtype) for t in tensors] for tensors in (own, others))
        a, g = others
        inputs, outputs = self._products(own, others)
        n, k, t = outputs.shape[:3]
        bar = bar.view(n, k, 1, len(a), k, 1)
        a_bar = (bar * outputs).sum((1, 4)).reshape(n * t, -1) @ a.flatten(0, 1)
        g_bar = (bar * inputs).reshape(n * k * t, -1) @ g.flatten(0, 2)
        return [a_bar.view(n, t, -1), g_bar.view(n, k, t, -1)]

    def hand(self, back: PullBack, cotangents: list[Tensor]) -> None:
        a_bar, g_bar = (c.to(back.chunk.f.dtype) for c in cotangents)
        back.factors(self.name, "all", [(a_bar.unsqueeze(2), g_bar.unsqueeze(3))])


class SharedFactors(Factors):
    """Inputs a [n, T, D] and cotangents g [n, T, K, O]: those of a datum share its inputs."""

    def observe(self, chunk: Chunk, out: list[Tensor] | None) -> list[Tensor]:
        a, g = super().observe(chunk, None)
        return _placed([a, g.transpose(1, 2)], out)

    def gram(
        self, kept: list[Tensor], inverse_precision: Tensor | None, *, double: bool = False
    ) -> Tensor:
        a, g = in_double(kept) if double else kept
        n, t, k, o = g.shape
        gram = g.new_empty(n, k, n, k)
        memory = g.new_empty(self._step(g) * t, k * o)
        for i in range(n):
            for own in self._blocks(g, i + 1):  # the other half is its mirror image
                inputs = a[own].flatten(0, 1) @ a[i].mT  # [n' T, T]
                with_i = torch.mm(inputs, g[i].flatten(1), out=memory[: len(inputs)]).view(-1, k, o)
                products = (with_i @ g[own].flatten(0, 1).mT).view(-1, t, k, k).sum(1)
                gram[i, :, own] = products.transpose(0, 1)
                gram[own, :, i] = products.mT
        return gram.view(n * k, n * k)

    def cross(self, own: list[Tensor], others: list[Tensor]) -> Tensor:
        (a, g), (b, h) = own, others
        (n, t, k), m = g.shape[:3], len(h)
        gram = g.new_empty(n, k, m, k)
        for i in range(n):
            for some in self._blocks(h, m):
                inputs = b[some].flatten(0, 1) @ a[i].mT
                with_i = (inputs @ g[i].flatten(1)).view(-1, k, g.shape[3])
                products = with_i @ h[some].flatten(0, 1).mT  # [n' T, K of i, K of j]
                gram[i, :, some] = products.view(-1, t, k, k).sum(1).transpose(0, 1)
        return gram.view(n * k, m * k)

    def cotangents(
        self,
        own: list[Tensor],
        others: list[Tensor],
        bar: Tensor,
        inverse_precision: Tensor | None,
        *,
        scratch: Scratch | None = None,
        of_outputs: bool = True,
    ) -> list[Tensor]:
        own, others = ([t.to(bar.dtype) for t in tensors] for tensors in (own, others))
        a, g = others
        n, t, k = g.shape[:3]
        bar = bar.view(-1, k, n, k)
        a_bar, g_bar = (torch.zeros_like(f) for f in own)
        for i, (a_i, g_i) in enumerate(zip(*own, strict=True)):
            for some in self._blocks(g, n):
                # cotangents of j, weighted for every one of i [n', T, K, O]
                coefficients = bar[i, :, some].transpose(0, 1).unsqueeze(1)
                weighted = (coefficients @ g[some]).flatten(0, 1).flatten(1)
                a_some = a[some].flatten(0, 1)
                a_bar[i].addmm_(g_i.flatten(1) @ weighted.mT, a_some)
                if of_outputs:
                    g_bar[i].view(t, -1).addmm_(a_i @ a_some.mT, weighted)
        return [a_bar, g_bar]

    def hand(self, back: PullBack, cotangents: list[Tensor]) -> None:
        a_bar, g_bar = cotangents
        super().hand(back, [a_bar, g_bar.transpose(1, 2)])

    def _step(self, g: Tensor) -> int:
        """Data points at once."""
        return min(len(g), max(1, BLOCK // g[0].numel()))

    def _blocks(self, g: Tensor, stop: int) -> Iterator[slice]:
        """The first `stop` data points, some at a time."""
        step = self._step(g)
        return (slice(start, min(start + step, stop)) for start in range(0, stop, step))


def _placed(tensors: list[Tensor], out: list[Tensor] | None) -> list[Tensor]:
    """Tensors written to `out`, or each in memory of its own."""
    if out is None:
        return [t.contiguous() for t in tensors]
    return [place.copy_(t) for place, t in zip(out, tensors, strict=True)]


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors in float64."""
    return [t.double() for t in tensors]
