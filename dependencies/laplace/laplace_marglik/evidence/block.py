"""A block of data, ready to be evaluated, and what can be said of the number that it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asdl_marglik import STRUCTURES, Batch, Conditioning, Passes, Settled
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Status
from laplace_marglik.evidence.rows import Rows
from laplace_marglik.likelihood import Likelihood


@dataclass(frozen=True)
class BlockData:
    """What both passes go over.

    Args:
        batches: gives the same batches (inputs, targets, columns) every time.
        n: data points in all of them; with `row_data`, rows.
        k: root columns of each.
        copies: augmented copies of each input.
        rows: the form in which rows are computed; None where only outputs are wanted.
        conditioning: of the rows.
        row_data: the datum of each row, where a datum may have several.
    """

    batches: Callable[[], Iterable[Batch]]
    n: int
    k: int
    copies: int
    rows: Rows | None
    conditioning: Conditioning | None = None
    row_data: Tensor | None = None


@dataclass
class PreparedBlock:
    """What stays fixed while the evidence of a block is evaluated, possibly several times.

    Args:
        passes: over the block.
        shape: of one datum's outputs.
        n_blocks: how many such blocks there are.
        status: of the evidence.
        squares: of the weights, for the scatter.
        factor: how often the log-likelihood of each datum or row [n] counts, or of all alike.
        data: passes over the data of the log-likelihood, where these are not those of the block.
        conditioning: of the rows.
        inducing: rows (datum, column) that the others are conditioned on [u, 2].
        cache: of a block whose evaluations follow prior, noise and temperature only.
    """

    passes: Passes
    shape: torch.Size
    n_blocks: float
    status: Status
    squares: Tensor
    factor: Tensor | float
    data: Passes | None = None
    conditioning: Conditioning | None = None
    inducing: Tensor | None = None
    cache: Cache | None = None

    def log_prob_of(self, f: Tensor, likelihood: Likelihood) -> Tensor:
        """The log-likelihood of all data before the temperature, from the outputs of some.

        Args:
            f: outputs of some data.
            likelihood: of the data.
        """
        passes = self.passes if self.data is None else self.data
        targets = passes.rows_of_data[0]
        each = likelihood.log_prob(f.double().reshape(-1, *self.shape), targets)
        if not each.isfinite().all():
            raise MarglikError(
                f"the log-likelihood of datum {int((~each.isfinite()).nonzero()[0])} is not "
                "finite; check its target"
            )
        if isinstance(self.factor, Tensor):
            return (self.factor.to(each) * each).sum()
        return self.factor * each.sum()


@dataclass
class Cache:
    """What neither prior nor noise can change.

    Args:
        f: outputs that the log-likelihood is made of.
        log_prob: the log-likelihood before the temperature, if no noise enters it.
        mixing: of the rows.
        statistics: of every part.
        log_dets: log-determinants as functions of the prior.
    """

    f: Tensor
    log_prob: Tensor | None
    mixing: Tensor | None
    statistics: list[list[Tensor]] = field(default_factory=list)
    log_dets: list[Settled] = field(default_factory=list)


def status_of(structure: str, true_root: bool, *, everything: bool) -> Status:
    """What the evidence of a block is.

    Curvature of independent blocks of a true root bounds it; that of all rows at once is exact. A
    structure that does not say what it guarantees guarantees nothing.

    Args:
        structure: by name.
        true_root: whether U U^T is the likelihood's curvature.
        everything: whether the block has all rows.
    """
    guarantee = STRUCTURES[structure].guarantee
    if guarantee == "approximation" or not true_root:
        return "approximation"
    return "exact" if everything and guarantee == "exact" else "bound"
