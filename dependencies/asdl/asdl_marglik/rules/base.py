"""What a rule is.

Rules work in one format: operation inputs and output cotangents are brought to `[n, Q, ...]`, n data points times Q
shared repetitions (augmentation samples, flattened tokens), before a rule sees them. The Jacobian row of datum i is
then the sum over repetitions and positions of an outer product, elementwise product or plain sum, which `rows` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Call:
    """The arguments of one operation, sorted by meaning."""

    input: Tensor | None  # None when the rows do not depend on it
    weights: dict[str, Tensor]  # role -> tensor
    options: dict[str, Any] = field(default_factory=dict)


class Rule(ABC):
    """How to turn the input and the output cotangent of an operation into Jacobian rows of its weights."""

    name: str
    batch_first_only = False  # whether the operation itself fixes the batch axis at 0

    @abstractmethod
    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        """The call's arguments by meaning, or None if this form of the call is not covered."""

    @abstractmethod
    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        """Rows [n, *weight.shape] from input a and output cotangent g, both [n, Q, ...]; differentiable in both."""

    def align_input(self, call: Call, axis: int, output_shape: tuple[int, ...]) -> Tensor | None:
        """The input with its batch axis where the output has it."""
        return call.input

    def patches(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        """Kronecker input factor [n, Q, T, groups, D]; None where it is constant (a bias)."""
        return None

    def mean_patch(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        """Mean of the patches over positions [n, Q, 1, groups, D]."""
        patches = self.patches(call, role, a)
        return None if patches is None else patches.mean(2, keepdim=True)

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        """Kronecker output factor [n, Q, T, groups, O]."""
        raise TypeError(f"{self.name} has no Kronecker form for its {role}")

    def has_factors(self, call: Call, role: str) -> bool:
        """Whether `patches` and `positions` exist for this weight."""
        return False


_RULES: dict[Callable, Rule] = {}


def register(rule: Rule, *functions: Any) -> None:
    """Let `rule` handle calls of the given torch functions."""
    for function in functions:
        _RULES[function] = rule


def rule_for(function: Callable) -> Rule | None:
    return _RULES.get(function)


def named(signature: str, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, for torch functions that have no inspectable signature."""
    return dict(zip(signature.split(), args, strict=False)) | kwargs
