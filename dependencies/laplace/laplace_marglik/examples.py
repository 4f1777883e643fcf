"""Where a learner reads training data from: a pair of tensors, or any map-style data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from asdl_marglik import taken, tensors_of
from laplace_marglik.batches import pair_of
from laplace_marglik.errors import MarglikError


class Examples(Protocol):
    """Training examples that can be taken by number."""

    def __len__(self) -> int: ...

    def take(self, index: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets of some examples."""


class TensorExamples:
    """Inputs [N, ...] (a tensor or a mapping of them) and targets [N, ...] in memory."""

    def __init__(self, x: Any, y: Tensor):
        self.x = x
        self.y = y
        lengths = {len(t) for t in tensors_of(x)} | {len(y)}
        if len(lengths) != 1:
            raise MarglikError(f"expected as many inputs as targets, got {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> tuple[Any, Tensor]:
        own = index.to(self.y.device)
        return taken(self.x, own), self.y[own]


class DatasetExamples:
    """A map-style data set of pairs, or of mappings with the targets inside.

    Random transforms are drawn once for each reading.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list], Any] | None, labels: str | None = None
    ):
        self.dataset = dataset
        self.collate = collate_fn or default_collate
        self.labels = labels

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, index: Tensor) -> tuple[Any, Tensor]:
        batch = self.collate([self.dataset[int(i)] for i in index])
        return pair_of(batch, self.labels)


def examples_of(
    data: Any, collate_fn: Callable[[list], Any] | None = None, labels: str | None = None
) -> Examples:
    """Examples from a pair (x, y), a TensorDataset, or any map-style data set.

    Args:
        data: the training set.
        collate_fn: as in a DataLoader.
        labels: name of the targets where batches are mappings.
    """
    tensors = getattr(data, "tensors", data)
    pair = isinstance(tensors, (tuple, list)) and len(tensors) == 2
    if collate_fn is None and pair and isinstance(tensors[1], Tensor):
        return TensorExamples(*tensors)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise MarglikError(
            "blocks are drawn by number, which needs a map-style data set (with __getitem__ and "
            f"__len__) or a pair of tensors (x, y), got {type(data).__name__}; an iterable one "
            "can be read into a list"
        )
    return DatasetExamples(data, collate_fn, labels)


class Batches(Sequence[tuple[Any, Tensor]]):
    """All examples in batches, the same ones in the same order every time they are read."""

    def __init__(self, examples: Examples, batches: Iterable[Tensor]):
        self.examples = examples
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> tuple[Any, Tensor]:  # type: ignore[override]
        return self.examples.take(self.batches[number])

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return (self[number] for number in range(len(self)))


def in_order(examples: Examples, size: int) -> Batches:
    """All examples in batches of at most `size`, as they come."""
    return Batches(examples, torch.arange(len(examples)).split(size))


def dealt(examples: Examples, size: int, generator: torch.Generator) -> Batches:
    """All examples dealt at random into batches of at most `size`."""
    order = torch.randperm(len(examples), generator=generator)
    return Batches(examples, order.split(size))
