"""Marginal likelihoods of neural networks from blocks of data, differentiable in every hyperparameter."""

from asdl_marglik import Ranks, RanksError

from .block_gradient import evidence_by_blocks
from .clml import ConditionalScore, clml
from .covariance import LowRankCovariance
from .diagonal import DiagonalLaplace
from .elbo import Bounds, DataEmphasizedELBO
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
from .posterior import FixedPosterior, Posterior
from .prior import GaussianPrior
from .sampled import SampledLaplace
from .spectrum import SpectralMarginalLikelihood, Spectrum

__all__ = [
    "Bernoulli", "Block", "Bounds", "Categorical", "ClassPartition", "ConditionalScore", "DataEmphasizedELBO",
    "DiagonalLaplace", "DiagonalLikelihood", "Evidence", "FixedPosterior", "FromLogProb", "Gaussian", "GaussianPrior",
    "HeteroscedasticGaussian", "Likelihood", "LowRankCovariance", "MarginalLikelihood", "MarglikError", "Partition",
    "Poisson", "Posterior", "Ranks", "RanksError", "SampledLaplace", "SpectralMarginalLikelihood", "Spectrum", "clml",
    "evidence_by_blocks",
]  # fmt: skip
