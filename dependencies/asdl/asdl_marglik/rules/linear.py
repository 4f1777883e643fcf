"""Linear maps over the last axis, with any number of shared axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from asdl_marglik.rules.base import Call, Rule, Wanted, named, register


class Linear(Rule):
    """y_t = W a_t + b:  dy/dW = sum_t g_t a_t^T,  dy/db = sum_t g_t."""

    name = "linear"

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        arguments = named("input weight bias", args, kwargs)
        weights = {
            role: arguments[role] for role in ("weight", "bias") if arguments.get(role) is not None
        }
        return Call(arguments["input"], weights)

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        return self.rows(call, role, a, g.unsqueeze(1)).squeeze(1)

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        g = g.flatten(2, -2)  # [n, K, T, O]
        if role == "bias":
            return g.sum(2)
        assert a is not None
        return g.mT @ a.flatten(1, -2).unsqueeze(1)

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        if role == "bias":
            return super().pull_rows(call, role, a, g, bar, wanted)
        assert a is not None
        a_bar = (g.flatten(2, -2) @ bar).sum(1).reshape(a.shape) if wanted[0] else None
        g_bar = (a.flatten(1, -2).unsqueeze(1) @ bar.mT).reshape(g.shape) if wanted[1] else None
        return a_bar, g_bar

    def has_factors(self, call: Call, role: str) -> bool:
        return True

    def patches(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        if role == "bias":
            return None  # constant
        return a.flatten(2, -2).unsqueeze(3) if a.dim() > 3 else a.unsqueeze(2).unsqueeze(3)

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        return g.flatten(2, -2).unsqueeze(3) if g.dim() > 3 else g.unsqueeze(2).unsqueeze(3)


class MatrixProduct(Linear):
    """y_t = a_t W, the weight on the right of a matrix product: dy/dW = sum_t a_t g_t^T."""

    name = "matmul"
    output_axis = 1

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        if (
            len(args) != 2
            or kwargs
            or args[1].dim() != 2
            or id(args[0]) in touched
            or args[0].dim() < 2
        ):
            return None
        return Call(args[0], {"weight": args[1]})

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        return super().rows(call, role, a, g).mT

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        return super().pull_rows(call, role, a, g, bar.mT, wanted)


register(Linear(), F.linear)
register(MatrixProduct(), torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
