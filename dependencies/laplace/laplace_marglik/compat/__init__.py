"""The interface of laplace-torch 0.3 on this library: change the import line of a script.

Names, arguments, defaults, shapes and return values are those of laplace-torch. Different are:
gradients of the evidence in the noise are complete for Kronecker factors too; a temperature divides
the whole log-likelihood, its normaliser included; the model's mode is restored; every layer and
likelihood of this library works, and so do `hessian_structure="ntk"` and `"blockdiag"`.
"""

from laplace_marglik.compat.choose import Laplace
from laplace_marglik.compat.predictions import ParametricLaplace
from laplace_marglik.compat.structures import (
    BlockDiagLaplace,
    DiagLaplace,
    FullLaplace,
    KronLaplace,
    NTKLaplace,
)
from laplace_marglik.compat.training import marglik_training

__all__ = [
    "BlockDiagLaplace",
    "DiagLaplace",
    "FullLaplace",
    "KronLaplace",
    "Laplace",
    "NTKLaplace",
    "ParametricLaplace",
    "marglik_training",
]
