"""Convolutions of one, two and three dimensions, plain and transposed, with stride, padding,
dilation and groups.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asdl_marglik.linalg import gram_of
from asdl_marglik.rules.base import Call, Rule, Wanted, named, register

_DIMENSIONS = {
    F.conv1d: 1,
    F.conv2d: 2,
    F.conv3d: 3,
    F.conv_transpose1d: 1,
    F.conv_transpose2d: 2,
    F.conv_transpose3d: 3,
}
_TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


class Convolution(Rule):
    """y = W * a + b, a linear map over patches: dy/dW = sum_t g_t patch_t(a)^T,  dy/db = sum_t
    g_t.
    """

    name = "convolution"
    batch_first_only = True

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        transposed, d = func in _TRANSPOSED, _DIMENSIONS[func]
        signature = "input weight bias stride padding output_padding groups dilation"
        arguments = named(
            signature if transposed else "input weight bias stride padding dilation groups",
            args,
            kwargs,
        )
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
        weights = {
            role: arguments[role] for role in ("weight", "bias") if arguments.get(role) is not None
        }
        return Call(inputs, weights, options)

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        return self.rows(call, role, a, g.unsqueeze(1)).squeeze(1)

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        if role == "bias":
            return g.flatten(4).sum((2, 4))
        assert a is not None
        if g.shape[1] > 1 and not self._seeds_as_channels(call):
            return torch.stack([self.row(call, role, a, g_k) for g_k in g.unbind(1)], 1)
        shape = (*g.shape[:2], *call.weights[role].shape)
        if self._better_by_patches(call, g):
            return (_by_output(g) @ _unfolded(call, a).mT).reshape(shape)
        like = g.new_empty(1).expand(shape).flatten(0, 2)  # only its shape is read
        return _convolution_backward(call, g, a, like, [False, True, False])[1].reshape(shape)

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Rows are bilinear in a and g: both cotangents are operations of the same kind, with `bar`
        as weights.
        """
        if role == "bias":
            return None, bar.unsqueeze(2).unflatten(3, (-1, *[1] * (g.dim() - 4))).expand_as(g)
        assert a is not None
        if g.shape[1] > 1 and not self._seeds_as_channels(call):
            each = [
                self.pull_rows(call, role, a, g[:, k, None], bar[:, k, None], wanted)
                for k in range(g.shape[1])
            ]
            a_bars, g_bars = (
                [t for t in found if t is not None] for found in zip(*each, strict=True)
            )
            return (sum(a_bars[1:], a_bars[0]) if a_bars else None), (
                torch.cat(g_bars, 1) if g_bars else None
            )
        a_bar = g_bar = None
        if self._better_by_patches(call, g):
            v = bar.reshape(len(a), -1, bar.shape[3:].numel())  # [n, K O, D]
            if wanted[0]:
                a_bar = _folded(call, v.mT @ _by_output(g), a)
            if wanted[1]:
                g_bar = (
                    (v @ _unfolded(call, a))
                    .unflatten(1, (g.shape[1], -1))
                    .unflatten(3, (g.shape[2], *g.shape[4:]))
                )
                g_bar = g_bar.movedim(2, 3)
            return a_bar, g_bar
        v = bar.flatten(0, 2)
        if wanted[0]:
            whole = _convolution_backward(call, g, a, v, [True, False, False])[0]
            a_bar = whole.unflatten(1, (len(a), -1)).transpose(0, 1)
        if wanted[1]:
            o = call.options
            whole = torch.convolution(
                _by_datum(a),
                v,
                None,
                o["stride"],
                o["padding"],
                o["dilation"],
                o["transposed"],
                o["output_padding"],
                len(a) * o["groups"],
            )
            g_bar = whole.unflatten(1, (*g.shape[:2], -1)).movedim(0, 2)
        return a_bar, g_bar

    def _seeds_as_channels(self, call: Call) -> bool:
        """Whether the seeds of a datum can be taken as further output channels."""
        return call.options["groups"] == 1 and not call.options["transposed"]

    def _better_by_patches(self, call: Call, g: Tensor) -> bool:
        """Whether matrix products over patches beat a convolution with n times the groups (measured
        on CPUs).
        """
        plain = len(call.options["stride"]) == 2 and self._seeds_as_channels(call)
        positions, channels = g.shape[4:].numel(), max(call.weights["weight"].shape[:2])
        return plain and (positions < 64 or channels >= 256)

    def moment(self, call: Call, role: str, a: Tensor) -> Tensor:
        if call.options["groups"] > 1:
            return super().moment(call, role, a)
        return gram_of(_by_feature(call, a)).unsqueeze(0)

    def pull_moment(self, call: Call, role: str, a: Tensor, bar: Tensor) -> Tensor:
        if call.options["groups"] > 1:
            return super().pull_moment(call, role, a, bar)
        return _from_feature(call, (bar[0] + bar[0].mT) @ _by_feature(call, a), a)

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
            # [n Q, channels k k, T]
            unfolded = F.unfold(a.flatten(0, 1), weight.shape[2:], **geometry)
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
        """Without forming patches: along each side, a 0-1 matrix sums the entries that meet a
        kernel offset.
        """
        if role == "bias":
            return None
        options, kernel = call.options, call.weights["weight"].shape[2:]
        total = 1
        for axis in range(len(kernel)):
            side = a.shape[3]
            meets = _meetings(
                side, kernel[axis], *(options[o][axis] for o in ("stride", "padding", "dilation"))
            )
            total *= meets.shape[0]
            # sum over this side, its kernel offsets become the last axis
            a = a.movedim(3, -1) @ meets.sum(0).to(a)
        return (a / total).flatten(2).unflatten(2, (options["groups"], -1)).unsqueeze(2)

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        g = g.flatten(3).movedim(3, 2)  # [n, Q, T, O]
        return g.unflatten(3, (call.options["groups"] if role == "weight" else 1, -1))


