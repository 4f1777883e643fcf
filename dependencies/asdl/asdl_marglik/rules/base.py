"""What a rule is: how one operation turns its input and output cotangents into Jacobian rows.

All rules see one format. The input of an operation is brought to `[n, Q, ...]`, n data points times
Q repetitions that share the weights (augmentation samples, flattened tokens). Its output cotangents
are brought to `[n, K, Q, ...]`, one for each of the K cotangents of the network's outputs. The
Jacobian row of a datum and a cotangent is then a sum over repetitions and positions of an outer
product, an elementwise product, or the cotangent itself.

A rule has to define `bind` and `row`. The other methods have defaults made of these two; a rule
overrides them where it knows a faster way.
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
    """The arguments of one call of an operation, sorted by meaning.

    Args:
        input: the operation's input; None where the Jacobian rows do not depend on it.
        weights: the weights among the arguments, by their role ("weight", "bias").
        options: what else the rule needs to know about the call (stride, padding, ...).
        axis: where the output has the batch, once a plan has said so.
    """

    input: Tensor | None
    weights: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    axis: int = 0


class Rule(ABC):
    """How the input and the output cotangents of an operation make Jacobian rows of its weights.

    Methods share these arguments: `call`, the arguments of the call as sorted by `bind`; `role`,
    the weight in question; `a` [n, Q, ...], the operation's input; `g` [n, K, Q, ...], the
    cotangents of its output (`[n, Q, ...]` where a method treats a single one).
    """

    name: str
    output_axis = 0  # of the weight of a linear map
    batch_first_only = False  # whether the operation itself fixes the batch axis at 0

    @abstractmethod
    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        """The call's arguments by meaning, or None if this form of the call is not covered.

        Args:
            func: the torch function that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            touched: `id` of every argument that is a weight of the model.
        """

    @abstractmethod
    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        """Rows [n, *weight.shape] of one cotangent g [n, Q, ...]; differentiable in a and g."""

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        """Rows [n, K, *weight.shape] from input a [n, Q, ...] and cotangents g [n, K, Q, ...]."""
        if g.shape[1] == 1:
            return self.row(call, role, a, g.squeeze(1)).unsqueeze(1)
        rows = [self.row(call, role, a, g_k) for g_k in g.unbind(1)]
        return torch.stack(rows, 1)

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Cotangents of a and of g from that of the rows; None for one that is not wanted.

        Args:
            call: the arguments of the call.
            role: the weight in question.
            a: the operation's input [n, Q, ...].
            g: cotangents [n, K, Q, ...] of its output.
            bar: cotangent [n, K, *weight.shape] of the rows.
            wanted: whether the cotangent of a, and that of g, is needed.
        """
        return pull_by_autograd(lambda a, g: self.rows(call, role, a, g), a, g, bar, wanted)

    def align_input(self, call: Call, axis: int, output_shape: tuple[int, ...]) -> Tensor | None:
        """The input with its batch axis where the output has it."""
        return call.input

    def patches(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        """Kronecker input factor [n, Q, T, channel groups, D]; None if constant (a bias)."""
        return None

    def mean_patch(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        """Mean of the patches over positions [n, Q, 1, channel groups, D]."""
        patches = self.patches(call, role, a)
        return None if patches is None else patches.mean(2, keepdim=True)

    def moment(self, call: Call, role: str, a: Tensor) -> Tensor:
        """Sum of outer products of the patches [channel groups, D, D]."""
        patches = self.patches(call, role, a)
        assert patches is not None
        return second_moment(patches.flatten(0, 2))

    def pull_moment(self, call: Call, role: str, a: Tensor, bar: Tensor) -> Tensor:
        """Cotangent of a from that of the moment, bar [channel groups, D, D]."""
        a_bar, _ = pull_by_autograd(
            lambda a, _: self.moment(call, role, a), a, None, bar, (True, False)
        )
        assert a_bar is not None
        return a_bar

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        """Kronecker output factor [n, Q, T, channel groups, O] of one cotangent g [n, Q, ...]."""
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
    """Cotangents of a and of g from that of function(a, g); None for one that is not wanted.

    Args:
        function: of a and g, differentiable in those that are wanted.
        a: its first argument.
        g: its second argument.
        bar: cotangent of its result, of the result's shape.
        wanted: whether the cotangent of a, and that of g, is needed.
    """
    a_wanted = a is not None and wanted[0]
    g_wanted = g is not None and wanted[1]
    with torch.enable_grad():
        a = None if a is None else a.detach().requires_grad_(a_wanted)
        g = None if g is None else g.detach().requires_grad_(g_wanted)
        result = function(a, g)
        if not result.requires_grad:
            return None, None
        leaves = [t for t in (a, g) if t is not None and t.requires_grad]
        cotangents = iter(torch.autograd.grad(result, leaves, bar, allow_unused=True))
    a_bar = next(cotangents) if a_wanted else None
    g_bar = next(cotangents) if g_wanted else None
    return a_bar, g_bar


_RULES: dict[Callable, Rule] = {}


def register(rule: Rule, *functions: Any) -> None:
    """Let a rule handle the calls of some torch functions, instead of any earlier rule.

    Args:
        rule: the rule, shared by all of these functions.
        functions: torch functions as `__torch_function__` sees them (`F.linear`, `Tensor.add`).
    """
    for function in functions:
        _RULES[function] = rule


def rule_for(function: Callable) -> Rule | None:
    """The rule of a torch function, if it has one."""
    return _RULES.get(function)


def named(signature: str, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, for torch functions that have no inspectable signature.

    Args:
        signature: names of the positional arguments in order, separated by spaces.
        args: positional arguments of a call.
        kwargs: its keyword arguments.
    """
    positional = dict(zip(signature.split(), args, strict=False))
    return positional | kwargs


def weights_among(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Those of the arguments "weight" and "bias" that are there, by role."""
    roles = ("weight", "bias")
    return {role: arguments[role] for role in roles if arguments.get(role) is not None}
