"""Ways to learn hyperparameters while training, by name: each is an objective for weights and one
for the rest.
"""

from collections.abc import Callable

from ntkmarglik.learn.methods.augerino import Augerino
from ntkmarglik.learn.methods.base import Method, Problem, Round
from ntkmarglik.learn.methods.elbo import Elbo
from ntkmarglik.learn.methods.laplace import Laplace
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.methods.sampled import Sampled

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
