"""What a structure may look at when it chooses its terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from asdl_marglik.curvature.blocks import Granularity
from asdl_marglik.linalg import Conditioning
from asdl_marglik.passes.shortcuts import ALL, FastPaths
from asdl_marglik.ranks.ranks import Ranks
from asdl_marglik.watch.plan import Plan

Setting = Literal["expand", "reduce"]  # of weight sharing in KFAC
# entry of the log precision vector that a weight shares, or its own entries (one per element)
Group = int | slice
Groups = Mapping[str, Group]


@dataclass(frozen=True)
class Problem:
    """What a structure may look at when it chooses its terms.

    Args:
        plan: where the rows of each weight come from.
        groups: of the prior.
        n_data: data points of the block.
        rows_per_datum: rows of each, before mixing.
        copies: augmented copies of each.
        setting: of weight sharing in KFAC.
        granularity: of the blocks of a block-diagonal structure.
        half_rows: keep rows in half precision.
        fast: the shortcuts that may be taken.
        ranks: that share the data points.
        double: make sums over data and kernels in float64, whatever the network is.
        conditioning: of the rows, one for each datum.
        cotangents_move: output cotangents depend on what is differentiated, also where the network
            is piecewise linear in its inputs.
        mixed: output cotangents are those of root rows, and rows need no mixing.
    """

    plan: Plan
    groups: Groups
    n_data: int
    rows_per_datum: int
    copies: int = 1
    setting: Setting = "expand"
    granularity: Granularity = "module"
    half_rows: bool = False
    fast: FastPaths = ALL
    ranks: Ranks | None = None
    double: bool = False
    conditioning: Conditioning | None = None
    cotangents_move: bool = True
    mixed: bool = False

    @property
    def held(self) -> int:
        """Data points on this rank."""
        return self.n_data if self.ranks is None else -(-self.n_data // self.ranks.size)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: weight.numel() for name, weight in self.plan.weights.items()}

    @property
    def n_rows(self) -> int:
        return self.n_data * self.rows_per_datum

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return max((weight.element_size() for weight in self.plan.weights.values()), default=8)
