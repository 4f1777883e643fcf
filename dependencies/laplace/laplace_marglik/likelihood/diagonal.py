"""Likelihoods that treat outputs independently: the curvature is diagonal and single outputs are
true root rows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_marglik.checks import positive_number
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood.base import Likelihood, Root


class DiagonalLikelihood(Likelihood):
    """A likelihood with diagonal curvature; a subclass gives its square root, smooth also where it
    vanishes.
    """

    diagonal = True

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Square root of the curvature of each output, shaped as f; None where it is one
        everywhere.
        """
        raise TypeError(f"{type(self).__name__} must define root_diagonal(f, y)")

    def _sum(self, log_prob: Tensor) -> Tensor:
        return log_prob.reshape(len(log_prob), -1).sum(1)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        root = self.root_diagonal(f, y)
        values = torch.ones_like(f) if root is None else root.square()
        return torch.diag_embed(values.reshape(len(f), -1))

    def root(self, f: Tensor, y: Tensor, kind: Root, columns: Tensor) -> Tensor:
        root = self.root_diagonal(f, y)
        full = torch.diag_embed((torch.ones_like(f) if root is None else root).reshape(len(f), -1))
        return full.gather(2, columns.unsqueeze(1).expand(-1, full.shape[1], -1))

    def block_root(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        root = self.root_diagonal(f, y)
        return (
            None if root is None else torch.diag_embed(root.reshape(len(f), -1).gather(1, columns))
        )

    def root_product(self, f: Tensor, y: Tensor, xi: Tensor) -> Tensor:
        root = self.root_diagonal(f, y)
        return xi if root is None else root * xi


class Gaussian(DiagonalLikelihood):
    """y ~ N(f, sigma^2), with a learnable observation noise."""

    scale_parameters = ("log_temperature", "log_sigma")

    def __init__(
        self,
        sigma: float = 1.0,
        *,
        learn_sigma: bool = True,
        temperature: float = 1.0,
        learn_temperature: bool = False,
    ):
        super().__init__(temperature, learn_temperature=learn_temperature)
        positive_number("sigma", sigma)
        self.log_sigma = nn.Parameter(
            torch.tensor(math.log(sigma), dtype=torch.float64), requires_grad=learn_sigma
        )

    @property
    def sigma(self) -> Tensor:
        return self.log_sigma.exp()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y = _matching(y, f)
        log_sigma = self.log_sigma.to(f.dtype)
        return self._sum(
            -0.5 * ((y - f) * torch.exp(-log_sigma)).square()
            - log_sigma
            - 0.5 * math.log(2 * math.pi)
        )

    def curvature_scale(self) -> Tensor:
        return super().curvature_scale() * torch.exp(-2 * self.log_sigma.double())

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        return None


class Bernoulli(DiagonalLikelihood):
    """Independent binary targets y in {0, 1} with logits f (multi-label classification)."""

    constant_log_prob = True
    discrete = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self._sum(-F.binary_cross_entropy_with_logits(f, _matching(y, f), reduction="none"))

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        return torch.exp((F.logsigmoid(f) + F.logsigmoid(-f)) / 2)

    def predict(self, f: Tensor) -> Tensor:
        return f.sigmoid()


class Poisson(DiagonalLikelihood):
    """Counts y with log-rates f."""

    constant_log_prob = True
    discrete = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y = _matching(y, f)
        return self._sum(y * f - f.exp() - torch.lgamma(y + 1))

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        return torch.exp(f / 2)

    def predict(self, f: Tensor) -> Tensor:
        return f.exp()


class HeteroscedasticGaussian(DiagonalLikelihood):
    """y ~ N(m, v) with outputs f = (m, log v) [n, 2 D].

    Its Hessian is indefinite; the curvature used is the expected one (Fisher information),
    diag(1/v, 1/2).
    """

    constant_log_prob = True

    def _split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        if f.dim() != 2 or f.shape[1] % 2:
            raise MarglikError(
                f"expected outputs [n, 2 D] (means, then log variances), got {tuple(f.shape)}"
            )
        mean, log_variance = f.chunk(2, 1)
        return mean, log_variance

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = self._split(f)
        y = _matching(y, mean)
        return self._sum(
            -0.5
            * (
                (y - mean).square() * torch.exp(-log_variance)
                + log_variance
                + math.log(2 * math.pi)
            )
        )

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        _, log_variance = self._split(f)
        return torch.cat([torch.exp(-log_variance / 2), torch.full_like(log_variance, 0.5**0.5)], 1)

    def predict(self, f: Tensor) -> Tensor:
        return self._split(f)[0]


def _matching(y: Tensor, f: Tensor) -> Tensor:
    """Targets in the shape and dtype of the outputs; a single output may come with targets [n]."""
    if y.shape != f.shape:
        if y.numel() != f.numel():
            raise MarglikError(f"targets {tuple(y.shape)} do not match outputs {tuple(f.shape)}")
        y = y.reshape(f.shape)
    return y.to(f.dtype)
