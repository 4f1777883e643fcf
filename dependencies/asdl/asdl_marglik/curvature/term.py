"""A term of the log-determinant: it covers some weights and needs only small statistics.

A chunk of data gives observations, in one or several pieces; over chunks those are put side by side
("rows") or added ("sum"). `summarise` makes the small statistics of all data of them, one piece
after the other, and `log_det_ratio` is a function of the statistics, the prior and the mixing of
root rows alone. `pull` is the way back: the cotangents of the statistics, for one chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.passes.forward import Chunk, Request
from asdl_marglik.passes.pullback import PullBack
from asdl_marglik.watch.plan import Plan

Kind = Literal["rows", "sum"]
Settled = Callable[[Tensor, Tensor], Tensor]  # (scale, log_precision) -> log-determinant


@dataclass(frozen=True)
class Memory:
    """An estimate of bytes.

    Args:
        kept: for all data together, from the first chunk to the last.
        working: for the algebra on the statistics, freed after it.
        per_datum: for each datum of a chunk while the chunk is observed.
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
    """log|I + P0^-1 H| of the weights `names`, for one approximation of H.

    Attributes:
        names: its weights.
        pieces: the observations of each piece, by kind; pieces are observed and summarised one
            after the other, so that only one has to be in memory.
        label: what `describe` calls it.
        additive: whether the statistics are observations of all data, of a single piece: rows side
            by side, or sums over data.
        depends_on_precision: whether `summarise` does.
        has_rows: whether its statistics determine the kernel of the rows, and its determinant can
            be conditioned on some of them.
        sums_cotangents: whether it adds up what single output cotangents give, which saves memory
            if they need no mixing.
    """

    names: tuple[str, ...]
    pieces: tuple[tuple[Kind, ...], ...]
    label: str
    additive = True
    depends_on_precision = False
    has_rows = False
    sums_cotangents = False

    @abstractmethod
    def requests(self) -> list[Request]:
        """What `observe` will ask of the cotangents of uses."""

    def pulls(self, plan: Plan) -> list[Request]:
        """What `pull` will ask of them where they are constants: inputs' cotangents are made so."""
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
    def observe(
        self, chunk: Chunk, piece: int = 0, out: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Observations of one chunk for one piece, without a graph.

        Args:
            chunk: some data points.
            piece: which of `pieces`.
            out: where "rows" will be kept; a part may write there at once and return it, to save
                a copy.
        """

    def summarise(
        self,
        statistics: list[Tensor],
        piece: int,
        observations: list[Tensor],
        log_precision: Tensor,
    ) -> list[Tensor]:
        """Statistics with one more piece of the observations of all data; of none they are [].

        Args:
            statistics: of the pieces so far.
            piece: which of `pieces`.
            observations: of this piece, of all data.
            log_precision: of the prior's groups.
        """
        return observations

    def precision_gradient(
        self, observations: list[list[Tensor]], bars: list[Tensor], log_precision: Tensor
    ) -> Tensor:
        """Gradient in the log precision, where `summarise` depends on it.

        Args:
            observations: of all data, by piece.
            bars: cotangents of the statistics.
            log_precision: of the prior's groups.
        """
        return torch.zeros_like(log_precision)

    @abstractmethod
    def pull(
        self,
        back: PullBack,
        observations: list[list[Tensor]],
        bars: list[Tensor],
        span: slice,
        log_precision: Tensor,
    ) -> None:
        """Hand a chunk the cotangents of its part of the observations.

        Args:
            back: the way back through the chunk.
            observations: of all data, by piece.
            bars: cotangents of the statistics.
            span: the chunk's data points among all.
            log_precision: of the prior's groups.
        """

    def exchange(  # noqa: B027 - only rows that are on several ranks have to be exchanged
        self, observations: list[list[Tensor]], bars: list[Tensor], log_precision: Tensor
    ) -> None:
        """Get what `pull` needs of other ranks.

        Args:
            observations: of this rank's data, by piece.
            bars: cotangents of the statistics.
            log_precision: of the prior's groups.
        """

    @abstractmethod
    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        """The log-determinant in float64.

        Args:
            statistics: of all data.
            mixing: [n, K, R], still to be applied to "rows".
            scale: multiplies H.
            log_precision: of the prior's groups, in float64.
        """

    def kernel(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        """V P0^-1 V^T [n R, n R] in float64, of a term that has rows.

        Args:
            statistics: of all data.
            mixing: [n, K, R], still to be applied to "rows".
            scale: multiplies H.
            log_precision: of the prior's groups, in float64.
        """
        raise TypeError(f"{self.label} curvature has no rows")

    @abstractmethod
    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        """Eigenvalues of H in float64, zeros possibly left out.

        Args:
            statistics: of all data.
            mixing: [n, K, R], still to be applied to "rows".
        """

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        """`log_det_ratio` as a function of the prior; what does not depend on it is done once.

        Args:
            statistics: of all data.
            mixing: [n, K, R], still to be applied to "rows".
        """
        return lambda scale, log_precision: self.log_det_ratio(
            statistics, mixing, scale, log_precision
        )


def mix(rows: Tensor, mixing: Tensor | None) -> Tensor:
    """Root rows [n, R, ...] from the rows [n, K, ...] of the output cotangents.

    Args:
        rows: of the output cotangents [n, K, ...].
        mixing: [n, K, R]; None for the identity.
    """
    return rows if mixing is None else torch.einsum("nkr,nk...->nr...", mixing, rows)


def inverse_precision(log_precision: Tensor, groups: Groups, sizes: Mapping[str, int]) -> Tensor:
    """Diagonal of P0^-1 for the listed weights [sum of sizes].

    Args:
        log_precision: of the prior's groups [G].
        groups: the group of each weight, or its slice of `log_precision`.
        sizes: numbers in each weight, by name.
    """
    parts = []
    for name, size in sizes.items():
        entries = log_precision[groups[name]].reshape(-1)
        parts.append(entries.expand(size))
    return torch.exp(-torch.cat(parts))
