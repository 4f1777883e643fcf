"""Weights added to, multiplied with, or repeated into an activation.

Such are the scalars of Fixup networks, layer scales, position embeddings and class tokens.
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
    """y = a + s w with a sign s, or y = a w, with broadcasting.

    dy/dw is the sum of s g, or of g a, over the axes along which w was repeated.
    """

    name = "elementwise"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        if len(args) != 2 or kwargs or not all(isinstance(t, Tensor) for t in args):
            return None
        places = [i for i, t in enumerate(args) if id(t) in touched]
        if len(places) != 1:
            return None
        place = places[0]
        weight = args[place]
        if func in _MUL:
            other = args[1 - place]
            return Call(other, {"weight": weight})
        subtracted = func in _SUB and place == 1
        return Call(None, {"weight": weight}, {"sign": -1 if subtracted else 1})

    def align_input(self, call: Call, axis: int, output_shape: tuple[int, ...]) -> Tensor | None:
        return None if call.input is None else call.input.expand(output_shape)

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        shape = call.weights["weight"].shape
        scalar = shape.numel() == 1
        if a is None:
            # summed first: the sign then costs nothing
            row = _sum_to_scalar(g, shape) if scalar else _sum_to(g.sum(1), shape, call.axis)
            return row if call.options["sign"] == 1 else -row
        if scalar:
            # an inner product needs no memory for the elementwise product
            products = g.flatten(1).unsqueeze(1) @ a.flatten(1).unsqueeze(2)
            return products.reshape(len(g), *shape)
        return _sum_to((g * a).sum(1), shape, call.axis)


class Expand(Elementwise):
    """y = w repeated along the batch (a class token)."""

    name = "expand"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        weight = args[0]
        if id(weight) not in touched:
            return None
        return Call(None, {"weight": weight}, {"sign": 1})


def _sum_to_scalar(g: Tensor, shape: torch.Size) -> Tensor:
    """Per datum, the sum of g [n, ...], in the shape of a tensor with one entry."""
    return g.flatten(1).sum(1).reshape(-1, *shape)


def _sum_to(g: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Per datum, g [n, ...] summed over the axes along which a tensor of `shape` was repeated.

    Args:
        g: [n, *axes of the operation's output except the batch axis].
        shape: of the weight.
        axis: the batch axis of the operation's output.
    """
    aligned = [1] * (g.dim() - len(shape)) + list(shape)  # one size per axis of the output
    aligned.pop(axis)
    repeated = [i for i, size in enumerate(aligned, 1) if size == 1 and g.shape[i] != 1]
    total = g.sum(repeated) if repeated else g
    return total.reshape(len(g), *shape)


register(Elementwise(), *_ADD, *_SUB, *_MUL)
register(Expand(), Tensor.expand)
