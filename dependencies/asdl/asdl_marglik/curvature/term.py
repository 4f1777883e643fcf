"""What a curvature part is: a term of the log-determinant that covers some weights and needs only
small statistics.

A chunk of data gives `observations`; over chunks these are concatenated ("rows") or added ("sum");
`summarise` makes the small `statistics` of them, and `log_det_ratio` is a function of the
statistics, the prior and the likelihood's mixing alone. `pull` is the way back: the cotangents of
the statistics, for one chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.passes.forward import Chunk, Request
from asdl_marglik.watch.plan import Plan

Settled = Callable[[Tensor, Tensor], Tensor]  # (scale, log_precision) -> log-determinant


@dataclass(frozen=True)
class Memory:
    """Bytes: kept for all data together; working, for a moment, besides; per datum of a chunk while
    it is observed.
    """

    kept: int = 0
    working: int = 0
    per_datum: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.kept + other.kept,
            max(self.working, other.working),
            max(self.per_datum, other.per_datum),
        )


class Term(ABC):
    """log|I + P0^-1 H| of the weights `names`, for one approximation of H."""

    names: tuple[str, ...]
    kinds: tuple[Literal["rows", "sum"], ...]
    label: str  # for people

    additive = True  # whether its statistics are sums over data, or rows side by side
    depends_on_precision = False  # whether `summarise` does

    @abstractmethod
    def requests(self) -> list[Request]:
        """What `observe` will ask of the chunk's output cotangents."""

    def pulls(self, plan: Plan) -> list[Request]:
        """What `pull` will ask of them, where they are constants: the cotangents of inputs are made
        of them.
        """
        moving = [
            name
            for name in self.names
            if any(plan.has_input[index] for index, _ in plan.uses_of[name])
        ]
        return [(name, "all") for name in moving]

    @abstractmethod
    def memory(self, problem: Problem) -> Memory:
        """An estimate of the bytes this part takes in a problem."""

    @abstractmethod
    def observe(self, chunk: Chunk, out: list[Tensor] | None = None) -> Iterable[Tensor]:
        """Observations of one chunk, without a graph, one per entry of `kinds`, possibly made one
        by one.

        out: where "rows" will be kept; a part may write there at once and return it, to save a
        copy.
        """

    def summarise(self, observations: Iterable[Tensor], log_precision: Tensor) -> list[Tensor]:
        """Small statistics of all observations."""
        return list(observations)

    def precision_gradient(
        self, observations: list[Tensor], bars: list[Tensor], log_precision: Tensor
    ) -> Tensor | None:
        """Gradient in the log precision, where `summarise` depends on it."""
        return None

    @abstractmethod
    def pull(
        self,
        chunk: Chunk,
        observations: list[Tensor],
        bars: list[Tensor],
        rows: slice,
        log_precision: Tensor,
    ) -> None:
        """Hand the chunk the cotangents of its part of the observations; `rows` are its data
        points.
        """

    def exchange(  # noqa: B027 - only rows that are on several ranks have to be exchanged
        self, observations: list[Tensor], bars: list[Tensor], log_precision: Tensor
    ) -> None:
        """What `pull` needs of other ranks."""

    @abstractmethod
    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        """The log-determinant in float64: mixing [n, K, R] is still to be applied to "rows", scale
        multiplies H.
        """

    @abstractmethod
    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        """Eigenvalues of H in float64, zeros possibly left out, for weights that share one
        precision.
        """

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        """`log_det_ratio` as a function of the prior, for many evaluations: what does not depend on
        it is done once.
        """
        return lambda scale, log_precision: self.log_det_ratio(
            statistics, mixing, scale, log_precision
        )


def mix(rows: Tensor, mixing: Tensor | None) -> Tensor:
    """Root rows [n, R, ...] from seeded rows [n, K, ...]."""
    return rows if mixing is None else torch.einsum("nkr,nk...->nr...", mixing, rows)


def inverse_precision(log_precision: Tensor, groups: Groups, sizes: Mapping[str, int]) -> Tensor:
    """Diagonal of P0^-1 for the listed weights [sum of sizes]."""
    parts = [
        log_precision[groups[name]].expand(size)
        if isinstance(groups[name], int)
        else log_precision[groups[name]]
        for name, size in sizes.items()
    ]
    return torch.exp(-torch.cat([p.reshape(-1) for p in parts]))
