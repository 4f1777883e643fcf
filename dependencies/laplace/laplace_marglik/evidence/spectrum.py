"""The evidence of a block as a function of one prior precision: one decomposition for all values.

    log|I + V V^T / delta| = sum_j log(1 + lambda_j / delta)

with the eigenvalues lambda of the block's curvature; of a conditioned block, m times that of all
rows and 1 - m times that of the inducing ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asdl_marglik import eigenvalues, statistics
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence, Status
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood
from laplace_marglik.partition import Block


@dataclass(frozen=True)
class Spectrum:
    """What the evidence of a block needs at any scalar prior precision.

    Args:
        values: eigenvalues of the curvature, zeros possibly left out [n].
        log_likelihood: of all data.
        square: |w - mu|^2.
        n_blocks: how often the log-determinant counts.
        status: of the evidence.
        inducing: eigenvalues of the inducing rows of a conditioned block [u].
    """

    values: Tensor
    log_likelihood: Tensor
    square: Tensor
    n_blocks: float
    status: Status
    inducing: Tensor | None = None

    def evidence(self, precision: float) -> Evidence:
        """The block's evidence at a prior precision.

        Args:
            precision: of all weights.
        """
        log_det = self.n_blocks * torch.log1p(self.values / precision).sum()
        if self.inducing is not None:
            of_inducing = torch.log1p(self.inducing / precision).sum()
            log_det = log_det + (1 - self.n_blocks) * of_inducing
        return Evidence(
            self.log_likelihood, precision * self.square, log_det, self.n_blocks, self.status
        )


class SpectralMarginalLikelihood(MarginalLikelihood):
    """A marginal likelihood with a scalar prior that gives the spectrum of a block's curvature."""

    def spectrum(self, x: Tensor, y: Tensor, block: Block) -> Spectrum:
        """One pass over the block and one decomposition of its small matrices.

        Args:
            x: inputs of the block.
            y: targets of the block.
            block: of a partition.
        """
        if self.prior.log_precision.numel() != 1:
            raise MarglikError(
                "a spectrum needs one prior precision for all weights: GaussianPrior(model, "
                "'scalar')."
            )
        before = self.in_double
        self.in_double = True  # it will be asked for weak priors too
        try:
            with torch.no_grad():
                return self._with_plan(lambda: self._spectrum(x, y, block))
        finally:
            self.in_double = before

    def gram(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs f [N, C] and the kernel J P0^-1 J^T [N C, N C], for the structure ntk.

        Args:
            x: inputs [N, ...].
            y: targets [N, ...].
        """
        before = self._fast
        # single outputs are asked for, not their contrasts
        self._fast = replace(before, fewer_cotangents=False)
        try:
            with torch.no_grad():
                block = self._with_plan(lambda: self._single_block(x, y, None, None))
                f, ((grams,),) = statistics(block.passes, self.prior.log_precision)
        finally:
            self._fast = before
        coefficients = torch.exp(-self.prior.log_precision.detach()).to(grams.dtype)
        total = grams[0].mul_(coefficients[0])
        for coefficient, gram in zip(coefficients[1:], grams[1:], strict=True):
            total.add_(gram, alpha=float(coefficient))
        return f, total

    def _spectrum(self, x: Tensor, y: Tensor, block: Block) -> Spectrum:
        prepared = self._single_block(x, y, None, block)
        passes = prepared.passes
        f, by_part = statistics(passes, self.prior.log_precision)
        mixing = passes.root_rows.mixing(f, *passes.rows_of_data)
        scale = self.curvature_scale
        inducing = None
        if prepared.conditioning is None:
            pairs = zip(passes.parts, by_part, strict=True)
            values = torch.cat([part.spectrum(own, mixing) for part, own in pairs]) * scale
        else:
            u = prepared.conditioning.n_inducing
            zero = torch.zeros_like(self.prior.log_precision, dtype=torch.float64)  # precision 1
            pairs = zip(passes.parts, by_part, strict=True)
            kernels = [part.kernel(own, mixing, scale, zero) for part, own in pairs]
            values = torch.cat([eigenvalues(K) for K in kernels]).clamp_min(0)
            inducing = torch.cat([eigenvalues(K[:u, :u]) for K in kernels]).clamp_min(0)
        log_prob = prepared.log_prob_of(f, self.likelihood)
        return Spectrum(
            values,
            log_prob * self.likelihood.inverse_temperature,
            prepared.squares.squeeze(),
            prepared.n_blocks,
            prepared.status,
            inducing,
        )
