"""Linearised Laplace by samples: for problems where neither P x P nor NC x NC matrices fit."""

from laplace_marglik.posterior.sampled.dimension import EffectiveDimension
from laplace_marglik.posterior.sampled.ladder import LadderEvidence
from laplace_marglik.posterior.sampled.posterior import SampledLaplace
from laplace_marglik.posterior.sampled.rounds import Sgd
from laplace_marglik.posterior.sampled.solve import ConjugateGradients

__all__ = ["ConjugateGradients", "EffectiveDimension", "LadderEvidence", "SampledLaplace", "Sgd"]
