"""The evidence of a fit and its terms, differentiable in prior precision and noise."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from asdl_marglik import PrecisionLost
from laplace_marglik.compat.fit import Fit
from laplace_marglik.compat.tuning import Tuning
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Categorical


class FitEvidence(Fit, Tuning):
    """A fit with its evidence, by which its prior can be tuned."""

    @property
    def log_likelihood(self) -> Tensor:
        """log p(y | w) / tau of the training data, differentiable in the noise."""
        curvature = self._fitted()
        if not self._regression:
            total = self._scaled_likelihood().tempered_log_prob(curvature.f, curvature.y).sum()
            return total.detach().to(self._like)
        f = curvature.f
        squares = (curvature.y.reshape(f.shape) - f).square().sum()
        sigma = self.sigma_noise.double()
        normaliser = f.numel() * torch.log(sigma * math.sqrt(2 * math.pi))
        total = -0.5 * squares / sigma.square() - normaliser
        return (total / self.temperature).to(self._like)

    @property
    def scatter(self) -> Tensor:
        """(w - mean)^T P0 (w - mean)."""
        deviation = self._deviation()
        return (self.prior_precision_diag.double() @ deviation.square()).to(self._like)

    @property
    def log_det_prior_precision(self) -> Tensor:
        """log|P0|."""
        return self.prior_precision_diag.double().log().sum().to(self._like)

    @property
    def log_det_ratio(self) -> Tensor:
        """log|P| - log|P0|."""
        try:
            ratio = self._fitted().log_det_ratio(self._scale(), self._log_precision())
        except PrecisionLost:
            self._fit_in_double()
            ratio = self._fitted().log_det_ratio(self._scale(), self._log_precision())
        return ratio.to(self._like)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """log|P|."""
        return self.log_det_ratio + self.log_det_prior_precision

    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        sigma_noise: float | Tensor | None = None,
    ) -> Tensor:
        """log p(y | w) - 1/2 log-det ratio - 1/2 scatter, differentiable in both arguments.

        Args:
            prior_precision: takes the place of the present one.
            sigma_noise: takes the place of the present one; for regression only.
        """
        self._fitted()
        if prior_precision is not None:
            self.prior_precision = prior_precision
        if sigma_noise is not None:
            if not self._regression:
                raise MarglikError("sigma_noise can only be changed for regression")
            self.sigma_noise = sigma_noise
        if self._choice:
            return self._evidence_of_block()
        return self.log_likelihood - 0.5 * (self.log_det_ratio + self.scatter)

    def _evidence_of_block(self) -> Tensor:
        if self._block is None or not torch.equal(self._fit_at, self.mean):
            raise MarglikError(
                "the evidence of a block needs its data at the weights of the fit, and these are "
                "not there any more; call fit(train_loader) again"
            )
        total = self._block(
            self.prior_precision, self.sigma_noise, self.prior_mean, self.temperature
        )
        return total.to(self._like)

    def _structured(self, precision: float, structure: str) -> Tensor:
        lengths = {"scalar": 1, "layerwise": self.n_layers, "diag": self.n_params}
        length = lengths["diag" if structure == "diagonal" else structure]
        return torch.full((cast(int, length),), precision).to(self._like)

    def _negative_log_likelihood(self, *prediction: Tensor) -> Tensor:
        *parts, y = prediction
        if not self._regression:
            p = parts[0]
            if isinstance(self._likelihood, Categorical):
                p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
            return -self._likelihood.log_prob(p, y).mean()
        mean, variance = parts
        if variance.dim() > mean.dim():
            variance = variance.diagonal(dim1=1, dim2=2)
        deviation = (variance + self.sigma_noise.detach().square()).sqrt()
        return -torch.distributions.Normal(mean, deviation).log_prob(y.reshape(mean.shape)).mean()
