"""Checks of arguments: each mistake is reported in one sentence that says what to give instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace_marglik.errors import MarglikError

# largest size of a log precision, noise or temperature: exp overflows in single precision at 88.7
LARGEST_LOG = 80.0


def positive_integer(name: str, value: Any) -> int:
    """A count that is at least 1, as an int."""
    is_number = isinstance(value, (int, float)) or hasattr(value, "__index__")
    is_number = is_number and not isinstance(value, bool)
    is_whole = is_number and math.isfinite(value) and int(value) == value
    if not is_whole or value < 1:
        raise MarglikError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def positive_number(name: str, value: float) -> float:
    """A scale that is positive and finite, as it is."""
    if not 0 < value < math.inf:
        raise MarglikError(f"{name} must be positive and finite, got {value}")
    return value


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """A word that is one of the choices, as it is."""
    if value not in choices:
        raise MarglikError(f"{name} must be {' or '.join(choices)}, got {value!r}")
    return value


def outside_inference_mode() -> None:
    """Refuse `torch.inference_mode`, in which nothing can be differentiated."""
    if torch.is_inference_mode_enabled():
        raise MarglikError(
            "the evidence is made of derivatives, which torch.inference_mode() forbids; call it "
            "outside, or under torch.no_grad() where no gradients are wanted"
        )


def ordinary(t: Tensor) -> Tensor:
    """The tensor, or a copy of one from inference mode, which cannot be differentiated."""
    return t.clone() if t.is_inference() else t


def targets(y: Any) -> Tensor:
    """Targets as a tensor, from a tensor or a NumPy array."""
    if isinstance(y, Tensor):
        return ordinary(y)
    if type(y).__module__ == "numpy":
        return torch.as_tensor(y)
    raise MarglikError(
        f"targets must be a tensor, got {type(y).__name__}; convert with torch.as_tensor"
    )


class _Function(nn.Module):
    """An augmentation without parameters."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(x)


def as_module(augment: Any) -> nn.Module | None:
    """An augmentation as a module; a plain function becomes one without parameters."""
    if augment is None or isinstance(augment, nn.Module):
        return augment
    if callable(augment):
        return _Function(augment)
    raise MarglikError(
        "augment must be a module or a function x [n, ...] -> [n, A, ...], got "
        f"{type(augment).__name__}"
    )
