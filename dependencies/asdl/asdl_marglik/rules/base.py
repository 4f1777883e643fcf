"""What a rule is.

Rules work in one format: operation inputs are brought to `[n, Q, ...]`, n data points times Q
shared repetitions (augmentation samples, flattened tokens), output cotangents to `[n, K, Q, ...]`
for K seeds, before a rule sees them. The Jacobian row of a datum and a seed is then the sum over
repetitions and positions of an outer product, elementwise product or plain sum. A rule needs only
`bind` and `row`; the others have defaults made of it, or make it faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from asdl_marglik.linalg import second_moment

# whether the cotangent of the input, and that of the output cotangent, is needed
Wanted = tuple[bool, bool]


@dataclass
class Call:
    """The arguments of one operation, sorted by meaning."""

    input: Tensor | None  # None when the rows do not depend on it
    weights: dict[str, Tensor]  # role -> tensor
    options: dict[str, Any] = field(default_factory=dict)
    axis: int = 0  # where the output has the batch, once a plan has said so


class Rule(ABC):
    """How to turn the input and the output cotangent of an operation into Jacobian rows of its
    weights.
    """

    name: str
    output_axis = 0  # of the weight of a linear map
    batch_first_only = False  # whether the operation itself fixes the batch axis at 0

    @abstractmethod
    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        """The call's arguments by meaning, or None if this form of the call is not covered."""

    @abstractmethod
    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        """Rows [n, *weight.shape] of one seed, from input a and cotangent g [n, Q, ...];
        differentiable in both.
        """

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        """Rows [n, K, *weight.shape] from input a [n, Q, ...] and cotangents g [n, K, Q, ...]."""
        if g.shape[1] == 1:
            return self.row(call, role, a, g.squeeze(1)).unsqueeze(1)
        return torch.stack([self.row(call, role, a, g_k) for g_k in g.unbind(1)], 1)

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Cotangents of a and g, as far as wanted, from that of the rows."""
        return pull_by_autograd(lambda a, g: self.rows(call, role, a, g), a, g, bar, wanted)

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

    def moment(self, call: Call, role: str, a: Tensor) -> Tensor:
        """Sum of outer products of the patches [groups, D, D]."""
        patches = self.patches(call, role, a)
        assert patches is not None
        return second_moment(patches.flatten(0, 2))

    def pull_moment(self, call: Call, role: str, a: Tensor, bar: Tensor) -> Tensor:
        """Cotangent of a from that of the moment."""
        found, _ = pull_by_autograd(
            lambda a, _: self.moment(call, role, a), a, None, bar, (True, False)
        )
        assert found is not None
        return found

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        """Kronecker output factor [n, Q, T, groups, O] of cotangents [n, Q, ...]."""
        raise TypeError(f"{self.name} has no Kronecker form for its {role}")

    def has_factors(self, call: Call, role: str) -> bool:
        """Whether `patches` and `positions` exist for this weight."""
        return False


def pull_by_autograd(
    function: Callable[[Any, Any], Tensor],
    a: Tensor | None,
    g: Tensor | None,
    bar: Tensor,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None]:
    """Cotangents of a and g, as far as wanted, from that of function(a, g)."""
    with torch.enable_grad():
        own = [
            None if t is None else t.detach().requires_grad_(w)
            for t, w in zip((a, g), wanted, strict=True)
        ]
        result = function(*own)
        if not result.requires_grad:
            return None, None
        leaves = [t for t in own if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(result, leaves, bar, allow_unused=True))
    a_bar, g_bar = (next(found) if t is not None and t.requires_grad else None for t in own)
    return a_bar, g_bar


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
