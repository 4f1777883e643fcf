"""Weights added to, multiplied with, or repeated into an activation: Fixup scalars, layer scales,
positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asdl_marglik.rules.base import Call, Rule, register

_ADD = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_SUB = {torch.sub, Tensor.sub, Tensor.__sub__}
_MUL = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__}


class Elementwise(Rule):
    """y = a + s w or y = a w, with broadcasting: dy/dw sums s g or g a over the axes along which w
    was repeated.
    """

    name = "elementwise"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        if len(args) != 2 or kwargs or not all(isinstance(t, Tensor) for t in args):
            return None
        owners = [i for i, t in enumerate(args) if id(t) in touched]
        if len(owners) != 1:
            return None
        weight, other = args[owners[0]], args[1 - owners[0]]
        if func in _MUL:
            return Call(other, {"weight": weight})
        return Call(
            None, {"weight": weight}, {"sign": -1 if func in _SUB and owners[0] == 1 else 1}
        )

    def align_input(self, call: Call, axis: int, output_shape: tuple[int, ...]) -> Tensor | None:
        return None if call.input is None else call.input.expand(output_shape)

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        # an inner product: no need for the product itself
        if a is not None and call.weights["weight"].numel() == 1:
            rows = g.flatten(1).unsqueeze(1) @ a.flatten(1).unsqueeze(2)
            return rows.reshape(len(g), *call.weights["weight"].shape)
        shape = call.weights["weight"].shape
        if a is None:  # summed first: the sign then costs nothing
            summed = (
                g.flatten(1).sum(1).reshape(-1, *shape)
                if shape.numel() == 1
                else _sum_to(g.sum(1), shape, call.axis)
            )
            return summed if call.options["sign"] == 1 else -summed
        return _sum_to((g * a).sum(1), shape, call.axis)


class Expand(Elementwise):
    """y = w repeated along the batch (a class token)."""

    name = "expand"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        return Call(None, {"weight": args[0]}, {"sign": 1}) if id(args[0]) in touched else None


def _sum_to(g: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Per datum, sum g [n, *output axes but `axis`] over the axes along which a tensor of `shape`
    was repeated.
    """
    full = [1] * (g.dim() - len(shape)) + list(shape)  # the weight's shape among the output's axes
    full.pop(axis)
    repeated = [i + 1 for i, size in enumerate(full) if size == 1 and g.shape[i + 1] != 1]
    return (g.sum(repeated) if repeated else g).reshape(len(g), *shape)


register(Elementwise(), *_ADD, *_SUB, *_MUL)
register(Expand(), Tensor.expand)
