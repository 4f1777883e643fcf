"""Which rows of V = U^T J are wanted: cotangents of the outputs, and how their rows are mixed.

row r of datum i  =  sum_k mixing[i, k, r] * cotangents[i, k] . J_i
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RootRows(Protocol):
    """Which rows of U^T J are wanted of data points with outputs f, targets y and some columns."""

    cotangents_follow_outputs: bool  # whether they depend on the outputs (else they are constants)

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        """Cotangents of the outputs [n, K, C].

        Args:
            f: outputs [n, C].
            y: targets.
            columns: root columns of each datum [n, K].
        """

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """Coefficients [n, K, R] of the rows of these cotangents, or None for the identity.

        Args:
            f: outputs [n, C].
            y: targets.
            columns: root columns of each datum [n, K].
        """


@dataclass
class Selection:
    """The root rows wanted of a chunk.

    Args:
        root_rows: which rows.
        y: targets of the data points.
        columns: root columns of each [n, K].
    """

    root_rows: RootRows
    y: Tensor
    columns: Tensor

    def cotangents(self, f: Tensor) -> Tensor:
        return self.root_rows.cotangents(f, self.y, self.columns)

    def mixing(self, f: Tensor) -> Tensor | None:
        return self.root_rows.mixing(f, self.y, self.columns)

    def of(self, i: int) -> Selection:
        """The rows of one datum."""
        return Selection(self.root_rows, self.y[i : i + 1], self.columns[i : i + 1])
