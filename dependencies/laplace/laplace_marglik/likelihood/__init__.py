"""Likelihoods: how targets are distributed given the network's outputs, and a root of the curvature
that follows.
"""

from laplace_marglik.likelihood.base import FromLogProb, Likelihood, likelihood_for
from laplace_marglik.likelihood.categorical import Categorical
from laplace_marglik.likelihood.diagonal import (
    Bernoulli,
    DiagonalLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalLikelihood",
    "FromLogProb",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "likelihood_for",
]
