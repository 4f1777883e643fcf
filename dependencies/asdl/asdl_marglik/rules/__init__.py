"""How each operation's weights enter its output: one rule per operation, found by the torch function called."""

from .base import Call, Rule, register, rule_for
from .conv import Convolution
from .elementwise import Elementwise, Expand
from .embedding import Embedding
from .linear import Linear
from .norm import Normalisation

__all__ = [
    "Call", "Convolution", "Elementwise", "Embedding", "Expand", "Linear", "Normalisation", "Rule", "register",
    "rule_for",
]  # fmt: skip
