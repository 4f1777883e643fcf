"""Differentiable curvature of any torch module: kernels, dense, Kronecker or diagonal blocks."""

from asdl_marglik.lazy import public_names

__getattr__, __dir__, __all__ = public_names(__name__)
