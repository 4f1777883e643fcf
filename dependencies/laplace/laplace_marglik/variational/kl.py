"""The divergence of a Gaussian posterior from a Gaussian prior whose variances are optimal or
given.

For a group of d weights with prior N(mu, v Sigma), posterior N(m, diag(sigma^2)) and e = m - mu

    KL = 1/2 [ e^T Sigma^-1 e / v + tr(Sigma^-1 diag(sigma^2)) / v - d
               + d log v + log|Sigma| - sum log sigma^2 ]
    v* = ( e^T Sigma^-1 e + tr(Sigma^-1 diag(sigma^2)) ) / d   (where the first three terms vanish)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_marglik.prior import GaussianPrior
from laplace_marglik.variational.gaussian import LearnedWidth


@dataclass(frozen=True)
class Divergence:
    """What the divergence of each group is made of, in float64; every field is [G]."""

    quadratic: Tensor  # e^T Sigma^-1 e
    trace: Tensor  # tr(Sigma^-1 diag(sigma^2))
    log_det_prior: Tensor  # log|Sigma|
    log_det_posterior: Tensor  # sum log sigma^2
    dimension: Tensor

    def optimal_variance(self) -> Tensor:
        """v* of each group."""
        return (self.quadratic + self.trace) / self.dimension

    def scatter(self, variance: Tensor) -> Tensor:
        """Of all groups: the part of 2 KL that the means make."""
        return (self.quadratic / variance).sum()

    def log_det_ratio(self, variance: Tensor) -> Tensor:
        """Of all groups: the part of 2 KL that the widths make."""
        widths = self.trace / variance - self.dimension + self.dimension * variance.log()
        return (widths + self.log_det_prior - self.log_det_posterior).sum()

    def total(self, variance: Tensor) -> Tensor:
        """KL of all groups."""
        return (self.scatter(variance) + self.log_det_ratio(variance)) / 2


class _SquaredNorms(torch.autograd.Function):
    """|e|^2 of every tensor in float64: in a training step on little data, fewer operations than
    autograd's count.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.stack(
            [torch.linalg.vector_norm(e, dtype=torch.float64) for e in tensors]
        ).square_()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors
        return tuple(
            e * bar
            for e, bar in zip(
                tensors, (2 * cotangents[0]).to(tensors[0].dtype).unbind(), strict=True
            )
        )


def divergence(
    weights: Mapping[str, Tensor], prior: GaussianPrior, width: LearnedWidth
) -> Divergence:
    """The parts of KL(q || prior) for the given means of q; differentiable in them and in sigma."""
    variance = width.sigma.double().square()
    deviations = prior.deviations(weights)
    by_element = any(isinstance(group, slice) for group in prior.groups.values())
    if by_element:  # one prior variance per weight
        flat = {name: e.double().square().flatten() for name, e in deviations.items()}
        wide = {
            name: width.of(variance, name, w).expand(w.shape).flatten()
            for name, w in weights.items()
        }
        squares, traces = torch.cat([*flat.values()]), torch.cat([*wide.values()])
        ones = torch.ones_like(traces, requires_grad=False)
        return Divergence(squares, traces, torch.zeros_like(ones), traces.log(), ones)
    own = torch.tensor([prior.groups[name] for name in weights], device=variance.device)
    zero = torch.zeros(len(prior.group_names), dtype=torch.float64, device=variance.device)

    def summed(values: Tensor) -> Tensor:
        return zero.index_add(0, own, values)

    sizes = torch.tensor(
        [w.numel() for w in weights.values()], dtype=torch.float64, device=variance.device
    )
    quadratic = summed(_SquaredNorms.apply(*deviations.values()))
    dimension, log_det_prior = summed(sizes), zero
    if len(variance) == 1:  # the usual case, in few operations
        trace, log_det_posterior = dimension * variance, dimension * variance.log()
    else:
        trace = summed(_per_weight(variance, weights, width, sizes))
        log_det_posterior = summed(_per_weight(variance.log(), weights, width, sizes))
    for number, sigma in prior.covariance.items():
        chosen = {name: width.of(variance, name, weights[name]) for name in sigma.diagonal}
        here = torch.arange(len(zero), device=zero.device) == number
        quadratic = torch.where(here, sigma.quadratic(deviations), quadratic)
        trace = torch.where(here, sigma.trace(chosen), trace)
        log_det_prior = torch.where(here, sigma.log_det, log_det_prior)
    return Divergence(quadratic, trace, log_det_prior, log_det_posterior, dimension)


def _per_weight(
    values: Tensor, weights: Mapping[str, Tensor], width: LearnedWidth, sizes: Tensor
) -> Tensor:
    """The sum over the elements of each weight of what sigma's entries have."""
    entries = [width.groups[name] for name in weights]
    if all(isinstance(entry, int) for entry in entries):
        return sizes * values[torch.tensor(entries, device=values.device)]
    return torch.stack([values[entry].sum() for entry in entries])
