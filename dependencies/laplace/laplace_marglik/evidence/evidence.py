"""The value of an evidence estimate and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.row_kernel import KnownSides, RowKernel

Status = Literal["exact", "bound", "approximation"]
_STATUSES = ("exact", "bound", "approximation")  # from the strongest to the weakest
FEWEST_BLOCKS = 5  # of an interval: fewer say too little about their own spread


@dataclass(frozen=True)
class Evidence:
    """An estimate of the log marginal likelihood of all N data, in nats.

        total = log_likelihood - 1/2 scatter - 1/2 log_det_ratio

    A "bound" from a block of a partition is an unbiased estimate of a lower bound.

    Args:
        log_likelihood: of all data.
        scatter: (w - mu)^T P0 (w - mu).
        log_det_ratio: log|I + P0^-1 H|.
        n_blocks: how many such blocks make up the whole: what the block's log-determinant, of a
            conditioned block that of its rows given the inducing ones, was multiplied with.
        status: "exact" | "bound" | "approximation".
        standard_error: of the total, if several blocks were averaged.
        interval: (lower, upper) of the exact evidence, if several conditioned blocks were averaged.
        n_data: N.
        row_kernel: of a conditioned block.
    """

    log_likelihood: Tensor
    scatter: Tensor
    log_det_ratio: Tensor
    n_blocks: float
    status: Status
    standard_error: float | None = None
    interval: tuple[float, float] | None = None
    n_data: int | None = None
    row_kernel: RowKernel | KnownSides | None = field(default=None, repr=False, compare=False)

    @property
    def total(self) -> Tensor:
        return self.log_likelihood - 0.5 * (self.scatter + self.log_det_ratio)

    @property
    def interval_width(self) -> float | None:
        """Width of the interval, per datum."""
        if self.interval is None or self.n_data is None:
            return None
        lower, upper = self.interval
        return (upper - lower) / self.n_data

    @property
    def pivots(self) -> Tensor:
        """Rows of a conditioned block, by conditional variance, largest first."""
        kernel = self.kernel_of_rows()
        return kernel.pivots(kernel.n_rows)

    def kernel_of_rows(self) -> RowKernel | KnownSides:
        """That of a conditioned block; others have none."""
        if self.row_kernel is None:
            raise MarglikError(
                "only the evidence of a conditioned block has pivots; evaluate one of an "
                "InducingPartition: ml(x, y, block=partition.sample())"
            )
        return self.row_kernel

    def detach(self) -> Evidence:
        """The same values without their graph, and without the statistics they were made of."""
        return replace(
            self,
            log_likelihood=self.log_likelihood.detach(),
            scatter=self.scatter.detach(),
            log_det_ratio=self.log_det_ratio.detach(),
            row_kernel=None if self.row_kernel is None else self.row_kernel.settled(),
        )

    @staticmethod
    def mean(evidences: Sequence[Evidence]) -> Evidence:
        """The average over blocks, with the standard error of its total.

        Over at least five conditioned blocks with the same inducing rows, evaluated at
        hyperparameters that were fixed before the blocks were drawn, it has an `interval`.
        """
        if not evidences:
            raise MarglikError("cannot average zero evidences; evaluate at least one block")
        totals = torch.stack([e.total.detach() for e in evidences])
        error = float(totals.std()) / math.sqrt(len(totals)) if len(totals) > 1 else None
        return Evidence(
            log_likelihood=torch.stack([e.log_likelihood for e in evidences]).mean(),
            scatter=torch.stack([e.scatter for e in evidences]).mean(),
            log_det_ratio=torch.stack([e.log_det_ratio for e in evidences]).mean(),
            n_blocks=sum(e.n_blocks for e in evidences) / len(evidences),
            status=max((e.status for e in evidences), key=_STATUSES.index),
            standard_error=error,
            interval=_interval(evidences, float(totals.mean()), error),
            n_data=evidences[0].n_data,
        )

    def __repr__(self) -> str:
        error = "" if self.standard_error is None else f" +- {self.standard_error:.4g}"
        interval = ""
        if self.interval is not None:
            lower, upper = self.interval
            interval = f", interval=({lower:.6g}, {upper:.6g})"
        return (
            f"Evidence(total={self.total.item():.6g}{error}, "
            f"log_likelihood={self.log_likelihood.item():.6g}, scatter={self.scatter.item():.6g}, "
            f"log_det_ratio={self.log_det_ratio.item():.6g}, n_blocks={self.n_blocks:g}, "
            f"status={self.status!r}{interval})"
        )


def _interval(
    evidences: Sequence[Evidence], mean: float, error: float | None
) -> tuple[float, float] | None:
    """(lower, upper) of the exact evidence: both sides hold in expectation over the blocks.

    The mean is on the low side; half of what the mean log-determinant may be too large by is what
    it may lack. Two standard errors are for the blocks that were not drawn.
    """
    kernels = [e.row_kernel for e in evidences if e.row_kernel is not None]
    if error is None or len(kernels) < max(FEWEST_BLOCKS, len(evidences)):
        return None
    same = all(torch.equal(kernel.inducing, kernels[0].inducing) for kernel in kernels)
    if not same or not all(kernel.two_sided for kernel in kernels):
        return None
    upper = torch.stack([e.log_det_ratio.detach() for e in evidences]).mean()
    lower = torch.stack([kernel.lower_sides() for kernel in kernels]).mean(0).max()
    slack = max(0.0, float(upper - lower))
    return mean - 2 * error, mean + 0.5 * slack + 2 * error
