"""A model's forward pass in a form whose derivatives are right.

A few torch operations have wrong derivatives; inside the context they are replaced by the same
formula made of operations that have the right ones. Hooks that a model puts on the gradients of its
activations are left out: the Jacobian is that of the outputs, whatever a training loop does to
gradients on their way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle


class TwiceDifferentiable(TorchFunctionMode):
    """Context in which operations with wrong derivatives are replaced by their substitutes."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return substitute(func)(*args, **(kwargs or {}))


def substitute(func: Callable) -> Callable:
    """The operation that takes the place of `func`; itself, if its derivatives are right."""
    return _SUBSTITUTES.get(func, func)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / |v|, in place of torch's operation, whose derivative lacks a term in torch 2.13.

    Args:
        v: direction.
        g: length, of a shape that broadcasts with v.
        dim: the axis over which the norm is not taken; -1: it is taken over all axes.
    """
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    if axes:
        norm = v.square().sum(axes, keepdim=True).sqrt()
    else:
        norm = v.abs()
    return v * (g / norm)


def _with_plain_cotangents(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A normalisation whose output receives contiguous cotangents.

    The backward pass of torch 2.13 misreads others: of `batch_norm` for a single datum, of
    `instance_norm` for any.
    """

    def normalised(*args: Any, **kwargs: Any) -> Tensor:
        y = norm(*args, **kwargs)
        return y.reshape(-1).view(y.shape)

    return normalised


def _no_hook(tensor: Tensor, hook: Callable) -> RemovableHandle:
    """In place of `Tensor.register_hook`: the hook is not registered, its handle does nothing."""
    return RemovableHandle(OrderedDict())


_SUBSTITUTES: dict[Callable, Callable] = {
    torch._weight_norm: _weight_norm,
    F.batch_norm: _with_plain_cotangents(F.batch_norm),
    F.instance_norm: _with_plain_cotangents(F.instance_norm),
    Tensor.register_hook: _no_hook,
}
