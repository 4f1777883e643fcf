"""Second moments of patches without patches, where the kernel moves one pixel at a time.

Over all positions at which it meets the image, wherever it begins, only differences of offsets
matter: with a the image, zero outside, and offsets i, j of the kernel,

    sum_t a_c(t + i) a_d(t + j) = R_cd(j - i),     R_cd(s) = sum_p a_c(p) a_d(p + s)

The autocorrelation R is the weight's gradient in a convolution of a with itself, with a kernel of
side 2k - 1: (2k - 1)^2 products in place of k^4. Positions beyond the padding are no positions of
the layer: what they add, which only few pixels at the border do, is taken away.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asdl_marglik.rules.base import Call

_ONE = (1, 1)
# Below so many features D of a patch, and below so many positions for each of them, products of
# patches are as fast: read off timings on a CPU.
FEW_FEATURES = 64
FEW_POSITIONS = 2
# Pixels of one convolution: it adds them up one after the other, with a rounding error that grows
# with their number; so few lose no more than a product of matrices does. Larger images than four
# times that are left to such products.
PIXELS = 1024


def applies(call: Call, a: Tensor) -> bool:
    """Whether moments can be had this way, faster and as precise as from patches.

    Args:
        call: a convolution.
        a: its inputs [n, Q, c, ...].
    """
    o = call.options
    # convolutions in double precision are slow on a CPU
    if len(o["stride"]) != 2 or o["transposed"] or o["groups"] > 1 or a.dtype != torch.float32:
        return False
    kernel, sides = _kernel(call), a.shape[3:]
    if o["stride"] != _ONE or o["dilation"] != _ONE or kernel.numel() == 1:
        return False
    along = zip(sides, kernel, o["padding"], strict=True)
    positions = torch.Size(side + 2 * pad - k + 1 for side, k, pad in along).numel()
    # else most of the autocorrelation would be taken away again, and digits with it
    if 2 * positions < sides.numel() or sides.numel() > 4 * PIXELS:
        return False
    features = a.shape[2] * kernel.numel()
    many = len(a) * a.shape[1] * positions >= FEW_POSITIONS * features
    return many and features >= FEW_FEATURES


def moment(call: Call, a: Tensor) -> Tensor:
    """Sum over positions of patch patch^T [D, D].

    Args:
        call: a convolution.
        a: inputs [n, Q, c, h, w].
    """
    image, kernel = a.flatten(0, 1), _kernel(call)
    R = _autocorrelation(image, kernel)
    total = R.new_empty(2 * [len(R), *kernel])
    for at, differences in _differences(kernel):
        total[at] = R[differences]
    for border in _borders(call, image):
        patches = border.patches()
        features = patches.shape[:3]
        x = patches.flatten(3).flatten(0, 2)
        border.part(total).sub_((x @ x.mT).reshape(2 * features))
    return total.reshape(2 * [len(R) * kernel.numel()])


def pull_moment(call: Call, a: Tensor, bar: Tensor) -> Tensor:
    """Cotangent of the inputs, shaped as they are.

    Args:
        call: a convolution.
        a: inputs [n, Q, c, h, w].
        bar: cotangent of the moment [D, D].
    """
    image, kernel = a.flatten(0, 1), _kernel(call)
    channels = image.shape[1]
    symmetric = (bar + bar.mT).reshape(2 * [channels, *kernel])
    weight = bar.new_zeros(channels, channels, *(2 * k - 1 for k in kernel))
    for at, differences in _differences(kernel):
        weight[differences] += symmetric[at]
    image_bar = F.conv2d(image, weight, padding=[k - 1 for k in kernel])
    for border in _borders(call, image):
        patches = border.patches()
        x = patches.flatten(3).flatten(0, 2)
        x_bar = border.part(symmetric).reshape(len(x), len(x)) @ x
        border.subtract(x_bar.reshape(patches.shape), image_bar)
    return image_bar.reshape(a.shape)


def _autocorrelation(image: Tensor, kernel: torch.Size) -> Tensor:
    """R [c, c, 2k - 1, 2l - 1] of images [m, c, h, w], for a kernel [k, l]."""
    channels = image.shape[1]
    shape = (channels, channels, *(2 * k - 1 for k in kernel))
    like = image.new_empty(1).expand(shape)  # only its shape is read
    geometry = (_ONE, [k - 1 for k in kernel], _ONE, False, (0, 0), 1)
    R = image.new_zeros(shape)
    for few in image.split(max(1, PIXELS // image.shape[2:].numel())):
        _, own, _ = torch.ops.aten.convolution_backward(
            few, few, like, None, *geometry, [False, True, False]
        )
        R += own
    return R


def _differences(kernel: torch.Size) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Where in a moment [c, k, l, c, k, l] each i is, and where in R all differences j - i are."""
    everything = slice(None)
    for i in itertools.product(*(range(k) for k in kernel)):
        begins = [k - 1 - own for own, k in zip(i, kernel, strict=True)]
        windows = [slice(begin, begin + k) for begin, k in zip(begins, kernel, strict=True)]
        yield (everything, *i), (everything, everything, *windows)


