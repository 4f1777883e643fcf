"""Which rows of U^T J are wanted: seeds for the backward passes, and the mixing of their
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RootRows(Protocol):
    """Which rows of U^T J are wanted: row r of datum i is  sum_k weights[i, k, r] * seeds[i, k] .
    J_i.
    """

    seeds_follow_outputs: bool  # whether the seeds depend on the outputs (else they are constants)

    def seeds(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        """Cotangents of the outputs [n, K, C] for outputs f [n, C]."""

    def weights(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """Mixing of the seeded rows [n, K, R], or None for the identity."""


@dataclass
class Selection:
    """The rows wanted of a chunk: a rule for rows, with the targets and columns it is applied
    to.
    """

    rule: RootRows
    y: Tensor
    columns: Tensor  # [n, K]

    def seeds(self, f: Tensor) -> Tensor:
        return self.rule.seeds(f, self.y, self.columns)

    def weights(self, f: Tensor) -> Tensor | None:
        return self.rule.weights(f, self.y, self.columns)

    def of(self, i: int) -> Selection:
        return Selection(self.rule, self.y[i : i + 1], self.columns[i : i + 1])
