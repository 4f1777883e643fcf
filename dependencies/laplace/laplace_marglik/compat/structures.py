"""One class for each structure of the covariance, as in laplace-torch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from laplace_marglik.compat.predictions import ParametricLaplace
from laplace_marglik.posterior.elementwise import Elementwise


class FullLaplace(ParametricLaplace):
    """All weights with all their covariances."""

    structure = "full"

    def _matrix(self) -> Tensor:
        """The covariance [P, P] in float64."""
        size = cast(int, self.n_params)
        eye = torch.eye(size, dtype=torch.float64, device=self._like.device)
        return self._native().of_jacobians(eye.unsqueeze(0))[0]

    @property
    def posterior_covariance(self) -> Tensor:
        """P^-1 [n_params, n_params]."""
        return self._matrix().to(self._like.dtype)

    @property
    def posterior_precision(self) -> Tensor:
        """P [n_params, n_params]."""
        return torch.linalg.inv(self._matrix()).to(self._like.dtype)

    @property
    def posterior_scale(self) -> Tensor:
        """A root [n_params, n_params] of the covariance."""
        return torch.linalg.cholesky(self._matrix()).to(self._like.dtype)


class NTKLaplace(FullLaplace):
    """The same posterior in the space of rows, of all data or of an inducing set."""

    structure = "ntk"


class BlockDiagLaplace(ParametricLaplace):
    """Modules as if they were independent."""

    structure = "blockdiag"


class KronLaplace(ParametricLaplace):
    """Kronecker factors of every linear map and convolution."""

    structure = "kfac"


class DiagLaplace(ParametricLaplace):
    """All weights as if they were independent."""

    structure = "diag"

    @property
    def posterior_variance(self) -> Tensor:
        """Of every weight [n_params]."""
        curvature = self._fitted()
        theta = self._log_precision().detach()
        blocks = curvature.covariances(self._scale().detach(), theta)
        variances = [block.variance.flatten() for block in blocks if isinstance(block, Elementwise)]
        return torch.cat(variances).to(self._like.dtype)

    @property
    def posterior_precision(self) -> Tensor:
        """Of every weight [n_params]."""
        return 1 / self.posterior_variance

    @property
    def posterior_scale(self) -> Tensor:
        """Standard deviation of every weight [n_params]."""
        return self.posterior_variance.sqrt()
