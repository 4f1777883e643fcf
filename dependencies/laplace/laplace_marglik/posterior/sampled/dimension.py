"""The effective dimension from posterior samples, and the prior precision that follows from it.

gamma = tr(H^-1 M) = P - tr(H^-1 A) is the sum over the prior's groups of

    gamma_l = tr (H^-1 M)_ll = P_l - delta_l tr (H^-1)_ll.

There are three estimates of it from samples z = H^-1 (A^{1/2} n + u) ~ N(0, H^-1):

    function space   gamma_l = E z_l . (M z)_l    relative variance of the sum <= 2 / (k gamma)
    weight space     gamma_l = P_l - delta_l E |z_l|^2    cancels where gamma_l << P_l
    data's pull      gamma_l = E |u_l - (M z)_l|^2 / delta_l    relative variance of each <= 2 / k

The last is delta_l |z_l - delta_l^{-1/2} n_l|^2, how far the data pull a sample from its prior
draw; the covariance of that deviation, times A^{1/2} on both sides, is A^{1/2} H^-1 M A^{-1/2}. In
function space other groups add up to tr(M_ll) / (k delta_l) to the variance of a group's estimate:
far more than gamma_l where that is small, and the estimate may be negative.

The derivative of the evidence in log delta_l is (gamma_l - delta_l |theta_l - mu_l|^2) / 2, so its
maximum is a fixed point of delta_l <- gamma_l / |theta_l - mu_l|^2 (MacKay 1992). At the mode
delta_l (theta_l - mu_l) is the gradient g_l of the log-likelihood. So where the prior dominates a
group, its precision is multiplied by E |u_l - (M z)_l|^2 / |g_l|^2: the squared gradient that pure
noise would give, over the one that the targets give. Where that ratio stays above 1 the targets
hold no signal for the group, and the evidence is largest at delta_l = infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Space = Literal["function", "weight", "pull"]

# effective dimension of a group below which its estimate is the data's pull: there the bound of its
# variance is smaller than those of the other two
SMALL = 0.5
# nats, of all groups together, that a further increase of their precision may still be worth: far
# below the standard error of an evidence
NEGLIGIBLE = 1e-3
# largest change of a log precision in one step: weights at their prior mean ask for an infinite one
LARGEST_STEP = math.log(1000)
LEAST_SQUARE = 1e-300  # of |theta - mu|^2, against a division by zero; near the least in float64


@dataclass(frozen=True)
class EffectiveDimension:
    """Number of weights that the data determine: in all, and of each group [G]."""

    total: float
    standard_error: float
    groups: Tensor
    group_errors: Tensor

    @staticmethod
    def of(values: Tensor) -> EffectiveDimension:
        """From the estimates of each sample [k, G].

        Of a single sample the error is the theoretical bound.
        """
        k = len(values)
        mean = values.mean(0)
        total = mean.sum()
        if k > 1:
            error = values.std(0) / k**0.5
            total_error = values.sum(1).std() / k**0.5
        else:
            error = (2 * mean.clamp_min(0)).sqrt()
            total_error = (2 * total.clamp_min(0)).sqrt()
        return EffectiveDimension(total.item(), total_error.item(), mean, error)

    def __repr__(self) -> str:
        total = f"{self.total:.6g} +- {self.standard_error:.3g}"
        return f"EffectiveDimension({total}, {len(self.groups)} groups)"


def mackay(gamma: Tensor, squares: Tensor, counts: Tensor) -> Tensor:
    """The next precision gamma_l / |theta_l - mu_l|^2 of each group [G].

    Args:
        gamma: effective dimensions [G]; those that noise has carried out of (0, P_l) are replaced
            by values inside.
        squares: |theta_l - mu_l|^2 [G].
        counts: number of weights P_l [G].
    """
    margin = torch.minimum(torch.ones_like(counts), counts / 2)
    gamma = torch.where(gamma > 0, gamma, margin)
    gamma = torch.where(gamma < counts, gamma, counts - margin)
    return gamma / squares.clamp_min(LEAST_SQUARE)


@dataclass(frozen=True)
class PriorStep:
    """A change of each group's log precision [G], and which groups it switches off [G].

    Where delta_l is far above the curvature, gamma_l ~ tr(M_ll) / delta_l, and an infinite
    precision could still gain about gamma_l / 2 nats. So a precision rises until gamma_l is the
    group's share of the negligible, and no further: the group is then switched off.
    """

    change: Tensor
    switched_off: Tensor

    @staticmethod
    def towards(precision: Tensor, gamma: Tensor, known: Tensor) -> PriorStep:
        """The step towards MacKay's precision; groups with gamma <= 0 stay.

        Args:
            precision: where to go [G].
            gamma: effective dimensions [G].
            known: present log precisions [G].
        """
        seen = gamma > 0
        room = (gamma * len(gamma) / NEGLIGIBLE).clamp_min(1.0).log()
        change = torch.where(seen, precision.log() - known.double(), 0.0)
        limited = torch.minimum(change, room).clamp(-LARGEST_STEP, LARGEST_STEP)
        switched_off = seen & (change > room) & (room < LARGEST_STEP)
        return PriorStep(limited, switched_off)
