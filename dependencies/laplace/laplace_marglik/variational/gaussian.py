"""Gaussian distributions over weights around those of a network: what is drawn, and how wide it
is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol

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
        """Weights m + scale * noise, by name."""


class FixedPosterior:
    """N(m, diag(s^2)) with given means and standard deviations, by weight name."""

    def __init__(self, mean: Mapping[str, Tensor], deviation: Mapping[str, Tensor]):
        if set(mean) != set(deviation):
            raise MarglikError(
                f"means of {sorted(mean)}, but standard deviations of {sorted(deviation)}"
            )
        self.mean = {name: m.detach().clone() for name, m in mean.items()}
        self.deviation = {name: s.detach().clone() for name, s in deviation.items()}

    def sample(self, generator: torch.Generator, scale: float = 1.0) -> dict[str, Tensor]:
        return {
            name: m + scale * self.deviation[name] * normal(m, generator)
            for name, m in self.mean.items()
        }


class LearnedWidth(nn.Module):
    """The standard deviations of q = N(m, diag(sigma^2)) around the weights m of a network.

    sigma = softplus(raw_sigma): one for all weights ("scalar"), one per group of the prior
    ("group"), or one per weight ("diagonal").
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
        self.groups: Groups = prior.groups if width == "group" else groups_of(width, weights)[0]
        size = sum(w.numel() for w in weights.values()) if width == "diagonal" else 1
        size = len(prior.group_names) if width == "group" else size
        raw = sigma + math.log(-math.expm1(-sigma))  # inverse of softplus
        self.raw_sigma = nn.Parameter(next(iter(weights.values())).new_full((size,), raw).detach())

    @property
    def sigma(self) -> Tensor:
        return F.softplus(self.raw_sigma)

    def of(self, values: Tensor, name: str, weight: Tensor) -> Tensor:
        """A weight's part of a vector with one value per entry of sigma: a number, or one per
        element.
        """
        group = self.groups[name]
        return values[group] if isinstance(group, int) else values[group].reshape(weight.shape)

    def perturbed(
        self, weights: Mapping[str, Tensor], noise: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """m + sigma * noise, differentiable in both m and sigma."""
        sigma = self.sigma
        # once, not for every weight
        entries = sigma.unbind() if len(sigma) <= len(self.groups) else ()
        perturbed = {}
        for name, w in weights.items():
            group = self.groups[name]
            width = entries[group] if isinstance(group, int) else self.of(sigma, name, w)
            perturbed[name] = torch.addcmul(w, width, noise[name])
        return perturbed


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise shaped as `like`, drawn where the generator is."""
    return torch.randn(
        like.shape, generator=generator, dtype=like.dtype, device=generator.device
    ).to(like.device)
