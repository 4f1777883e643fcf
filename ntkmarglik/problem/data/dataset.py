"""A data set that lives on the device as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test split of an image classification problem, ready for the network.

    Shapes: x_train [N, c, h, w] float, y_train [N] long with values 0 ... n_classes - 1; likewise
    x_test, y_test.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    n_classes: int

    @property
    def n_data(self) -> int:
        """Number of training points N."""
        return len(self.y_train)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape (c, h, w) of one input."""
        c, h, w = self.x_train.shape[1:]
        return c, h, w

    def dealt(self, size: int, generator: torch.Generator) -> Blocks:
        """The training data dealt at random into blocks."""
        return Blocks(self, torch.randperm(self.n_data, generator=generator).split(size))


@dataclass(frozen=True, eq=False)
class Blocks(Sequence[tuple[Tensor, Tensor]]):
    """Parts of the training data as pairs (x, y), copied when they are read."""

    data: Dataset
    members: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.members)

    @overload
    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]: ...

    @overload
    def __getitem__(self, number: slice) -> Blocks: ...

    def __getitem__(self, number: int | slice) -> tuple[Tensor, Tensor] | Blocks:
        if isinstance(number, slice):
            return Blocks(self.data, self.members[number])
        own = self.members[number].to(self.data.x_train.device)
        return self.data.x_train[own], self.data.y_train[own]
