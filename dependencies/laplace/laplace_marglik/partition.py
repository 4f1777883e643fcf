"""Partitions of the rows (data point, root column) into blocks.

The log-determinant of the whole is at most the sum over blocks (Fischer), so every partition gives
a lower bound of the evidence; a block drawn uniformly, its terms multiplied by the number of
blocks, is an unbiased estimate of that bound. All blocks together contain every row exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError


@dataclass(frozen=True)
class Block:
    """Some rows (data point, root column), and how many such blocks the partition has.

    Args:
        index: data points [S] of the block; its x and y are those of the data set at `index`.
        columns: root columns of each [S, K]; of a conditioned block those of each row [s, 1].
        n_data_blocks: how many such sets of data points there are.
        n_column_blocks: how many such sets of columns.
        n_data: data points that the partition is of.
        n_outputs: outputs that the partition is of.
        rows: of a conditioned block, (position in index, column) of each row [s, 2], the inducing
            rows first.
        n_inducing: how many rows of a conditioned block are inducing rows.
        n_columns: root columns that rows are drawn from, where these are fewer than the outputs.
    """

    index: Tensor
    columns: Tensor
    n_data_blocks: float
    n_column_blocks: float
    n_data: int
    n_outputs: int
    rows: Tensor | None = None
    n_inducing: int = 0
    n_columns: int | None = None

    @property
    def n_blocks(self) -> float:
        return self.n_data_blocks * self.n_column_blocks

    @property
    def weight(self) -> float:
        """How often rows that are not inducing count: (all rows - u) / (rows of the block - u)."""
        return self.n_blocks

    @property
    def inducing_rows(self) -> Tensor:
        """(number of the datum, column) of each inducing row [u, 2]."""
        return self.numbered_rows()[: self.n_inducing]

    def numbered_rows(self) -> Tensor:
        """(number of the datum, column) of each row of a conditioned block [s, 2]."""
        assert self.rows is not None
        return torch.stack([self.index[self.rows[:, 0]], self.rows[:, 1]], 1)

    def check(self, n: int, n_data: int, n_outputs: int) -> None:
        """Refuse a block that is not of these data, or of another partition.

        Args:
            n: data points that were given.
            n_data: of the marginal likelihood.
            n_outputs: of the network.
        """
        if n != len(self.index):
            raise MarglikError(
                f"the block has {len(self.index)} data points but {n} were given; pass "
                "x[block.index]"
            )
        for name, of_block, expected in (
            ("data points", self.n_data, n_data),
            ("outputs", self.n_outputs, n_outputs),
        ):
            if of_block != expected:
                raise MarglikError(
                    f"the block is of a partition of {of_block} {name}, but there are {expected}; "
                    "build the Partition with the n_data of the marginal likelihood and all "
                    "outputs of the network, and pad sequences to one length"
                )


class Partition:
    """Random blocks of at most `subset` data points and `outputs` root columns.

    Data are dealt into ceil(N/S) blocks whose sizes differ by at most one, so that no block is far
    noisier than the others; the same holds for columns. `redraw()` (once per epoch) makes a new
    partition of the same kind; `sample()` goes through the blocks in random order and starts a new
    round, without redrawing, after the last.

    Args:
        n_data: data points N.
        n_outputs: outputs C of the network.
        subset: data points S of a block; None for all.
        outputs: root columns K of a block; None for all.
        columns: "shared" (a block's data points have the same columns) or "iid" (every data point
            has a random order of columns of its own).
        generator: source of the random order.
    """

    def __init__(
        self,
        n_data: int,
        n_outputs: int,
        subset: int | None = None,
        outputs: int | None = None,
        *,
        columns: str = "shared",
        generator: torch.Generator | None = None,
    ):
        self.n_data = n_data
        self.n_outputs = n_outputs
        self.subset = _within("subset", subset, n_data, "data points")
        self.outputs = _within("outputs", outputs, n_outputs, "outputs")
        if columns not in ("shared", "iid"):
            raise MarglikError(f"columns must be 'shared' or 'iid', got {columns!r}")
        self.columns = columns
        self.generator = generator or torch.Generator().manual_seed(torch.initial_seed())
        self.redraw()

    def _order(self) -> Tensor:
        """The order in which data points fill the blocks [N]."""
        return torch.randperm(self.n_data, generator=self.generator)

    def redraw(self) -> None:
        """Draw a new partition of the same kind."""
        self._data = self._order().tensor_split(-(-self.n_data // self.subset))
        many = self.n_data if self.columns == "iid" else 1
        self._column_order = torch.rand(many, self.n_outputs, generator=self.generator).argsort(1)
        self._pending: list[int] = []

    @property
    def n_column_blocks(self) -> int:
        return -(-self.n_outputs // self.outputs)

    def __len__(self) -> int:
        return len(self._data) * self.n_column_blocks

    @property
    def sample_weight(self) -> float:
        """How often the log-determinant of a block counts."""
        return len(self)

    def __getitem__(self, position: int) -> Block:
        if not 0 <= position < len(self):
            raise IndexError(f"block {position} of {len(self)}")
        index = self._data[position // self.n_column_blocks]
        order = (
            self._column_order[index]
            if self.columns == "iid"
            else self._column_order.expand(len(index), -1)
        )
        columns = order.tensor_split(self.n_column_blocks, 1)[position % self.n_column_blocks]
        return Block(
            index, columns, len(self._data), self.n_column_blocks, self.n_data, self.n_outputs
        )

    def __iter__(self) -> Iterator[Block]:
        return (self[position] for position in range(len(self)))

    def sample(self) -> Block:
        """The next block of a random order, each once before any comes again."""
        if not self._pending:
            self._pending = torch.randperm(len(self), generator=self.generator).tolist()
        return self[self._pending.pop()]


class ClassPartition(Partition):
    """Blocks filled class by class: data of a class stay together where the block size allows.

    Args:
        labels: class of each datum [N].
        n_outputs: outputs C of the network.
        subset: as in `Partition`.
        outputs: as in `Partition`.
        columns: as in `Partition`.
        generator: as in `Partition`.
    """

    def __init__(
        self,
        labels: Tensor,
        n_outputs: int,
        subset: int | None = None,
        outputs: int | None = None,
        *,
        columns: str = "shared",
        generator: torch.Generator | None = None,
    ):
        self.labels = labels.detach().cpu()
        super().__init__(
            len(labels), n_outputs, subset, outputs, columns=columns, generator=generator
        )

    def _order(self) -> Tensor:
        shuffled = torch.randperm(self.n_data, generator=self.generator)
        classes = self.labels.unique()
        rank = torch.empty(int(classes.max()) + 1 if len(classes) else 1, dtype=torch.long)
        rank[classes] = torch.randperm(len(classes), generator=self.generator)
        return shuffled[rank[self.labels[shuffled]].argsort(stable=True)]


def _within(name: str, value: int | None, limit: int, what: str) -> int:
    if limit < 1:
        raise MarglikError(f"there must be at least one of the {what}, got {limit}")
    if value is None:
        return limit
    if not 1 <= value <= limit:
        raise MarglikError(
            f"{name} must be between 1 and the {limit} {what} there are, got {value}"
        )
    return value
