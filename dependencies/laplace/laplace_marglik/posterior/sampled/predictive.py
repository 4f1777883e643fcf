"""Predictions from samples of the outputs, f_j = f + J z_j."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace_marglik.likelihood import Likelihood


def monte_carlo(likelihood: Likelihood, samples: Tensor) -> Tensor:
    """The mean over samples of the outputs [k, n, ...] of the prediction."""
    return torch.stack([likelihood.predict(f) for f in samples]).mean(0)


def joint_log_prob(likelihood: Likelihood, samples: Tensor, y: Tensor) -> Tensor:
    """log mean_j prod_i p(y_i | f_j(x_i)) over samples of the outputs [k, n, ...], in float64."""
    log_p = torch.stack([likelihood.log_prob(f.double(), y).sum() for f in samples])
    return torch.logsumexp(log_p, 0) - math.log(len(samples))
