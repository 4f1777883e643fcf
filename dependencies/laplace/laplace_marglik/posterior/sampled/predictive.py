"""Predictions from samples of the outputs, f_j = f + J z_j."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)


def monte_carlo(likelihood: Likelihood, samples: Tensor) -> Tensor:
    """The mean over samples [k, n, ...] of the prediction."""
    return torch.stack([likelihood.predict(f) for f in samples]).mean(0)


def probit(likelihood: Likelihood, f: Tensor, variance: Tensor) -> Tensor:
    """The prediction from outputs scaled down by their variance, f / sqrt(1 + pi variance / 8)
    (MacKay 1992).
    """
    if isinstance(likelihood, Gaussian | HeteroscedasticGaussian):
        return likelihood.predict(f)  # the mean of a linear prediction
    if not isinstance(likelihood, Categorical | Bernoulli):
        raise MarglikError(
            "the probit approximation is for class probabilities, not for "
            f"{type(likelihood).__name__}; use kind='mc'"
        )
    return likelihood.predict(f / torch.sqrt(1 + math.pi * variance / 8))


def joint_log_prob(likelihood: Likelihood, samples: Tensor, y: Tensor) -> Tensor:
    """log p(y_1, ..., y_n | x_1, ..., x_n) = log mean_j prod_i p(y_i | f_j(x_i)) of samples [k, n,
    ...], in float64.
    """
    log_p = torch.stack([likelihood.log_prob(f.double(), y).sum() for f in samples])
    return torch.logsumexp(log_p, 0) - math.log(len(samples))
