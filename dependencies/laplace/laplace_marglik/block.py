"""A block of data, ready to be evaluated, and what can be said of the number that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from asdl_marglik import Passes, Settled
from torch import Tensor

from .evidence import Status


@dataclass
class PreparedBlock:
    """Everything that stays fixed while the evidence of a block is evaluated, possibly several times."""

    passes: Passes
    shape: torch.Size  # of one datum's outputs
    n_data_blocks: float
    n_column_blocks: float
    status: Status
    squares: Tensor  # of the weights, for the scatter
    # where all but prior, noise and temperature stays: log-determinants as functions of the prior, outputs, and
    # log-probabilities if no noise enters them
    log_dets: list[Settled] = field(default_factory=list)
    f: Tensor | None = None
    log_prob: Tensor | None = None

    @property
    def n_blocks(self) -> float:
        return self.n_data_blocks * self.n_column_blocks


def status_of(structure: str, true_root: bool, *, everything: bool) -> Status:
    """Of the evidence: curvature of independent blocks of a true root bounds it; that of all rows at once is exact."""
    if structure == "kfac" or not true_root:
        return "approximation"
    return "exact" if everything and structure in ("ntk", "full") else "bound"
