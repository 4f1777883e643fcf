"""The evidence of a block as a function of one prior precision: one decomposition, then every value
for free.

log|I + V V^T / delta| = sum_j log(1 + lambda_j / delta),   lambda the eigenvalues of the block's
curvature
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asdl_marglik import ALL, statistics
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence, Status
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood
from laplace_marglik.partition import Block


@dataclass(frozen=True)
class Spectrum:
    """What the evidence of a block needs at any scalar prior precision."""

    values: Tensor  # [n] eigenvalues of the curvature, zeros possibly left out
    log_likelihood: Tensor
    square: Tensor  # |w - mu|^2
    n_blocks: float
    status: Status

    def evidence(self, precision: float) -> Evidence:
        """The block's evidence at a prior precision."""
        log_det = torch.log1p(self.values / precision).sum()
        return Evidence(
            self.log_likelihood,
            precision * self.square,
            self.n_blocks * log_det,
            self.n_blocks,
            self.status,
        )


class SpectralMarginalLikelihood(MarginalLikelihood):
    """A marginal likelihood with a scalar prior that can give the spectrum of a block's
    curvature.
    """

    def spectrum(self, x: Tensor, y: Tensor, block: Block) -> Spectrum:
        """One pass over the block and one decomposition of its small matrices."""
        if self.prior.log_precision.numel() != 1:
            raise MarglikError(
                "a spectrum needs one prior precision for all weights: GaussianPrior(model, "
                "'scalar')."
            )
        self.in_double = True  # it will be asked for weak priors too
        with torch.no_grad():
            return self._with_plan(lambda: self._spectrum(x, y, block))

    def gram(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs f [N, C] and the kernel J P0^-1 J^T [N C, N C] of all outputs, for the structure
        ntk.
        """
        # single outputs are asked for, not their contrasts
        self._fast = replace(ALL, fewer_cotangents=False)
        with torch.no_grad():
            made = self._with_plan(lambda: self._single_block(x, y, None, None))
            f, ((grams,),) = statistics(made.passes, self.prior.log_precision)
            weights = torch.exp(-self.prior.log_precision).to(grams.dtype)
            total = grams[0].mul_(weights[0])
            for weight, gram in zip(weights[1:], grams[1:], strict=True):
                total.add_(gram, alpha=float(weight))
        return f, total

    def _spectrum(self, x: Tensor, y: Tensor, block: Block) -> Spectrum:
        made = self._single_block(x, y, None, block)
        passes = made.passes
        f, parts = statistics(passes, self.prior.log_precision)
        targets, columns = passes.rows_of_data
        mixing = passes.root_rows.mixing(f, targets, columns)
        values = [part.spectrum(own, mixing) for part, own in zip(passes.parts, parts, strict=True)]
        log_prob = made.log_prob_of(f, self.likelihood)
        return Spectrum(
            torch.cat(values) * self.likelihood.curvature_scale(),
            log_prob * self.likelihood.inverse_temperature,
            made.squares.squeeze(),
            made.n_blocks,
            made.status,
        )
