"""Ways to learn hyperparameters while training, by name: each is an objective for weights and one
for the rest.
"""

from ntkmarglik.learn.methods.augerino import Augerino
from ntkmarglik.learn.methods.base import Learned, Method, Problem
from ntkmarglik.learn.methods.elbo import DataEmphasisedElbo, Elbo
from ntkmarglik.learn.methods.laplace import ConditionedNtk
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.methods.registry import METHODS, register_method
from ntkmarglik.learn.methods.sampled import Sampled

__all__ = ["METHODS", "Learned", "Method", "Problem", "register_method"]

register_method(Map)
register_method(Augerino)
register_method(Elbo)
register_method(DataEmphasisedElbo)
register_method(Sampled)
register_method(ConditionedNtk)
