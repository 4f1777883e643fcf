"""Differentiable marginal likelihoods of neural networks from blocks of data."""

from asdl_marglik.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
