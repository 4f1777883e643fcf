"""Linearised Laplace by samples: for problems where neither P x P nor NC x NC matrices fit."""

from .dimension import EffectiveDimension
from .ladder import LadderEvidence
from .posterior import SampledLaplace
from .solve import ConjugateGradients, Sgd

__all__ = ["ConjugateGradients", "EffectiveDimension", "LadderEvidence", "SampledLaplace", "Sgd"]
