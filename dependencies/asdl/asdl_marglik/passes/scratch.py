"""Memory for large intermediates."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """One piece of memory for large intermediates, used again and again: fresh pages cost more than
    arithmetic.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor that is valid until the next is taken."""
        size = torch.Size(shape).numel()
        if self._memory is None or self._memory.numel() < size or self._memory.dtype != like.dtype:
            self._memory = None  # free it before the larger one is there
            self._memory = like.new_empty(size)
        return self._memory[:size].view(shape)
