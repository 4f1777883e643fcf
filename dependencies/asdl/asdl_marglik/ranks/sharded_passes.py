"""One block of data on several ranks: each runs both passes over its own data points.

Sums over data are reduced and rows are gathered, so that every rank has the statistics of all data,
and whatever is computed from them is computed everywhere alike; of the rows of a kernel each keeps
its own. Gradients of the second pass are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from asdl_marglik.errors import CurvatureError
from asdl_marglik.passes.two_passes import (
    Bars,
    Batch,
    Gradients,
    Passes,
    Residency,
    Seen,
    augmented,
)
from asdl_marglik.ranks.ranks import Ranks
from asdl_marglik.watch.model import Inputs, fingerprint, taken

OTHER_SEED = 1_000_003  # between the seeds of ranks


@dataclass(frozen=True)
class Share:
    """Which data points of a batch are a rank's.

    Args:
        batch: number of the batch.
        start: number of the first of its data points that are the rank's.
        total: data points of the whole batch.
    """

    batch: int
    start: int
    total: int


@dataclass(kw_only=True)
class ShardedPasses(Passes):
    """Both passes over this rank's part of the data, with the results and gradients of all data.

    Every rank is given the same batches and takes its own data points of them.

    Args:
        ranks: that share the data.
        shares: of own batches, in order; found while they are read.
        lengths: of all batches; found while they are read.
    """

    ranks: Ranks
    shares: list[Share] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_all, whole = self.n_data, self.batches
        self.own = self.ranks.spans(self.n_all)[self.ranks.rank]
        self.n_data = self.own.stop - self.own.start
        self.batches = self._own(whole)
        self._everything: tuple[Tensor, Tensor] | None = None

    def _own(self, whole: Callable[[], Iterable[Batch]]) -> Callable[[], Iterator[Batch]]:
        def batches() -> Iterator[Batch]:
            self.shares = []
            self.lengths = []
            start = 0
            for number, (x, y, columns) in enumerate(whole()):
                self.lengths.append(len(y))
                own = slice(max(self.own.start - start, 0), min(self.own.stop - start, len(y)))
                start += len(y)
                if own.start < own.stop:
                    self.shares.append(Share(number, own.start, len(y)))
                    # of rows of the same data, each rank augments all data alike
                    inputs = taken(x, own) if self.row_data is None else x
                    yield inputs, y[own], columns[own]
            if start != self.n_all:
                raise CurvatureError(
                    f"the loader gave {start} data points in all, but n_data={self.n_all}; the "
                    "two must agree, and every rank has to give all of them"
                )

        return batches

    @property
    def batch_lengths(self) -> list[int]:
        return self.lengths

    def _only(self, number: int, x: Inputs, y: Tensor) -> Passes:
        start = sum(self.lengths[:number])
        columns = self.rows_of_data[1][start : start + len(y)]
        one = replace(
            self,
            batches=lambda: [(x, y, columns)],
            n_data=len(y),
            seed=self.seed + number,
            next_batches=None,
            seen=Seen(),
        )
        if one.n_data:
            own = taken(x, one.own)
            one.seen = Seen(targets=[y[one.own]], inputs=[fingerprint(own)])
        return one

    @property
    def rows_of_data(self) -> tuple[Tensor, Tensor]:
        assert self._everything is not None
        return self._everything

    def augmented(self, x: Inputs, index: int) -> Inputs:
        """Copies of own data: those of one rank alone, if the module can draw a part of a batch."""
        if self.augment is None:
            return super().augmented(x, index)
        share = self.shares[index]
        seed = self.seed + share.batch
        sharing = getattr(self.augment, "sharing", None)
        if sharing is None:
            seed += OTHER_SEED * self.ranks.rank
        with nullcontext() if sharing is None else sharing(share.start, share.total):
            return augmented(self.augment, x, seed)

    def _copies(self, x: Inputs, index: int) -> Inputs:
        if self.row_data is None:
            return self.augmented(x, index)
        return taken(Passes.augmented(self, x, index), self.row_data[self.own])

    def first(self, log_precision: Tensor, *, keep: bool, again: bool) -> list[Tensor]:
        if self._results:
            return super().first(log_precision, keep=keep, again=again)
        self._check()
        results = super().first(log_precision, keep=keep, again=again)
        gathered = [
            self.ranks.gather(t, self.n_all, "outputs of all data")
            for t in (results[0], torch.cat(self.seen.targets), torch.cat(self.seen.columns))
        ]
        results[0] = gathered[0]
        self._everything = gathered[1], gathered[2]
        return results

    def _check(self) -> None:
        """Refuse blocks or seeds that differ between ranks: the numbers would mean nothing."""
        if self.n_all < self.ranks.size:
            raise CurvatureError(
                f"{self.n_all} data points cannot be shared among {self.ranks.size} ranks; each "
                "needs at least one"
            )
        if not self.ranks.agree([self.n_all, self.seed], "comparison of the blocks"):
            raise CurvatureError(
                "the ranks were given different blocks, or draw from generators in different "
                "states; give every rank the same data in the same order, and seed all generators "
                "alike"
            )

    def _statistics(self, number: int, held: Residency, log_precision: Tensor) -> list[Tensor]:
        """Those of one part: kernels and sums are added up over ranks, rows are gathered."""
        part = self.parts[number]
        what = part.names[0]
        statistics = [t.contiguous() for t in super()._statistics(number, held, log_precision)]
        kinds = part.pieces[0] if part.additive else ("sum",) * len(statistics)
        added = [t for t, kind in zip(statistics, kinds, strict=True) if kind == "sum"]
        self.ranks.sum_(added, f"statistics of {what}")
        return [
            t if kind == "sum" else self.ranks.gather(t, self.n_all, f"rows of {what}")
            for t, kind in zip(statistics, kinds, strict=True)
        ]

    def precision_gradient(self, bars: Bars) -> Tensor:
        return self.ranks.sum(super().precision_gradient(bars), "gradient in the prior")

    def second(self, bars: Bars) -> Gradients:
        assert self._collected is not None
        for number, part in enumerate(self.parts):
            observations = self._collected.of_part(number)
            part.exchange(observations, bars.parts[number], bars.log_precision)
        if self.n_data:
            gradients = super().second(bars.of(self.parts, self.own))
        else:
            network = [torch.zeros_like(t) for t in self.network_leaves]
            augment = [torch.zeros_like(t) for t in self.augment_leaves]
            gradients = network, augment
        self.ranks.sum_([t for part in gradients for t in part], "gradients of all data")
        return gradients
