"""Likelihoods of independent outputs: the curvature is diagonal, single outputs are root rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_marglik.checks import positive_number
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood.base import Likelihood, Root, probit_scaled, scale_text

LOG_TWO_PI = math.log(2 * math.pi)
# standard deviations beyond which no count is drawn: uniform numbers have 53 bits, so 8.3 of them
FAR_OUT = 9.0


class DiagonalLikelihood(Likelihood):
    """A likelihood with diagonal curvature, whose square root a subclass gives.

    The root must be smooth also where it vanishes.

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
    """

    diagonal = True

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        """Square root of the curvature of each output, shaped as f; None if all are one.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
        """
        raise TypeError(f"{type(self).__name__} must define root_diagonal(f, y)")

    def n_uniforms(self, shape: torch.Size) -> int:
        return shape.numel()

    def _sum(self, log_prob: Tensor) -> Tensor:
        return log_prob.reshape(len(log_prob), -1).sum(1)

    def _root_or_ones(self, f: Tensor, y: Tensor) -> Tensor:
        root = self.root_diagonal(f, y)
        return torch.ones_like(f) if root is None else root

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        curvature = self._root_or_ones(f, y).square()
        return torch.diag_embed(curvature.reshape(len(f), -1))

    def root(self, f: Tensor, y: Tensor, kind: Root, columns: Tensor) -> Tensor:
        root = self._root_or_ones(f, y)
        U = torch.diag_embed(root.reshape(len(f), -1))
        return U.gather(2, columns.unsqueeze(1).expand(-1, U.shape[1], -1))

    def block_root(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        root = self.root_diagonal(f, y)
        if root is None:
            return None
        chosen = root.reshape(len(f), -1).gather(1, columns)
        return torch.diag_embed(chosen)

    def root_product(self, f: Tensor, y: Tensor, xi: Tensor) -> Tensor:
        root = self.root_diagonal(f, y)
        return xi if root is None else root * xi


class Gaussian(DiagonalLikelihood):
    """y ~ N(f, sigma^2), with a learnable observation noise.

    Args:
        sigma: standard deviation of the noise, the same for all outputs.
        learn_sigma: whether `log_sigma` requires grad.
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
    """

    scale_parameters = ("log_temperature", "log_sigma")
    slope_scale_parameters = ("log_temperature", "log_sigma")
    draws_targets = True

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
        log_sigma = torch.tensor(math.log(sigma), dtype=torch.float64)
        self.log_sigma = nn.Parameter(log_sigma, requires_grad=learn_sigma)

    @property
    def sigma(self) -> Tensor:
        """Standard deviation of the noise."""
        return self.log_sigma.exp()

    def extra_repr(self) -> str:
        return f"{scale_text('sigma', self.log_sigma)}, {super().extra_repr()}"

    @property
    def learns_noise(self) -> bool:
        return self.log_sigma.requires_grad

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y = _matching(y, f)
        log_sigma = self.log_sigma.to(f.dtype)
        residual = (y - f) * torch.exp(-log_sigma)
        return self._sum(-0.5 * residual.square() - log_sigma - 0.5 * LOG_TWO_PI)

    def predict_probit(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.predict(f)  # linear in the outputs: their variance does not move its mean

    def curvature_scale(self) -> Tensor:
        return super().curvature_scale() * torch.exp(-2 * self.log_sigma.double())

    def slope(self, f: Tensor, y: Tensor) -> Tensor:
        return _matching(y, f) - f

    def slope_scale(self) -> Tensor:
        return super().slope_scale() * torch.exp(-4 * self.log_sigma.double())

    def drawn_slope(self, f: Tensor, y: Tensor, uniforms: Tensor) -> Tensor:
        """The noise in units of sigma, which neither outputs nor sigma move.

        Args:
            f: outputs [n, ...].
            y: not used.
            uniforms: one for each output [n, C].
        """
        return _normal(uniforms).reshape(f.shape).to(f)

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        return None


class Bernoulli(DiagonalLikelihood):
    """Independent binary targets y in {0, 1} with logits f (multi-label classification).

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
    """

    constant_log_prob = True
    discrete = True
    draws_targets = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(f, _matching(y, f), reduction="none")
        return self._sum(-loss)

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        return torch.exp((F.logsigmoid(f) + F.logsigmoid(-f)) / 2)

    def slope(self, f: Tensor, y: Tensor) -> Tensor:
        return _matching(y, f) - f.sigmoid()

    def drawn_slope(self, f: Tensor, y: Tensor, uniforms: Tensor) -> Tensor:
        p = f.sigmoid()
        return (uniforms.reshape(f.shape) < p.detach()).to(p) - p

    def predict(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def predict_probit(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.predict(probit_scaled(f, variance))


class Poisson(DiagonalLikelihood):
    """Counts y with log-rates f.

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
    """

    constant_log_prob = True
    discrete = True
    draws_targets = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y = _matching(y, f)
        return self._sum(y * f - f.exp() - torch.lgamma(y + 1))

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        return torch.exp(f / 2)

    def slope(self, f: Tensor, y: Tensor) -> Tensor:
        return _matching(y, f) - f.exp()

    def drawn_slope(self, f: Tensor, y: Tensor, uniforms: Tensor) -> Tensor:
        rate = f.exp()
        return _poisson(rate.detach(), uniforms.reshape(f.shape)) - rate

    def predict(self, f: Tensor) -> Tensor:
        return f.exp()


class HeteroscedasticGaussian(DiagonalLikelihood):
    """y ~ N(m, v) with outputs f = (m, log v) [n, 2 D].

    Its Hessian is indefinite; the curvature used is the expected one (Fisher information),
    diag(1/v, 1/2).

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
    """

    constant_log_prob = True
    draws_targets = True

    @property
    def learns_noise(self) -> bool:
        return True

    def _split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Means [n, D] and log variances [n, D]."""
        if f.dim() != 2 or f.shape[1] % 2:
            raise MarglikError(
                f"expected outputs [n, 2 D] (means, then log variances), got {tuple(f.shape)}"
            )
        mean, log_variance = f.chunk(2, 1)
        return mean, log_variance

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = self._split(f)
        y = _matching(y, mean)
        squares = (y - mean).square() * torch.exp(-log_variance)
        return self._sum(-0.5 * (squares + log_variance + LOG_TWO_PI))

    def root_diagonal(self, f: Tensor, y: Tensor) -> Tensor | None:
        _, log_variance = self._split(f)
        of_mean = torch.exp(-log_variance / 2)
        of_log_variance = torch.full_like(log_variance, 0.5**0.5)
        return torch.cat([of_mean, of_log_variance], 1)

    def slope(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = self._split(f)
        noise = (_matching(y, mean) - mean) * torch.exp(-log_variance / 2)
        return self._slope_of_noise(noise, log_variance)

    def n_uniforms(self, shape: torch.Size) -> int:
        return shape.numel() // 2

    def drawn_slope(self, f: Tensor, y: Tensor, uniforms: Tensor) -> Tensor:
        _, log_variance = self._split(f)
        return self._slope_of_noise(_normal(uniforms).to(f), log_variance)

    def _slope_of_noise(self, noise: Tensor, log_variance: Tensor) -> Tensor:
        """In means and log variances, from (y - m) / sqrt(v)."""
        return torch.cat([noise * torch.exp(-log_variance / 2), (noise.square() - 1) / 2], 1)

    def predict(self, f: Tensor) -> Tensor:
        mean, _ = self._split(f)
        return mean

    def predict_probit(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.predict(f)  # linear in the outputs: their variance does not move its mean


def _matching(y: Tensor, f: Tensor) -> Tensor:
    """Targets in the shape and dtype of the outputs; a single output may come with targets [n]."""
    if y.shape != f.shape:
        if y.numel() != f.numel():
            raise MarglikError(f"targets {tuple(y.shape)} do not match outputs {tuple(f.shape)}")
        y = y.reshape(f.shape)
    return y.to(f.dtype)


def _normal(uniforms: Tensor) -> Tensor:
    """Standard normal numbers from numbers between 0 and 1."""
    smallest = torch.finfo(uniforms.dtype).tiny  # zero itself would be infinitely far out
    return torch.special.ndtri(uniforms.clamp_min(smallest))


def _poisson(rate: Tensor, uniforms: Tensor) -> Tensor:
    """Counts: the least k with P(count <= k) >= u, found by bisection."""
    low = torch.full_like(rate, -1.0)  # P(count <= low) < u <= P(count <= high)
    high = torch.ceil(rate + FAR_OUT * rate.sqrt() + FAR_OUT**2)
    for _ in range(int(high.max().add(1).log2().ceil()) + 1):
        middle = torch.floor((low + high) / 2)
        enough = torch.special.gammaincc((middle + 1).clamp_min(0.5), rate) >= uniforms
        enough &= middle >= 0
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high
