"""Marginal likelihoods of neural networks from blocks of data, differentiable in every hyperparameter."""

from .errors import MarglikError
from .evidence import Evidence
from .likelihood import (
    Bernoulli,
    Categorical,
    DiagonalLikelihood,
    FromLogProb,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)  # fmt: skip
from .marglik import MarginalLikelihood
from .partition import Block, ClassPartition, Partition
from .prior import GaussianPrior

__all__ = [
    "Bernoulli", "Block", "Categorical", "ClassPartition", "DiagonalLikelihood", "Evidence", "FromLogProb", "Gaussian",
    "GaussianPrior", "HeteroscedasticGaussian", "Likelihood", "MarginalLikelihood", "MarglikError", "Partition",
    "Poisson",
]  # fmt: skip