def _convolution_backward(
    call: Call, g: Tensor, a: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, ...]:
    """Of one convolution with n times the groups; repetitions are its batch, which weight gradients
    are summed over.
    """
    o = call.options
    return torch.ops.aten.convolution_backward(
        _by_datum(g.movedim(2, 1).flatten(2, 3)),
        _by_datum(a),
        weight,
        None,
        o["stride"],
        o["padding"],
        o["dilation"],
        o["transposed"],
        o["output_padding"],
        len(a) * o["groups"],
        mask,
    )


def _by_datum(t: Tensor) -> Tensor:
    """[n, Q, c, ...] -> [Q, n c, ...]: data points become groups."""
    return t.transpose(0, 1).flatten(1, 2)


def _by_output(g: Tensor) -> Tensor:
    """[n, K, Q, O, ...] -> [n, K O, Q T]."""
    return g.movedim(2, 3).flatten(3).flatten(1, 2)


def _geometry(call: Call) -> dict[str, Any]:
    return {key: call.options[key] for key in ("dilation", "padding", "stride")}


def _unfolded(call: Call, a: Tensor) -> Tensor:
    """Patches [n, D, Q T] of a [n, Q, c, h, w]."""
    columns = F.unfold(a.flatten(0, 1), call.weights["weight"].shape[2:], **_geometry(call))
    return columns.unflatten(0, a.shape[:2]).transpose(1, 2).flatten(2)


def _folded(call: Call, columns: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_unfolded`."""
    q, sides = like.shape[1], like.shape[3:]
    columns = columns.unflatten(2, (q, -1)).transpose(1, 2).flatten(0, 1)
    return F.fold(columns, sides, call.weights["weight"].shape[2:], **_geometry(call)).reshape(
        like.shape
    )


def _by_feature(call: Call, a: Tensor) -> Tensor:
    """Patches [D, n Q T] of a [n, Q, c, ...]: one product with their transpose is their second
    moment.
    """
    kernel, o = call.weights["weight"].shape[2:], call.options
    a = F.pad(
        a.flatten(0, 1).transpose(0, 1), [p for pad in reversed(o["padding"]) for p in (pad, pad)]
    )
    for axis, (k, stride, dilation) in enumerate(
        zip(kernel, o["stride"], o["dilation"], strict=True)
    ):
        a = a.unfold(2 + axis, dilation * (k - 1) + 1, stride)[..., ::dilation]
    d = len(kernel)  # [c, n Q, *positions, *kernel]
    return a.permute(0, *range(2 + d, 2 + 2 * d), *range(1, 2 + d)).flatten(1 + d).flatten(0, d)


def _from_feature(call: Call, x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_by_feature`."""
    kernel, o = call.weights["weight"].shape[2:], call.options
    n, q, channels, *sides = like.shape
    padded = [side + 2 * pad for side, pad in zip(sides, o["padding"], strict=True)]
    geometry = list(zip(kernel, o["stride"], o["dilation"], strict=True))
    positions = [
        (s - dl * (k - 1) - 1) // st + 1 for s, (k, st, dl) in zip(padded, geometry, strict=True)
    ]
    x, everything = x.view(channels, kernel.numel(), n * q, *positions), (slice(None), slice(None))
    whole = x.new_zeros(channels, n * q, *padded)
    for number, offset in enumerate(itertools.product(*(range(k) for k in kernel))):
        met: tuple[slice, ...] = tuple(
            slice(i * dl, i * dl + st * (t - 1) + 1, st)
            for i, t, (_, st, dl) in zip(offset, positions, geometry, strict=True)
        )
        whole[everything + met] += x[:, number]
    inner = tuple(slice(pad, pad + side) for side, pad in zip(sides, o["padding"], strict=True))
    return whole[everything + inner].transpose(0, 1).reshape(like.shape)


@functools.cache
def _meetings(side: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Whether, at an output position, a kernel offset meets an input entry: [positions, side,
    kernel].
    """
    positions = (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    # [positions, kernel]
    entry = stride * torch.arange(positions)[:, None] - padding + dilation * torch.arange(kernel)
    return torch.arange(side)[None, :, None] == entry[:, None, :]


def _tuple(value: int | tuple[int, ...] | list[int], d: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * d if len(values) == 1 else values


for _function in _DIMENSIONS:
    register(Convolution(), _function)
