"""Linear maps over the last axis, with any number of shared axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from asdl_marglik.rules.base import Call, Rule, Wanted, named, register, weights_among


class Linear(Rule):
    """y_t = W a_t + b:  dy/dW = sum_t g_t a_t^T,  dy/db = sum_t g_t."""

    name = "linear"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        arguments = named("input weight bias", args, kwargs)
        return Call(arguments["input"], weights_among(arguments))

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        return self.rows(call, role, a, g.unsqueeze(1)).squeeze(1)

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        g = g.flatten(2, -2)  # [n, K, T, O]
        if role == "bias":
            return g.sum(2)
        assert a is not None
        a = a.flatten(1, -2)  # [n, T, D]
        return g.mT @ a.unsqueeze(1)

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        if role == "bias":
            return super().pull_rows(call, role, a, g, bar, wanted)
        assert a is not None
        a_bar = g_bar = None
        if wanted[0]:
            per_cotangent = g.flatten(2, -2) @ bar  # [n, K, T, D]
            a_bar = per_cotangent.sum(1).reshape(a.shape)
        if wanted[1]:
            g_bar = a.flatten(1, -2).unsqueeze(1) @ bar.mT  # [n, K, T, O]
            g_bar = g_bar.reshape(g.shape)
        return a_bar, g_bar

    def has_factors(self, call: Call, role: str) -> bool:
        return True

    def patches(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        return None if role == "bias" else _with_positions(a)

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        return _with_positions(g)


class MatrixProduct(Linear):
    """y_t = a_t W, the weight on the right of a matrix product: dy/dW = sum_t a_t g_t^T."""

    name = "matmul"
    output_axis = 1

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        if len(args) != 2 or kwargs:
            return None
        left, right = args
        if right.dim() != 2 or left.dim() < 2 or id(left) in touched:
            return None
        return Call(left, {"weight": right})

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        return super().rows(call, role, a, g).mT

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        return super().pull_rows(call, role, a, g, bar.mT, wanted)


class SumAndProduct(MatrixProduct):
    """y_t = b + a_t W, as `torch.addmm` and the linear maps of GPT-2 have it."""

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        arguments = named("input mat1 mat2", args, kwargs)
        scaled = any(arguments.get(name, 1) != 1 for name in ("alpha", "beta"))
        bias, a = arguments["input"], arguments["mat1"]
        if scaled or bias.dim() != 1 or id(a) in touched:
            return None
        return Call(a, {"weight": arguments["mat2"], "bias": bias})

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        if role == "bias":
            return Linear.rows(self, call, role, a, g)
        return super().rows(call, role, a, g)

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        if role == "bias":
            return Linear.pull_rows(self, call, role, a, g, bar, wanted)
        return super().pull_rows(call, role, a, g, bar, wanted)


def _with_positions(t: Tensor) -> Tensor:
    """[n, Q, ..., D] -> [n, Q, T, 1, D]: all axes in the middle are positions, or there is one."""
    t = t.flatten(2, -2) if t.dim() > 3 else t.unsqueeze(2)
    return t.unsqueeze(3)


register(Linear(), F.linear)
register(SumAndProduct(), torch.addmm, Tensor.addmm)
register(MatrixProduct(), torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
