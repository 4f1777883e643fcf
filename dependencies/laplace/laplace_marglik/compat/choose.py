"""`Laplace(...)`: the class for a structure and a subset of the weights, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from laplace_marglik.compat.predictions import ParametricLaplace
from laplace_marglik.compat.structures import (
    BlockDiagLaplace,
    DiagLaplace,
    FullLaplace,
    KronLaplace,
    NTKLaplace,
)
from laplace_marglik.errors import MarglikError

CLASSES: dict[str, type[ParametricLaplace]] = {
    "full": FullLaplace,
    "kron": KronLaplace,
    "diag": DiagLaplace,
    "ntk": NTKLaplace,
    "blockdiag": BlockDiagLaplace,
}
# of laplace-torch but not here, each with what is
REFUSED = {
    "lowrank": "low-rank curvature is not offered; use hessian_structure='ntk', which is exact, "
    "with inducing= rows for large data",
    "gp": "function-space posteriors are hessian_structure='ntk' here, with inducing= rows in "
    "place of n_subset",
}


def Laplace(
    model: nn.Module,
    likelihood: Any,
    subset_of_weights: str | Sequence[str] = "last_layer",
    hessian_structure: str = "kron",
    *args: Any,
    **kwargs: Any,
) -> ParametricLaplace:
    """A Laplace approximation by the names of its parts.

    Args:
        model: the trained network.
        likelihood: "classification", "regression", or a `Likelihood` of this library.
        subset_of_weights: "last_layer", "all", or name patterns such as ["head.*"].
        hessian_structure: "kron", "full", "diag"; and of this library "ntk" and "blockdiag".
        args: further arguments of the class.
        kwargs: further arguments of the class, by name.
    """
    structure = str(getattr(hessian_structure, "value", hessian_structure))
    if kwargs.pop("functional_approximation", "sod") not in ("sod", None):
        raise MarglikError(
            "ELLA and VaLLA are not offered; use hessian_structure='ntk' with inducing= rows, "
            "whose variances are exact or conservative"
        )
    if structure in REFUSED:
        raise MarglikError(REFUSED[structure])
    if structure not in CLASSES:
        raise MarglikError(
            f"hessian_structure must be one of {', '.join(CLASSES)}, got {hessian_structure!r}"
        )
    subset: Any = getattr(subset_of_weights, "value", subset_of_weights)
    if subset == "subnetwork" or "subnetwork_indices" in kwargs:
        raise MarglikError(
            "subnetworks by index are not offered; name whole tensors by patterns, "
            "subset_of_weights=['layer4.*', 'head.*']"
        )
    if isinstance(subset, str) and subset not in ("all", "last_layer"):
        raise MarglikError(
            "subset_of_weights must be 'all', 'last_layer' or a list of name patterns, got "
            f"{subset!r}"
        )
    return CLASSES[structure](model, likelihood, *args, subset_of_weights=subset, **kwargs)
