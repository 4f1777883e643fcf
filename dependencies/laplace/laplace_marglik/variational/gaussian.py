"""Gaussian distributions over the weights of a network: draws, and standard deviations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asdl_marglik import Groups
from laplace_marglik.errors import MarglikError
from laplace_marglik.prior import GaussianPrior, groups_of

Width = Literal["scalar", "group", "diagonal"]


class Posterior(Protocol):
    """A distribution over weights that can be drawn from."""

    def sample(self, generator: torch.Generator, scale: float = 1.0) -> dict[str, Tensor]:
        """Weights m + scale * noise, by name.

        Args:
            generator: source of the noise.
            scale: factor of the noise.
        """


class FixedPosterior:
    """N(m, diag(s^2)), with constant means and standard deviations.

    Args:
        mean: m of each weight by name.
        deviation: s of each weight by name, shaped as the weight or a scalar.
    """

    def __init__(self, mean: Mapping[str, Tensor], deviation: Mapping[str, Tensor]):
        if set(mean) != set(deviation):
            raise MarglikError(
                f"means of {sorted(mean)}, but standard deviations of {sorted(deviation)}"
            )
        self.mean = {name: m.detach().clone() for name, m in mean.items()}
        self.deviation = {name: s.detach().clone() for name, s in deviation.items()}

    def sample(self, generator: torch.Generator, scale: float = 1.0) -> dict[str, Tensor]:
        """Weights m + scale * s * xi by name, xi standard normal.

        Args:
            generator: source of xi.
            scale: factor of the noise.
        """
        return {
            name: m + scale * self.deviation[name] * normal(m, generator)
            for name, m in self.mean.items()
        }


class LearnedWidth(nn.Module):
    """The standard deviations of q = N(m, diag(sigma^2)) around the weights m of a network.

    sigma = softplus(raw_sigma).

    Args:
        width: one sigma for all weights ("scalar"), one per prior group ("group"), or one per
            element ("diagonal").
        prior: of the same weights.
        weights: tensors by parameter name.
        sigma: initial standard deviation.
    """

    raw_sigma: nn.Parameter

    def __init__(
        self, width: Width, prior: GaussianPrior, weights: Mapping[str, Tensor], sigma: float
    ):
        super().__init__()
        if width not in ("scalar", "group", "diagonal"):
            raise MarglikError(f"posterior must be scalar, group or diagonal, got {width!r}")
        if not 0 < sigma < math.inf:
            raise MarglikError(f"sigma must be positive and finite, got {sigma}")
        self.groups: Groups
        if width == "group":
            self.groups, names = prior.groups, prior.group_names
        else:
            self.groups, names = groups_of(width, weights)
        raw = sigma + math.log(-math.expm1(-sigma))  # inverse of softplus
        first = next(iter(weights.values())).detach()
        self.raw_sigma = nn.Parameter(first.new_full((len(names),), raw))

    @property
    def sigma(self) -> Tensor:
        """Standard deviations: [1], one per prior group, or one per weight."""
        return F.softplus(self.raw_sigma)

    def of(self, values: Tensor, name: str, weight: Tensor) -> Tensor:
        """A weight's part of a vector with one value per entry of sigma.

        Args:
            values: one per entry of sigma.
            name: of the weight.
            weight: for its shape, which the part has unless it is a single number.
        """
        group = self.groups[name]
        return values[group] if isinstance(group, int) else values[group].reshape(weight.shape)

    def perturbed(
        self, weights: Mapping[str, Tensor], noise: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """m + sigma * noise by weight name, differentiable in both m and sigma.

        Args:
            weights: m by parameter name.
            noise: by parameter name, shaped as the weights.
        """
        sigma = self.sigma
        xi = [noise[name] for name in weights]
        if len(sigma) == 1:
            return dict(zip(weights, _Perturbed.apply(sigma, xi, *weights.values()), strict=True))
        # one operation for all weights, instead of an indexing for each
        entries = sigma.unbind() if len(sigma) <= len(self.groups) else ()
        perturbed = {}
        for (name, w), own in zip(weights.items(), xi, strict=True):
            group = self.groups[name]
            width = entries[group] if isinstance(group, int) else self.of(sigma, name, w)
            perturbed[name] = torch.addcmul(w, width, own)
        return perturbed


class _Perturbed(torch.autograd.Function):
    """m + sigma * noise of all weights for one sigma [1], in fewer operations than autograd's.

    They would be a good part of a training step on little data.
    """

    @staticmethod
    def forward(
        ctx: Any, sigma: Tensor, noise: list[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.noise = noise  # constants, made for this draw
        width = sigma.squeeze()
        return tuple(torch.addcmul(w, width, xi) for w, xi in zip(weights, noise, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(cotangents, ctx.noise, strict=True)
        products = [torch.dot(bar.flatten(), xi.flatten()) for bar, xi in pairs]
        return torch.stack(products).sum(0, keepdim=True), None, *cotangents


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise shaped as `like`, drawn where the generator is."""
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
    return noise.to(like.device)
