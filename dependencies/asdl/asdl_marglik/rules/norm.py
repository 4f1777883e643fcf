"""Affine parameters of normalisation layers.

The scale multiplies the normalised input, the shift is added to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from asdl_marglik.rules.base import Call, Rule, named, register, weights_among
from asdl_marglik.watch.differentiable import substitute

_SIGNATURES = {
    F.layer_norm: "input normalized_shape weight bias eps",
    F.rms_norm: "input normalized_shape weight eps",
    F.group_norm: "input num_groups weight bias eps",
    F.batch_norm: "input running_mean running_var weight bias training momentum eps",
    F.instance_norm: "input running_mean running_var weight bias use_input_stats momentum eps",
}
_OVER_LAST_AXES = (F.layer_norm, F.rms_norm)


class Normalisation(Rule):
    """y = w norm(a) + b:  dy/dw = sum g norm(a),  dy/db = sum g, over axes that w does not have."""

    name = "normalisation"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        arguments = named(_SIGNATURES[func], args, kwargs)
        if func is F.batch_norm and arguments.get("training"):
            return None  # mixes the data points of a batch: there is no per-datum Jacobian
        weights = weights_among(arguments)
        settings = {
            name: value
            for name, value in arguments.items()
            if name != "input" and name not in weights
        }
        return Call(arguments["input"], weights, {"func": func, "arguments": settings})

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        func = call.options["func"]
        if role == "weight":
            assert a is not None
            g = g * _normalised(call, a)
        if func in _OVER_LAST_AXES:
            shape = call.weights[role].shape
            return g.reshape(len(g), -1, *shape).sum(1)
        return g.reshape(*g.shape[:3], -1).sum((1, 3))  # [n, Q, channels, positions]


def _normalised(call: Call, a: Tensor) -> Tensor:
    """norm(a) of a [n, Q, ...], without scale and shift."""
    func = call.options["func"]
    batch = a if func in _OVER_LAST_AXES else a.flatten(0, 1)
    y = substitute(func)(batch, weight=None, **call.options["arguments"])
    return y.reshape(a.shape)


register(Normalisation(), *_SIGNATURES)
