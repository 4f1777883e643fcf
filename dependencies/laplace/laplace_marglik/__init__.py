"""Marginal likelihoods of neural networks from blocks of data, differentiable in every hyperparameter."""

from .block_gradient import evidence_by_blocks
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
from .spectrum import SpectralMarginalLikelihood, Spectrum

__all__ = [
    "Bernoulli", "Block", "Categorical", "ClassPartition", "DiagonalLikelihood", "Evidence", "FromLogProb", "Gaussian",
    "GaussianPrior", "HeteroscedasticGaussian", "Likelihood", "MarginalLikelihood", "MarglikError", "Partition",
    "Poisson", "SpectralMarginalLikelihood", "Spectrum", "evidence_by_blocks",
]  # fmt: skip
