"""Differentiable marginal likelihoods of neural networks from blocks of data."""

from asdl_marglik import Ranks, RanksError
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.by_blocks import evidence_by_blocks
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood
from laplace_marglik.evidence.spectrum import SpectralMarginalLikelihood, Spectrum
from laplace_marglik.inducing import InducingPartition
from laplace_marglik.learner import EvidenceLearner
from laplace_marglik.likelihood import (
    Bernoulli,
    Categorical,
    DiagonalLikelihood,
    FromLogProb,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NextToken,
    Poisson,
)
from laplace_marglik.partition import Block, ClassPartition, Partition
from laplace_marglik.posterior.clml import ConditionalScore, clml
from laplace_marglik.posterior.diagonal import DiagonalLaplace
from laplace_marglik.posterior.laplace import LaplacePosterior
from laplace_marglik.posterior.sampled import SampledLaplace
from laplace_marglik.prior import GaussianPrior
from laplace_marglik.variational.covariance import LowRankCovariance
from laplace_marglik.variational.elbo import Bounds, DataEmphasizedELBO
from laplace_marglik.variational.gaussian import FixedPosterior, Posterior

__all__ = [
    "Bernoulli",
    "Block",
    "Bounds",
    "Categorical",
    "ClassPartition",
    "ConditionalScore",
    "DataEmphasizedELBO",
    "DiagonalLaplace",
    "DiagonalLikelihood",
    "Evidence",
    "EvidenceLearner",
    "FixedPosterior",
    "FromLogProb",
    "Gaussian",
    "GaussianPrior",
    "HeteroscedasticGaussian",
    "InducingPartition",
    "LaplacePosterior",
    "Likelihood",
    "LowRankCovariance",
    "MarginalLikelihood",
    "MarglikError",
    "NextToken",
    "Partition",
    "Poisson",
    "Posterior",
    "Ranks",
    "RanksError",
    "SampledLaplace",
    "SpectralMarginalLikelihood",
    "Spectrum",
    "clml",
    "evidence_by_blocks",
]
