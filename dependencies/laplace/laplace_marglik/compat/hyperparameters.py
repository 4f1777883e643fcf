"""Prior precision, prior mean and noise as laplace-torch takes them: numbers, or tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asdl_marglik import Groups
from laplace_marglik.errors import MarglikError
from laplace_marglik.prior import groups_of


def precision_tensor(value: Any, sizes: dict[str, int] | None, like: Tensor) -> Tensor:
    """A prior precision as a tensor [1], [n_layers] or [n_params], with its graph.

    Args:
        value: a number, or a tensor of at most one axis.
        sizes: numbers in each weight by name; None if these are not known yet.
        like: says dtype and device.
    """
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if tensor.dim() > 1:
        raise MarglikError(
            f"prior_precision must be a number or a vector, got shape {tuple(tensor.shape)}"
        )
    tensor = tensor.reshape(-1)
    lengths = None if sizes is None else {1, len(sizes), sum(sizes.values())}
    if lengths is not None and len(tensor) not in lengths:
        raise MarglikError(
            "prior_precision must have 1 entry, one per parameter tensor or one per weight "
            f"({sorted(lengths)}), got {len(tensor)}"
        )
    if not bool((tensor > 0).all()):
        raise MarglikError("prior_precision must be positive in all entries")
    return tensor


def groups_for(length: int, weights: dict[str, Any]) -> Groups:
    """The prior's groups for a precision with so many entries.

    Args:
        length: 1, the number of parameter tensors, or the number of weights.
        weights: tensors by name.
    """
    if length == 1:
        return groups_of("scalar", weights)[0]
    if length == sum(w.numel() for w in weights.values()):
        groups: dict[str, slice] = {}
        start = 0
        for name, w in weights.items():
            groups[name] = slice(start, start + w.numel())
            start += w.numel()
        return groups
    return groups_of("layerwise", weights)[0]


def spread(precision: Tensor, sizes: dict[str, int]) -> Tensor:
    """The precision of every weight [P], from one of [1], [n_layers] or [P].

    Args:
        precision: as from `precision_tensor`.
        sizes: numbers in each weight by name.
    """
    total = sum(sizes.values())
    if len(precision) == 1:
        return precision.expand(total)
    if len(precision) == total:
        return precision
    counts = torch.tensor(list(sizes.values()), device=precision.device)
    return precision.repeat_interleave(counts)


def mean_tensor(value: Any, size: int | None, like: Tensor) -> Tensor:
    """A prior mean as a tensor, of no axis or [1] or [n_params].

    Args:
        value: a number or a tensor of at most one axis.
        size: number of weights, if known.
        like: says dtype and device.
    """
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if tensor.dim() > 1 or (tensor.dim() and size is not None and len(tensor) not in (1, size)):
        raise MarglikError(
            f"prior_mean must be a number or a vector of {size} entries, got shape "
            f"{tuple(tensor.shape)}"
        )
    return tensor


def noise_tensor(value: Any, like: Tensor) -> Tensor:
    """A noise standard deviation as a tensor without axes, with its graph.

    Args:
        value: a number, or a tensor with one entry.
        like: says dtype and device.
    """
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if tensor.numel() != 1:
        raise MarglikError(
            f"sigma_noise must be one number for all outputs, got shape {tuple(tensor.shape)}; for "
            "noise that the network predicts use likelihood=HeteroscedasticGaussian()"
        )
    return tensor.reshape(())
