"""Likelihoods by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood.base import FromLogProb, Likelihood
from laplace_marglik.likelihood.categorical import Categorical, NextToken
from laplace_marglik.likelihood.diagonal import Gaussian

NAMED: dict[str, Callable[[], Likelihood]] = {
    "classification": Categorical,
    "token-classification": lambda: Categorical(class_axis=-1),
    "language-model": NextToken,
    "regression": Gaussian,
}


def likelihood_for(spec: str | Likelihood | Callable[[Tensor, Tensor], Tensor]) -> Likelihood:
    """A likelihood from its name or from a function; a likelihood stays as it is.

    Args:
        spec: "classification", "token-classification" (classes on the last axis), "language-model"
            (`NextToken`), "regression", a `Likelihood`, or a function log_prob(f, y) -> [n].
    """
    if isinstance(spec, Likelihood):
        return spec
    if isinstance(spec, str) and spec in NAMED:
        return NAMED[spec]()
    if callable(spec):
        return FromLogProb(spec)
    raise MarglikError(
        f"likelihood must be {', '.join(map(repr, NAMED))}, a Likelihood or a function "
        f"log_prob(f, y), got {spec!r}"
    )
