"""Convolutions of images: a faster gradient in an image's few channels.

Torch's kernel for the gradient in one to four channels is slow on CPUs. The same gradient takes a
quarter to two thirds of the time if every image is a channel group of its own. A training step
never needs it; the way back to an augmentation always does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from asdl_marglik.rules.base import named

FEW_CHANNELS = 4  # beyond, torch's kernel is as fast
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1}


def conv2d(*args: Any, **kwargs: Any) -> Tensor:
    """`F.conv2d` where no gradient in the weights will be asked for.

    Args:
        args: as of `F.conv2d`.
        kwargs: as of `F.conv2d`.
    """
    arguments = named("input weight bias stride padding dilation groups", args, kwargs)
    if not _of_images(arguments):
        return F.conv2d(*args, **kwargs)
    geometry = {key: arguments.get(key, default) for key, default in _DEFAULTS.items()}
    tensors = (arguments["input"], arguments["weight"], arguments.get("bias"))
    return ImageConvolution.apply(*tensors, geometry)


def _of_images(arguments: dict[str, Any]) -> bool:
    """Whether a call is a plain convolution of images that have a gradient.

    Weights that were computed may depend on the images too: their gradient is left to torch.
    """
    x = arguments["input"]
    weights = (arguments["weight"], arguments.get("bias"))
    if any(w is not None and w.grad_fn is not None for w in weights):
        return False
    if x.device.type != "cpu" or x.dim() != 4 or not 0 < x.shape[1] <= FEW_CHANNELS:
        return False
    plain = arguments.get("groups", 1) == 1 and not isinstance(arguments.get("padding"), str)
    return plain and x.requires_grad and len(x) > 0


class ImageConvolution(torch.autograd.Function):
    """y = W * x + b, whose gradient in x has every image as a channel group of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: dict[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return F.conv2d(x, weight, bias, **geometry)

    @staticmethod
    def backward(ctx: Any, y_bar: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (t.detach() for t in ctx.saved_tensors)
        n = len(x)
        x_bar = conv2d_input(
            (1, n * x.shape[1], *x.shape[2:]),
            weight.repeat(n, 1, 1, 1),
            y_bar.flatten(0, 1).unsqueeze(0),
            groups=n,
            **ctx.geometry,
        )
        return x_bar.view(x.shape), None, None, None
