"""Convolutions of one, two and three dimensions, plain and transposed, with stride, padding, dilation and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Call, Rule, named, register

_DIMENSIONS = {
    F.conv1d: 1, F.conv2d: 2, F.conv3d: 3, F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3,
}  # fmt: skip
_TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


class Convolution(Rule):
    """y = W * a + b, a linear map over patches: dy/dW = sum_t g_t patch_t(a)^T,  dy/db = sum_t g_t."""

    name = "convolution"
    batch_first_only = True

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        transposed, d = func in _TRANSPOSED, _DIMENSIONS[func]
        signature = "input weight bias stride padding output_padding groups dilation"
        arguments = named(signature if transposed else "input weight bias stride padding dilation groups", args, kwargs)
        inputs, weight = arguments["input"], arguments["weight"]
        if inputs.dim() != d + 2:
            return None  # unbatched
        dilation = _tuple(arguments.get("dilation", 1), d)
        padding = arguments.get("padding", 0)
        if padding == "valid":
            padding = 0
        elif padding == "same":  # may be asymmetric: pad by hand
            total = [dl * (k - 1) for dl, k in zip(dilation, weight.shape[2:], strict=True)]
            inputs = F.pad(inputs, [p for t in reversed(total) for p in (t // 2, t - t // 2)])
            padding = 0
        options = {
            "stride": _tuple(arguments.get("stride", 1), d),
            "padding": _tuple(padding, d),
            "dilation": dilation,
            "transposed": transposed,
            "output_padding": _tuple(arguments.get("output_padding", 0), d),
            "groups": arguments.get("groups", 1),
        }
        weights = {role: arguments[role] for role in ("weight", "bias") if arguments.get(role) is not None}
        return Call(inputs, weights, options)

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        if role == "bias":
            return g.flatten(3).sum((1, 3))
        assert a is not None
        if self._better_by_patches(call, g):
            patches = self.patches(call, role, a)  # [n, Q, T, 1, D]
            assert patches is not None
            return (g.flatten(3).movedim(1, 2).flatten(2) @ patches.flatten(1, 3)).unflatten(
                2, call.weights[role].shape[1:]
            )
        return PerSampleWeightGradient.apply(a, g, call.weights["weight"].shape, call.options)

    def _better_by_patches(self, call: Call, g: Tensor) -> bool:
        """Whether matrix products over patches beat a convolution with n times the groups (measured on CPUs)."""
        plain = len(call.options["stride"]) == 2 and call.options["groups"] == 1 and not call.options["transposed"]
        positions, channels = g.shape[3:].numel(), max(call.weights["weight"].shape[:2])
        return plain and (positions < 64 or channels >= 256)

    def has_factors(self, call: Call, role: str) -> bool:
        return role == "bias" or not call.options["transposed"]

    def patches(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        if role == "bias":
            return None  # constant
        options, weight = call.options, call.weights["weight"]
        n, q, channels, *sides = a.shape
        d, groups = len(sides), options["groups"]
        if d == 2:  # torch has a kernel for this case
            geometry = {key: options[key] for key in ("dilation", "padding", "stride")}
            unfolded = F.unfold(a.flatten(0, 1), weight.shape[2:], **geometry)  # [n Q, channels k k, T]
            return unfolded.view(n, q, groups, -1, unfolded.shape[2]).permute(0, 1, 4, 2, 3)
        a = F.pad(a, [p for pad in reversed(options["padding"]) for p in (pad, pad)])
        for axis, (k, stride, dilation) in enumerate(
            zip(weight.shape[2:], options["stride"], options["dilation"], strict=True)
        ):
            a = a.unfold(3 + axis, dilation * (k - 1) + 1, stride)[..., ::dilation]
        positions = a.shape[3 : 3 + d].numel()
        a = a.reshape(n, q, groups, channels // groups, positions, -1)
        return a.permute(0, 1, 4, 2, 3, 5).flatten(4)

    def mean_patch(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        """Without forming patches: along each side, a 0-1 matrix sums the entries that meet a kernel offset."""
        if role == "bias":
            return None
        options, kernel = call.options, call.weights["weight"].shape[2:]
        total = 1
        for axis in range(len(kernel)):
            side = a.shape[3]
            meets = _meetings(side, kernel[axis], *(options[o][axis] for o in ("stride", "padding", "dilation")))
            total *= meets.shape[0]
            # sum over this side, its kernel offsets become the last axis
            a = a.movedim(3, -1) @ meets.sum(0).to(a)
        return (a / total).flatten(2).unflatten(2, (options["groups"], -1)).unsqueeze(2)

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        g = g.flatten(3).movedim(3, 2)  # [n, Q, T, O]
        return g.unflatten(3, (call.options["groups"] if role == "weight" else 1, -1))


class PerSampleWeightGradient(torch.autograd.Function):
    """Weight gradient of each datum, summed over its repetitions: one convolution with n times the groups.

    Bilinear in (a, g), so both cotangents are again grouped convolutions, with the row cotangents as weights.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, g: Tensor, shape: torch.Size, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(a, g)
        ctx.shape, ctx.options = shape, options
        n = len(a)
        weight = g.new_empty(1).expand(n * shape[0], *shape[1:])  # only its shape is read
        rows = _convolution_backward(_fold(g), _fold(a), weight, n, options, [False, True, False])[1]
        return rows.reshape(n, *shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        a, g = ctx.saved_tensors
        n, options = len(a), ctx.options
        v = cotangents[0].flatten(0, 1)
        a_bar = g_bar = None
        if ctx.needs_input_grad[0]:
            a_bar = _convolution_backward(_fold(g), _fold(a), v, n, options, [True, False, False])[0]
            a_bar = _unfold(a_bar, a.shape)
        if ctx.needs_input_grad[1]:
            g_bar = torch.convolution(
                _fold(a), v, None, options["stride"], options["padding"], options["dilation"],
                options["transposed"], options["output_padding"], n * options["groups"],
            )  # fmt: skip
            g_bar = _unfold(g_bar, g.shape)
        return a_bar, g_bar, None, None


def _convolution_backward(
    g: Tensor, a: Tensor, weight: Tensor, n: int, options: dict[str, Any], mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.convolution_backward(
        g, a, weight, None, options["stride"], options["padding"], options["dilation"],
        options["transposed"], options["output_padding"], n * options["groups"], mask,
    )  # fmt: skip


def _fold(t: Tensor) -> Tensor:
    """[n, Q, c, ...] -> [Q, n c, ...]: data points become groups, repetitions the batch that is summed over."""
    return t.transpose(0, 1).flatten(1, 2)


def _unfold(t: Tensor, shape: torch.Size) -> Tensor:
    return t.unflatten(1, (shape[0], shape[2])).transpose(0, 1)


def _meetings(side: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Whether, at an output position, a kernel offset meets an input entry: [positions, side, kernel]."""
    positions = (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    entry = stride * torch.arange(positions)[:, None] - padding + dilation * torch.arange(kernel)  # [positions, kernel]
    return torch.arange(side)[None, :, None] == entry[:, None, :]


def _tuple(value: int | tuple[int, ...] | list[int], d: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * d if len(values) == 1 else values


for _function in _DIMENSIONS:
    register(Convolution(), _function)
