"""The effective dimension from posterior samples, in two ways, and what it says about the prior precision.

gamma = tr(H^-1 M) = P - tr(H^-1 A) = sum over groups of gamma_l, gamma_l = tr (H^-1 M)_ll = P_l - delta_l tr (H^-1)_ll.
With z ~ N(0, H^-1):

    function space   gamma_l = E z_l . (M z)_l        relative variance of the sum of k samples' mean <= 2 / (k gamma)
    weight space     gamma_l = P_l - delta_l E |z_l|^2    cancels where gamma_l << P_l

The derivative of the evidence in log delta_l is (gamma_l - delta_l |theta_l - mu_l|^2) / 2, so its maximum is a fixed
point of delta_l <- gamma_l / |theta_l - mu_l|^2 (MacKay 1992).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Space = Literal["function", "weight"]


@dataclass(frozen=True)
class EffectiveDimension:
    """Number of weights that the data determine: in all, and of each group [G]."""

    total: float
    standard_error: float
    groups: Tensor
    group_errors: Tensor

    @staticmethod
    def of(values: Tensor) -> EffectiveDimension:
        """From the estimates of each sample [k, G]; the error of a single one is its theoretical bound."""
        mean, k = values.mean(0), len(values)
        if k > 1:
            error, total_error = values.std(0) / k**0.5, values.sum(1).std().item() / k**0.5
        else:
            error, total_error = (2 * mean.clamp_min(0)).sqrt(), (2 * mean.sum().clamp_min(0)).sqrt().item()
        return EffectiveDimension(mean.sum().item(), total_error, mean, error)

    def __repr__(self) -> str:
        return f"EffectiveDimension({self.total:.6g} +- {self.standard_error:.3g}, {len(self.groups)} groups)"


def mackay(gamma: Tensor, squares: Tensor, counts: Tensor) -> Tensor:
    """The next precision of each group [G]; gamma is kept away from 0 and P_l, which noise can reach."""
    room = torch.minimum(torch.ones_like(counts), counts / 2)
    return torch.maximum(torch.minimum(gamma, counts - room), room) / squares.clamp_min(1e-30)
