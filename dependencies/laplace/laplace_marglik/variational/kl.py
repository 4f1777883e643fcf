"""The divergence of a Gaussian posterior from a Gaussian prior, by group of the prior.

For a group of d weights with prior N(mu, v Sigma), posterior N(m, diag(sigma^2)) and e = m - mu

    KL = 1/2 [ e^T Sigma^-1 e / v + tr(Sigma^-1 diag(sigma^2)) / v - d
               + d log v + log|Sigma| - sum log sigma^2 ]
    v* = ( e^T Sigma^-1 e + tr(Sigma^-1 diag(sigma^2)) ) / d

v* is the variance of least divergence, at which the first three terms of KL add up to zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_marglik.prior import GaussianPrior
from laplace_marglik.variational.gaussian import LearnedWidth


@dataclass(frozen=True)
class Divergence:
    """The terms of each group's divergence, in float64; every field is [G]."""

    quadratic: Tensor  # e^T Sigma^-1 e
    trace: Tensor  # tr(Sigma^-1 diag(sigma^2))
    log_det_prior: Tensor  # log|Sigma|
    log_det_posterior: Tensor  # sum log sigma^2
    dimension: Tensor  # d

    def optimal_variance(self) -> Tensor:
        """v* of each group [G]."""
        return (self.quadratic + self.trace) / self.dimension

    def scatter(self, variance: Tensor) -> Tensor:
        """The part of 2 KL that depends on the means, of all groups.

        Args:
            variance: v of each group [G].
        """
        return (self.quadratic / variance).sum()

    def log_det_ratio(self, variance: Tensor) -> Tensor:
        """The part of 2 KL that depends on the widths sigma, of all groups.

        Args:
            variance: v of each group [G].
        """
        widths = self.trace / variance - self.dimension + self.dimension * variance.log()
        return (widths + self.log_det_prior - self.log_det_posterior).sum()

    def total(self, variance: Tensor) -> Tensor:
        """KL of all groups.

        Args:
            variance: v of each group [G].
        """
        return (self.scatter(variance) + self.log_det_ratio(variance)) / 2

    def least(self) -> Tensor:
        """KL of all groups at v*, in fewer operations than `total`."""
        widths = torch.dot(self.dimension, self.optimal_variance().log())
        return (widths + (self.log_det_prior - self.log_det_posterior).sum()) / 2


class _SquaredNorms(torch.autograd.Function):
    """|e|^2 of every tensor in float64, in fewer operations than autograd's derivative takes.

    They would be a good part of a training step on little data.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        norms = torch._foreach_norm(tensors, dtype=torch.float64)
        return torch.stack(norms).square_()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors
        factors = (2 * cotangents[0]).to(tensors[0].dtype).unbind()
        return tuple(torch._foreach_mul(tensors, factors))


def divergence(
    weights: Mapping[str, Tensor], prior: GaussianPrior, width: LearnedWidth
) -> Divergence:
    """The terms of KL(q || prior), differentiable in the means of q and in sigma.

    Args:
        weights: the means m by parameter name.
        prior: with variances v that stay open.
        width: the standard deviations sigma of q.
    """
    deviations = prior.deviations(weights)
    if any(isinstance(group, slice) for group in prior.groups.values()):
        return _by_element(deviations, width)
    by_group = _by_group(weights, deviations, prior, width)
    return _with_covariance(by_group, deviations, prior, width)


def _by_element(deviations: Mapping[str, Tensor], width: LearnedWidth) -> Divergence:
    """The terms for a prior with one variance per element and Sigma = I."""
    variance = width.sigma.double().square()
    squares = torch.cat([e.double().square().flatten() for e in deviations.values()])
    traces = torch.cat(
        [width.of(variance, name, e).expand(e.shape).flatten() for name, e in deviations.items()]
    )
    ones = torch.ones_like(traces, requires_grad=False)
    return Divergence(squares, traces, torch.zeros_like(ones), traces.log(), ones)


def _by_group(
    weights: Mapping[str, Tensor],
    deviations: Mapping[str, Tensor],
    prior: GaussianPrior,
    width: LearnedWidth,
) -> Divergence:
    """The terms for a prior with Sigma = I in every group."""
    sigma = width.sigma.double()
    variance = sigma * sigma  # of which the derivative takes less than that of a power
    device = variance.device
    numbers = [prior.groups[name] for name in weights]
    zero = torch.zeros(len(prior.group_names), dtype=torch.float64, device=device)

    def summed(values: Tensor) -> Tensor:
        """Values of each weight, added up in its group [G]."""
        if numbers == list(range(len(zero))):  # each weight is a group
            return values
        return zero.index_add(0, torch.tensor(numbers, device=device), values)

    sizes = [w.numel() for w in weights.values()]
    sizes_of_weights = torch.tensor(sizes, dtype=torch.float64, device=device)
    quadratic = summed(_SquaredNorms.apply(*deviations.values()))
    dimension = summed(sizes_of_weights)
    if len(variance) == 1:  # the usual case, in few operations
        trace = dimension * variance
        log_det_posterior = dimension * variance.log()
    else:
        trace = summed(_per_weight(variance, weights, width, sizes_of_weights))
        log_det_posterior = summed(_per_weight(variance.log(), weights, width, sizes_of_weights))
    return Divergence(quadratic, trace, zero, log_det_posterior, dimension)


def _with_covariance(
    terms: Divergence, deviations: Mapping[str, Tensor], prior: GaussianPrior, width: LearnedWidth
) -> Divergence:
    """The terms with the Sigma of those groups that have one."""
    if not prior.covariance:
        return terms
    variance = width.sigma.double().square()
    quadratic, trace, log_det_prior = terms.quadratic, terms.trace, terms.log_det_prior
    for number, sigma in prior.covariance.items():
        members = {name: width.of(variance, name, deviations[name]) for name in sigma.diagonal}
        here = torch.arange(len(trace), device=trace.device) == number
        quadratic = torch.where(here, sigma.quadratic(deviations), quadratic)
        trace = torch.where(here, sigma.trace(members), trace)
        log_det_prior = torch.where(here, sigma.log_det, log_det_prior)
    return replace(terms, quadratic=quadratic, trace=trace, log_det_prior=log_det_prior)


def _per_weight(
    values: Tensor, weights: Mapping[str, Tensor], width: LearnedWidth, sizes: Tensor
) -> Tensor:
    """The sum over each weight's elements of values that belong to the entries of sigma."""
    entries = [width.groups[name] for name in weights]
    if all(isinstance(entry, int) for entry in entries):
        return sizes * values[torch.tensor(entries, device=values.device)]
    return torch.stack([values[entry].sum() for entry in entries])
