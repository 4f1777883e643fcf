"""The effective dimension from posterior samples, in three ways, and what it says about the prior
precision.

gamma = tr(H^-1 M) = P - tr(H^-1 A) = sum over groups of gamma_l, gamma_l = tr (H^-1 M)_ll = P_l -
delta_l tr (H^-1)_ll. With z = H^-1 (A^{1/2} n + u) ~ N(0, H^-1):

    function space   gamma_l = E z_l . (M z)_l    relative variance of the sum <= 2 / (k gamma)
    weight space     gamma_l = P_l - delta_l E |z_l|^2    cancels where gamma_l << P_l
    data's pull      gamma_l = E |u_l - (M z)_l|^2 / delta_l    relative variance of each <= 2 / k

The last is delta_l |z_l - delta_l^{-1/2} n_l|^2, how far the data pull a sample from its prior
draw: of covariance A^{1/2} H^-1 M A^{-1/2}. In function space a group has a variance of up to
tr(M_ll) / (k delta_l) besides, from the other groups: far more than its gamma_l where that is
small, and of either sign.

The derivative of the evidence in log delta_l is (gamma_l - delta_l |theta_l - mu_l|^2) / 2, so its
maximum is a fixed point of delta_l <- gamma_l / |theta_l - mu_l|^2 (MacKay 1992). At the mode
delta_l (theta_l - mu_l) is the gradient g_l of the log-likelihood: a group that the prior dominates
is multiplied with E |u_l - (M z)_l|^2 / |g_l|^2, what noise would give over what the targets give.
Where that stays above 1 the targets hold no signal for the group, and its evidence is largest at
delta_l = infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Space = Literal["function", "weight", "pull"]

# effective dimension below which the data's pull has the smaller bound of its variance in every
# group
SMALL = 0.5
# nats, of all groups together, that a further increase of their precision may still be worth
NEGLIGIBLE = 1e-3
# of a log precision: weights at their prior mean would have an infinite one
LARGEST_STEP = math.log(1000)


@dataclass(frozen=True)
class EffectiveDimension:
    """Number of weights that the data determine: in all, and of each group [G]."""

    total: float
    standard_error: float
    groups: Tensor
    group_errors: Tensor

    @staticmethod
    def of(values: Tensor) -> EffectiveDimension:
        """From the estimates of each sample [k, G]; the error of a single one is its theoretical
        bound.
        """
        mean, k = values.mean(0), len(values)
        if k > 1:
            error, total_error = values.std(0) / k**0.5, values.sum(1).std().item() / k**0.5
        else:
            error = (2 * mean.clamp_min(0)).sqrt()
            total_error = (2 * mean.sum().clamp_min(0)).sqrt().item()
        return EffectiveDimension(mean.sum().item(), total_error, mean, error)

    def __repr__(self) -> str:
        total = f"{self.total:.6g} +- {self.standard_error:.3g}"
        return f"EffectiveDimension({total}, {len(self.groups)} groups)"


def mackay(gamma: Tensor, squares: Tensor, counts: Tensor) -> Tensor:
    """The next precision of each group [G]; a gamma that noise has carried out of (0, P_l) is
    brought back.
    """
    room = torch.minimum(torch.ones_like(counts), counts / 2)
    gamma = torch.where(gamma > 0, gamma, room)
    return torch.where(gamma < counts, gamma, counts - room) / squares.clamp_min(1e-300)


@dataclass(frozen=True)
class PriorStep:
    """A change of each group's log precision [G], and which groups would have gone further [G].

    Far above the curvature gamma_l ~ tr(M_l) / delta_l, and all that an infinite precision could
    still gain is about gamma_l / 2 nats. So a precision rises to where gamma_l is e, a group's
    share of the negligible, and no further: the group is then switched off.
    """

    change: Tensor
    switched_off: Tensor

    @staticmethod
    def towards(precision: Tensor, gamma: Tensor, known: Tensor) -> PriorStep:
        """From the known log precision towards MacKay's `precision`; a group that the data do not
        see stays.
        """
        seen = gamma > 0
        room = (gamma * len(gamma) / NEGLIGIBLE).clamp_min(1.0).log()
        change = torch.where(seen, precision.log() - known.double(), 0.0)
        limited = torch.minimum(change, room).clamp(-LARGEST_STEP, LARGEST_STEP)
        return PriorStep(limited, seen & (change > room) & (room < LARGEST_STEP))
