"""The kernel of a conditioned block's rows, of which inducing rows and intervals are made.

With A = I + V P0^-1 V^T over the rows (U, B), inducing rows first, its Cholesky factor L and
S_B = A / A_U, two sides hold in expectation over B (Fischer; |I + E| >= 1 + tr E):

    log|A_all|  >=  log|A_U| + log(1 + m tr(S_B - I))        log|A_all|  >=  log|A_{U+B}|
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from asdl_marglik import Conditioning, pivot_order
from laplace_marglik.errors import MarglikError


@dataclass(frozen=True)
class RowKernel:
    """The kernel of a conditioned block's rows, made when it is first asked for.

    Args:
        make: V P0^-1 V^T [s, s] in float64, at the hyperparameters of one evaluation.
        conditioning: of the rows.
        inducing: (number of the datum, column) of each inducing row [u, 2].
        two_sided: whether it is the kernel of all weights together, as the lower sides need it.
    """

    make: Callable[[], Tensor]
    conditioning: Conditioning
    inducing: Tensor
    two_sided: bool

    @cached_property
    def identity_plus(self) -> Tensor:
        """A = I + V P0^-1 V^T."""
        with torch.no_grad():
            A = self.make().double().clone()
        A.diagonal().add_(1)
        return A

    def settled(self) -> RowKernel:
        """The same without the statistics of which the kernel is made."""
        A = self.identity_plus
        settled = replace(self, make=lambda: A)
        settled.__dict__["identity_plus"] = A
        return settled

    @property
    def n_rows(self) -> int:
        """Rows of the block."""
        return len(self.identity_plus)

    def pivots(self, count: int) -> Tensor:
        """Rows by conditional variance, largest first.

        Args:
            count: how many.
        """
        return pivot_order(self.identity_plus, count)

    def lower_sides(self) -> Tensor:
        """Two numbers, each on average not above the log-determinant of all rows [2]."""
        u, m = self.conditioning.n_inducing, self.conditioning.weight
        L = torch.linalg.cholesky(self.identity_plus)
        log_pivots = 2 * L.diagonal().log()
        trace = L[u:, u:].square().sum() - len(L[u:])  # of S_B - I
        by_trace = log_pivots[:u].sum() + torch.log1p(m * trace.clamp_min(0))
        return torch.stack([by_trace, log_pivots.sum()])


@dataclass(frozen=True)
class KnownSides:
    """What an interval needs of a block that another process has evaluated.

    Args:
        sides: as `RowKernel.lower_sides` gives them [2].
        inducing: (number of the datum, column) of each inducing row [u, 2].
        two_sided: as in a `RowKernel`.
    """

    sides: Tensor
    inducing: Tensor
    two_sided: bool

    def lower_sides(self) -> Tensor:
        """The two numbers."""
        return self.sides

    def settled(self) -> KnownSides:
        """Itself."""
        return self

    @property
    def n_rows(self) -> int:
        """Refused: the kernel is in another process."""
        raise MarglikError("the kernel of these rows is in another process; ask that for pivots")

    def pivots(self, count: int) -> Tensor:
        """Refused, likewise."""
        return torch.arange(self.n_rows)[:count]
