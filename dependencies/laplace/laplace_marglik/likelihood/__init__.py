"""Likelihoods: the distribution of targets given outputs, and roots of its curvature."""

from laplace_marglik.likelihood.base import FromLogProb, Likelihood
from laplace_marglik.likelihood.categorical import Categorical, NextToken
from laplace_marglik.likelihood.diagonal import (
    Bernoulli,
    DiagonalLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
)
from laplace_marglik.likelihood.named import likelihood_for

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalLikelihood",
    "FromLogProb",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "NextToken",
    "Poisson",
    "likelihood_for",
]
