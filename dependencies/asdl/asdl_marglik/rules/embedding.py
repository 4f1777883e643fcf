"""Embedding tables."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from asdl_marglik.rules.base import Call, Rule, named, register


class Embedding(Rule):
    """y_t = W[token_t]:  dy/dW adds up g_t in the row of its token."""

    name = "embedding"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        signature = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
        arguments = named(signature, args, kwargs)
        if arguments.get("max_norm") is not None or arguments.get("scale_grad_by_freq"):
            return None
        weight = arguments["weight"]
        padding = arguments.get("padding_idx")
        if padding is not None and padding < 0:
            padding += len(weight)
        return Call(arguments["input"], {"weight": weight}, {"padding": padding})

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        assert a is not None
        tokens = a.flatten(1)  # [n, T]
        g = g.flatten(1, -2)  # [n, T, D]
        padding = call.options["padding"]
        if padding is not None:  # autograd keeps this entry of the table constant
            g = g * (tokens != padding).unsqueeze(-1)
        rows = g.new_zeros(len(g), *call.weights["weight"].shape)
        return rows.scatter_add(1, tokens.unsqueeze(-1).expand_as(g), g)


register(Embedding(), F.embedding)
