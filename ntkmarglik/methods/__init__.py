"""Ways to learn hyperparameters while training, by name: each is an objective for weights and one for the rest."""

from collections.abc import Callable

from .augerino import Augerino
from .base import Method, Problem, Round
from .elbo import Elbo
from .laplace import Laplace
from .map import Map
from .sampled import Sampled

__all__ = ["METHODS", "Method", "Problem", "Round"]

METHODS: dict[str, Callable[[Problem], Method]] = {
    "map": Map,
    "augerino": Augerino,
    "elbo": Elbo,
    "de-elbo": Elbo,
    "ntk": Laplace,
    "full": Laplace,
    "blockdiag": Laplace,
    "kfac": Laplace,
    "diag": Laplace,
    "sampled": Sampled,
}
