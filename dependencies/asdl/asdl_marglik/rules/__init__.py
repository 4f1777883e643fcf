"""How each operation's weights enter its output: one rule per operation, by its torch function."""

from asdl_marglik.rules.base import Call, Rule, register, rule_for
from asdl_marglik.rules.conv import Convolution
from asdl_marglik.rules.elementwise import Elementwise, Expand
from asdl_marglik.rules.embedding import Embedding
from asdl_marglik.rules.linear import Linear
from asdl_marglik.rules.norm import Normalisation

__all__ = [
    "Call",
    "Convolution",
    "Elementwise",
    "Embedding",
    "Expand",
    "Linear",
    "Normalisation",
    "Rule",
    "register",
    "rule_for",
]
