"""Likelihoods by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood.base import FromLogProb, Likelihood
from laplace_marglik.likelihood.categorical import Categorical
from laplace_marglik.likelihood.diagonal import Gaussian


def likelihood_for(spec: str | Likelihood | Callable[[Tensor, Tensor], Tensor]) -> Likelihood:
    """A likelihood from its name or from a function; a likelihood stays as it is.

    Args:
        spec: "classification", "regression", a `Likelihood`, or a function log_prob(f, y) -> [n].
    """
    if isinstance(spec, Likelihood):
        return spec
    if spec == "classification":
        return Categorical()
    if spec == "regression":
        return Gaussian()
    if callable(spec):
        return FromLogProb(spec)
    raise MarglikError(
        "likelihood must be 'classification', 'regression', a Likelihood or a function "
        f"log_prob(f, y), got {spec!r}"
    )
