"""What users hand over, checked where it comes in: each mistake is one sentence that says what to
give instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_marglik.errors import MarglikError

# of a log precision, noise or temperature: beyond, exp overflows in single precision
LARGEST_LOG = 80.0


def positive_integer(name: str, value: Any) -> int:
    """A count that is at least 1."""
    number = isinstance(value, (int, float)) or hasattr(value, "__index__")
    if (
        not number
        or isinstance(value, bool)
        or not math.isfinite(value)
        or int(value) != value
        or value < 1
    ):
        raise MarglikError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def positive_number(name: str, value: float) -> float:
    """A scale: positive and finite."""
    if not 0 < value < math.inf:
        raise MarglikError(f"{name} must be positive and finite, got {value}")
    return value


def outside_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise MarglikError(
            "the evidence is made of derivatives, which torch.inference_mode() forbids; call it "
            "outside, or under torch.no_grad() where no gradients are wanted"
        )


def ordinary(t: Tensor) -> Tensor:
    """A tensor that may take part in derivatives: those of inference mode are copied."""
    return t.clone() if t.is_inference() else t


def targets(y: Any) -> Tensor:
    """Targets as a tensor."""
    if isinstance(y, Tensor):
        return ordinary(y)
    if type(y).__module__ == "numpy":
        return torch.as_tensor(y)
    raise MarglikError(
        f"targets must be a tensor, got {type(y).__name__}; convert with torch.as_tensor"
    )


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The batches (inputs, targets) of a loader."""
    for batch in loader:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            found = f"with the keys {list(batch)}" if isinstance(batch, Mapping) else ""
            found = f"of {len(batch)} entries" if isinstance(batch, (tuple, list)) else found
            raise MarglikError(
                "every batch of the loader must be a pair (inputs, targets), got a "
                f"{type(batch).__name__} {found}; wrap the loader in an object whose __iter__ "
                "gives such pairs"
            )
        yield batch[0], batch[1]


class _Function(nn.Module):
    """An augmentation without parameters."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(x)


def as_module(augment: Any) -> nn.Module | None:
    """An augmentation as a module; a plain function has nothing to learn."""
    if augment is None or isinstance(augment, nn.Module):
        return augment
    if callable(augment):
        return _Function(augment)
    raise MarglikError(
        "augment must be a module or a function x [n, ...] -> [n, A, ...], got "
        f"{type(augment).__name__}"
    )
