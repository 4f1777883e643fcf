"""A data set that lives on the device as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from asdl_marglik import checksum


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

    @cached_property
    def fingerprint(self) -> str:
        """Differs for other data, also where a single pixel or label is another."""
        tensors = (self.x_train, self.y_train, self.x_test, self.y_test)
        sizes = "-".join(str(len(t)) for t in tensors[::2])
        sums = [f"{number & (2**64 - 1):016x}" for number in checksum(tensors).tolist()]
        return f"{sizes}-{''.join(sums)}"
