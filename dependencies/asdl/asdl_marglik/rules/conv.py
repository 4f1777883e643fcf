"""Convolutions of one, two and three dimensions, plain and transposed.

Stride, padding, dilation and channel groups are covered. There are two ways to the rows of all data
points at once: one convolution in which every datum is a channel group of its own, and matrix
products over patches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asdl_marglik.linalg import gram_of
from asdl_marglik.rules import autocorrelation
from asdl_marglik.rules.base import Call, Rule, Wanted, named, register, weights_among

_DIMENSIONS = {
    F.conv1d: 1,
    F.conv2d: 2,
    F.conv3d: 3,
    F.conv_transpose1d: 1,
    F.conv_transpose2d: 2,
    F.conv_transpose3d: 3,
}
_TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}

# Matrix products over patches beat a convolution with n times the channel groups for small outputs
# and for wide layers. Both limits were read off timings on CPUs; they decide speed, not values.
FEW_POSITIONS = 64
MANY_CHANNELS = 256


class Convolution(Rule):
    """y = W * a + b, linear in patches: dy/dW = sum_t g_t patch_t(a)^T,  dy/db = sum_t g_t."""

    name = "convolution"
    batch_first_only = True

    def bind(self, func: Callable, args: tuple, kwargs: dict, touched: set[int]) -> Call | None:
        transposed = func in _TRANSPOSED
        if transposed:
            signature = "input weight bias stride padding output_padding groups dilation"
        else:
            signature = "input weight bias stride padding dilation groups"
        arguments = named(signature, args, kwargs)
        inputs = arguments["input"]
        d = _DIMENSIONS[func]
        if inputs.dim() != d + 2:
            return None  # unbatched
        dilation = _tuple(arguments.get("dilation", 1), d)
        padding = arguments.get("padding", 0)
        if padding == "same":
            inputs = _padded_to_same(inputs, arguments["weight"].shape[2:], dilation)
        if padding in ("same", "valid"):
            padding = 0
        options = {
            "stride": _tuple(arguments.get("stride", 1), d),
            "padding": _tuple(padding, d),
            "dilation": dilation,
            "transposed": transposed,
            "output_padding": _tuple(arguments.get("output_padding", 0), d),
            "groups": arguments.get("groups", 1),
        }
        return Call(inputs, weights_among(arguments), options)

    def row(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        return self.rows(call, role, a, g.unsqueeze(1)).squeeze(1)

    def rows(self, call: Call, role: str, a: Tensor | None, g: Tensor) -> Tensor:
        if role == "bias":
            return g.flatten(4).sum((2, 4))
        assert a is not None
        if g.shape[1] > 1 and not self._cotangents_as_channels(call):
            rows = [self.row(call, role, a, g_k) for g_k in g.unbind(1)]
            return torch.stack(rows, 1)
        shape = (*g.shape[:2], *call.weights[role].shape)
        if self._better_by_patches(call, g):
            rows_by_output = _by_output(g) @ _unfolded(call, a).mT
            return rows_by_output.reshape(shape)
        like = g.new_empty(1).expand(shape).flatten(0, 2)  # only its shape is read
        _, row_gradients, _ = _convolution_backward(call, g, a, like, [False, True, False])
        return row_gradients.reshape(shape)

    def pull_rows(
        self, call: Call, role: str, a: Tensor | None, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Rows are bilinear in a and g: both cotangents are convolutions with `bar` as weight."""
        if role == "bias":
            sides = [1] * (g.dim() - 4)
            g_bar = bar.unsqueeze(2).unflatten(3, (-1, *sides))
            return None, g_bar.expand_as(g)
        assert a is not None
        if g.shape[1] > 1 and not self._cotangents_as_channels(call):
            return self._pull_one_by_one(call, role, a, g, bar, wanted)
        if self._better_by_patches(call, g):
            return _pull_by_patches(call, a, g, bar, wanted)
        return _pull_by_convolution(call, a, g, bar, wanted)

    def _pull_one_by_one(
        self, call: Call, role: str, a: Tensor, g: Tensor, bar: Tensor, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """One cotangent after the other: those of a add up, those of g stand side by side."""
        a_bars = []
        g_bars = []
        for k in range(g.shape[1]):
            a_bar, g_bar = self.pull_rows(call, role, a, g[:, k, None], bar[:, k, None], wanted)
            if a_bar is not None:
                a_bars.append(a_bar)
            if g_bar is not None:
                g_bars.append(g_bar)
        total = sum(a_bars[1:], a_bars[0]) if a_bars else None
        joined = torch.cat(g_bars, 1) if g_bars else None
        return total, joined

    def _cotangents_as_channels(self, call: Call) -> bool:
        """Whether the cotangents of a datum can be taken as further output channels."""
        return call.options["groups"] == 1 and not call.options["transposed"]

    def _better_by_patches(self, call: Call, g: Tensor) -> bool:
        """Whether products over patches are possible and faster than one large convolution."""
        if len(call.options["stride"]) != 2 or not self._cotangents_as_channels(call):
            return False
        n_positions = g.shape[4:].numel()
        n_channels = max(call.weights["weight"].shape[:2])
        return n_positions < FEW_POSITIONS or n_channels >= MANY_CHANNELS

    def moment(self, call: Call, role: str, a: Tensor) -> Tensor:
        if call.options["groups"] > 1:
            return super().moment(call, role, a)
        if autocorrelation.applies(call, a):
            return autocorrelation.moment(call, a).unsqueeze(0)
        return gram_of(_by_feature(call, a)).unsqueeze(0)

    def pull_moment(self, call: Call, role: str, a: Tensor, bar: Tensor) -> Tensor:
        if call.options["groups"] > 1:
            return super().pull_moment(call, role, a, bar)
        if autocorrelation.applies(call, a):
            return autocorrelation.pull_moment(call, a, bar[0])
        symmetric = bar[0] + bar[0].mT
        return _from_feature(call, symmetric @ _by_feature(call, a), a)

    def has_factors(self, call: Call, role: str) -> bool:
        return role == "bias" or not call.options["transposed"]

    def patches(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        if role == "bias":
            return None  # constant
        n, q, channels, *sides = a.shape
        groups = call.options["groups"]
        d = len(sides)
        if d == 2:  # torch has a kernel for this case
            columns = F.unfold(a.flatten(0, 1), _kernel(call), **_geometry(call))
            columns = columns.view(n, q, groups, -1, columns.shape[2])  # [n, Q, groups, D, T]
            return columns.permute(0, 1, 4, 2, 3)
        a = _windows(call, a, first=3)
        n_positions = a.shape[3 : 3 + d].numel()
        a = a.reshape(n, q, groups, channels // groups, n_positions, -1)
        return a.permute(0, 1, 4, 2, 3, 5).flatten(4)

    def mean_patch(self, call: Call, role: str, a: Tensor) -> Tensor | None:
        """Mean patch without forming patches.

        Along each side, a 0-1 matrix sums the entries that meet a kernel offset.
        """
        if role == "bias":
            return None
        o = call.options
        kernel = _kernel(call)
        n_positions = 1
        # the last side first: it is contiguous, and what is left of it small
        for axis in reversed(range(len(kernel))):
            geometry = (o["stride"][axis], o["padding"][axis], o["dilation"][axis])
            meets = _meetings(a.shape[3 + axis], kernel[axis], *geometry)
            n_positions *= meets.shape[0]
            # sum over this side, its kernel offsets become the last axis
            a = a.movedim(3 + axis, -1) @ meets.sum(0).to(a)
        a = a.permute(0, 1, 2, *reversed(range(3, a.dim())))
        mean = (a / n_positions).flatten(2)
        return mean.unflatten(2, (o["groups"], -1)).unsqueeze(2)

    def positions(self, call: Call, role: str, g: Tensor) -> Tensor:
        g = g.flatten(3).movedim(3, 2)  # [n, Q, T, O]
        groups = call.options["groups"] if role == "weight" else 1
        return g.unflatten(3, (groups, -1))


def _pull_by_patches(
    call: Call, a: Tensor, g: Tensor, bar: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """Cotangents of a and g from that of the rows, by matrix products over patches."""
    a_bar = g_bar = None
    v = bar.reshape(len(a), -1, bar.shape[3:].numel())  # [n, K O, D]
    if wanted[0]:
        a_bar = _folded(call, v.mT @ _by_output(g), a)
    if wanted[1]:
        by_output = (v @ _unfolded(call, a)).unflatten(1, (g.shape[1], -1))  # [n, K, O, Q T]
        g_bar = by_output.unflatten(3, (g.shape[2], *g.shape[4:])).movedim(2, 3)
    return a_bar, g_bar


def _pull_by_convolution(
    call: Call, a: Tensor, g: Tensor, bar: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """The same by convolutions with n times the channel groups, of which `bar` is the weight."""
    a_bar = g_bar = None
    v = bar.flatten(0, 2)  # [n K O, ...]
    if wanted[0]:
        by_datum, _, _ = _convolution_backward(call, g, a, v, [True, False, False])
        a_bar = by_datum.unflatten(1, (len(a), -1)).transpose(0, 1)
    if wanted[1]:
        by_datum = torch.convolution(_by_datum(a), v, None, *_settings(call, len(a)))
        g_bar = by_datum.unflatten(1, (*g.shape[:2], -1)).movedim(0, 2)
    return a_bar, g_bar


def _convolution_backward(
    call: Call, g: Tensor, a: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, ...]:
    """Gradients of one convolution in which every datum has channel groups of its own.

    Repetitions are its batch, over which the gradients of its weight are summed.

    Args:
        call: the arguments of the call.
        g: cotangents [n, K, Q, O, ...] of the outputs.
        a: inputs [n, Q, c, ...].
        weight: [n K O, c / channel groups, *kernel].
        mask: whether to compute the gradient of the input, of the weight, of the bias.
    """
    return torch.ops.aten.convolution_backward(
        _by_datum(g.movedim(2, 1).flatten(2, 3)),
        _by_datum(a),
        weight,
        None,
        *_settings(call, len(a)),
        mask,
    )


def _settings(call: Call, n: int) -> tuple[Any, ...]:
    """What torch's convolutions take after the bias, for n data points as channel groups."""
    o = call.options
    return (
        o["stride"],
        o["padding"],
        o["dilation"],
        o["transposed"],
        o["output_padding"],
        n * o["groups"],
    )


def _kernel(call: Call) -> torch.Size:
    """The sides of the kernel."""
    return call.weights["weight"].shape[2:]


def _geometry(call: Call) -> dict[str, Any]:
    """What `F.unfold` and `F.fold` take besides the kernel."""
    return {key: call.options[key] for key in ("dilation", "padding", "stride")}


def _by_datum(t: Tensor) -> Tensor:
    """[n, Q, c, ...] -> [Q, n c, ...]: data points become channel groups."""
    return t.transpose(0, 1).flatten(1, 2)


def _by_output(g: Tensor) -> Tensor:
    """[n, K, Q, O, ...] -> [n, K O, Q T]."""
    return g.movedim(2, 3).flatten(3).flatten(1, 2)


def _unfolded(call: Call, a: Tensor) -> Tensor:
    """Patches [n, D, Q T] of a [n, Q, c, h, w]."""
    columns = F.unfold(a.flatten(0, 1), _kernel(call), **_geometry(call))
    return columns.unflatten(0, a.shape[:2]).transpose(1, 2).flatten(2)


def _folded(call: Call, columns: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_unfolded`: [n, D, Q T] -> the shape of `like` [n, Q, c, h, w]."""
    q = like.shape[1]
    sides = like.shape[3:]
    columns = columns.unflatten(2, (q, -1)).transpose(1, 2).flatten(0, 1)
    image = F.fold(columns, sides, _kernel(call), **_geometry(call))
    return image.reshape(like.shape)


def _windows(call: Call, a: Tensor, first: int) -> Tensor:
    """What the kernel sees at every position: a [..., *sides] -> [..., *positions, *kernel].

    Args:
        call: the arguments of the call.
        a: inputs, not yet padded.
        first: the first of the axes that are sides.
    """
    o = call.options
    a = F.pad(a, _both_ends(o["padding"]))
    geometry = zip(_kernel(call), o["stride"], o["dilation"], strict=True)
    for axis, (k, stride, dilation) in enumerate(geometry, first):
        a = a.unfold(axis, dilation * (k - 1) + 1, stride)[..., ::dilation]
    return a


def _by_feature(call: Call, a: Tensor) -> Tensor:
    """Patches [D, n Q T] of a [n, Q, c, ...]: their second moment is X X^T of the result X."""
    d = len(_kernel(call))
    a = a.flatten(0, 1).transpose(0, 1)  # [c, n Q, *sides]
    a = _windows(call, a, first=2)  # [c, n Q, *positions, *kernel]
    kernel_axes = range(2 + d, 2 + 2 * d)
    position_axes = range(1, 2 + d)
    return a.permute(0, *kernel_axes, *position_axes).flatten(1 + d).flatten(0, d)


def _from_feature(call: Call, x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_by_feature`: [D, n Q T] -> the shape of `like` [n, Q, c, ...]."""
    kernel = _kernel(call)
    o = call.options
    n, q, channels, *sides = like.shape
    padded = [side + 2 * pad for side, pad in zip(sides, o["padding"], strict=True)]
    geometry = list(zip(kernel, o["stride"], o["dilation"], strict=True))
    positions = [
        _n_positions(side, k, stride, dilation)
        for side, (k, stride, dilation) in zip(padded, geometry, strict=True)
    ]
    x = x.view(channels, kernel.numel(), n * q, *positions)
    image = x.new_zeros(channels, n * q, *padded)
    everything = slice(None)
    offsets = itertools.product(*(range(k) for k in kernel))
    for number, offset in enumerate(offsets):
        seen = [
            slice(i * dilation, i * dilation + stride * (t - 1) + 1, stride)
            for i, t, (_, stride, dilation) in zip(offset, positions, geometry, strict=True)
        ]
        image[(everything, everything, *seen)] += x[:, number]
    inner = [slice(pad, pad + side) for side, pad in zip(sides, o["padding"], strict=True)]
    return image[(everything, everything, *inner)].transpose(0, 1).reshape(like.shape)


@functools.cache
def _meetings(side: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Whether a kernel offset meets an input entry at a position: [positions, side, kernel]."""
    n_positions = _n_positions(side + 2 * padding, kernel, stride, dilation)
    starts = stride * torch.arange(n_positions)[:, None] - padding
    entry = starts + dilation * torch.arange(kernel)  # [positions, kernel]
    return torch.arange(side)[None, :, None] == entry[:, None, :]


def _n_positions(side: int, kernel: int, stride: int, dilation: int) -> int:
    """Positions of a kernel along one side, padding included."""
    return (side - dilation * (kernel - 1) - 1) // stride + 1


def _padded_to_same(inputs: Tensor, kernel: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The input padded by hand for padding="same", which may be asymmetric."""
    totals = [dl * (k - 1) for dl, k in zip(dilation, kernel, strict=True)]
    pads: list[int] = []
    for total in reversed(totals):  # `F.pad` starts with the last side
        before = total // 2
        pads += [before, total - before]
    return F.pad(inputs, pads)


def _both_ends(padding: Sequence[int]) -> list[int]:
    """What `F.pad` takes for the same padding at both ends of each side, last side first."""
    return [pad for pad in reversed(padding) for _ in range(2)]


def _tuple(value: int | tuple[int, ...] | list[int], d: int) -> tuple[int, ...]:
    """One value per dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * d if len(values) == 1 else values


for _function in _DIMENSIONS:
    register(Convolution(), _function)
