"""A block of data, ready to be evaluated, and what can be said of the number that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asdl_marglik import STRUCTURES, Passes, Settled
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Status
from laplace_marglik.likelihood import Likelihood


@dataclass
class PreparedBlock:
    """Everything that stays fixed while the evidence of a block is evaluated, possibly several
    times.
    """

    passes: Passes
    shape: torch.Size  # of one datum's outputs
    n_data_blocks: float
    n_column_blocks: float
    status: Status
    squares: Tensor  # of the weights, for the scatter
    # where all but prior, noise and temperature stays: log-determinants as functions of the prior,
    # outputs, and log-probabilities if no noise enters them
    log_dets: list[Settled] = field(default_factory=list)
    f: Tensor | None = None
    log_prob: Tensor | None = None

    @property
    def n_blocks(self) -> float:
        return self.n_data_blocks * self.n_column_blocks

    def log_prob_of(self, f: Tensor, likelihood: Likelihood) -> Tensor:
        """log p(y | f) of all data in the block."""
        each = likelihood.log_prob(f.double().reshape(-1, *self.shape), self.passes.rows_of_data[0])
        if not each.isfinite().all():
            raise MarglikError(
                f"the log-likelihood of datum {int((~each.isfinite()).nonzero()[0])} is not "
                "finite; check its target"
            )
        return each.sum()


def status_of(structure: str, true_root: bool, *, everything: bool) -> Status:
    """Of the evidence: curvature of independent blocks of a true root bounds it; that of all rows
    at once is exact.

    A structure that does not say what it guarantees guarantees nothing.
    """
    guarantee = STRUCTURES[structure].guarantee
    if guarantee == "approximation" or not true_root:
        return "approximation"
    return "exact" if everything and guarantee == "exact" else "bound"
