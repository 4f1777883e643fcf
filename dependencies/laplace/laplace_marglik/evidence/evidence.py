"""The value of an evidence estimate and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError

Status = Literal["exact", "bound", "approximation"]


@dataclass(frozen=True)
class Evidence:
    """An estimate of the log marginal likelihood of all N data, in nats.

    total = log_likelihood - 1/2 scatter - 1/2 log_det_ratio. A "bound" from a block of a partition
    is an unbiased estimate of a lower bound; `standard_error` is known when several blocks were
    averaged.
    """

    log_likelihood: Tensor
    scatter: Tensor
    log_det_ratio: Tensor
    # how many such blocks make up the whole: what the block's log-determinant was multiplied with
    n_blocks: float
    status: Status
    standard_error: float | None = None

    @property
    def total(self) -> Tensor:
        return self.log_likelihood - 0.5 * self.scatter - 0.5 * self.log_det_ratio

    def detach(self) -> Evidence:
        """The same values without their graph."""
        parts = {
            name: getattr(self, name).detach()
            for name in ("log_likelihood", "scatter", "log_det_ratio")
        }
        return replace(self, **parts)

    @staticmethod
    def mean(evidences: Sequence[Evidence]) -> Evidence:
        """The average over blocks, with the standard error of its total."""
        if not evidences:
            raise MarglikError("cannot average zero evidences; evaluate at least one block")
        totals = torch.stack([e.total.detach() for e in evidences])
        several = len(evidences) > 1
        statuses = {e.status for e in evidences}
        return Evidence(
            log_likelihood=torch.stack([e.log_likelihood for e in evidences]).mean(),
            scatter=torch.stack([e.scatter for e in evidences]).mean(),
            log_det_ratio=torch.stack([e.log_det_ratio for e in evidences]).mean(),
            n_blocks=sum(e.n_blocks for e in evidences) / len(evidences),
            status="approximation"
            if "approximation" in statuses
            else ("bound" if "bound" in statuses else "exact"),
            standard_error=float(totals.std()) / math.sqrt(len(evidences)) if several else None,
        )

    def __repr__(self) -> str:
        error = "" if self.standard_error is None else f" +- {self.standard_error:.4g}"
        return (
            f"Evidence(total={self.total.item():.6g}{error}, "
            f"log_likelihood={self.log_likelihood.item():.6g}, scatter={self.scatter.item():.6g}, "
            f"log_det_ratio={self.log_det_ratio.item():.6g}, n_blocks={self.n_blocks:g}, "
            f"status={self.status!r})"
        )