@dataclass(frozen=True)
class _Border:
    """Patches that begin at one place beyond the padding of one side.

    Args:
        image: [m, c, h, w], that side first.
        pixels: those of that side which the patches see.
        offsets: of the kernel, at which they see them.
        kernel: side of the kernel along the other side of the image.
        padding: of the other side.
        transposed: the sides of the image are exchanged.
    """

    image: Tensor
    pixels: slice
    offsets: slice
    kernel: int
    padding: int
    transposed: bool

    def patches(self) -> Tensor:
        """What they see [c, offsets, l, m, positions]; elsewhere they are zero."""
        seen = F.pad(self.image[:, :, self.pixels], (self.padding, self.padding))
        return seen.unfold(3, self.kernel, 1).permute(1, 2, 4, 0, 3)

    def part(self, moment: Tensor) -> Tensor:
        """Their part [c, offsets, l, c, offsets, l] of a moment [c, k, l, c, k, l]."""
        if self.transposed:
            moment = moment.transpose(1, 2).transpose(4, 5)
        return moment[:, self.offsets, :, :, self.offsets]

    def subtract(self, patches_bar: Tensor, image_bar: Tensor) -> None:
        """Take the pixels' cotangents from those of the image [m, c, h, w]."""
        c, offsets, _, m, positions = patches_bar.shape
        width = self.image.shape[3]
        seen_bar = patches_bar.new_zeros(c, offsets, m, width + 2 * self.padding)
        for j, bar in enumerate(patches_bar.unbind(2)):
            seen_bar[..., j : j + positions] += bar
        inner = seen_bar[..., self.padding : self.padding + width]
        whole = image_bar.mT if self.transposed else image_bar
        whole[:, :, self.pixels] -= inner.permute(2, 0, 1, 3)


def _borders(call: Call, image: Tensor) -> Iterator[_Border]:
    """Above and below all positions of the layer, then beside them."""
    (height, width), (top, left) = _kernel(call), call.options["padding"]
    for pixels, offsets in _edges(image.shape[2], height, top):
        # along the other side, wherever a patch sees anything
        yield _Border(image, pixels, offsets, width, width - 1, transposed=False)
    for pixels, offsets in _edges(image.shape[3], width, left):
        yield _Border(image.mT, pixels, offsets, height, top, transposed=True)


def _edges(side: int, k: int, padding: int) -> Iterator[tuple[slice, slice]]:
    """Pixels and kernel offsets that meet, for each begin of a kernel beyond the padding."""
    before = range(1 - k, -padding)
    after = range(side + padding - k + 1, side)
    for begin in (*before, *after):
        first, last = max(0, begin), min(side, begin + k)
        yield slice(first, last), slice(first - begin, last - begin)


def _kernel(call: Call) -> torch.Size:
    return call.weights["weight"].shape[2:]
