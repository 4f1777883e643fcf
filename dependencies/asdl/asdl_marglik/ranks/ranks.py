"""Processes that work together: a few collectives of torch.distributed, each with the name of the
step it belongs to.

Every rank has to make the same calls in the same order. What is reduced or gathered is bitwise the
same on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from asdl_marglik.errors import CurvatureError

T = TypeVar("T")


class RanksError(CurvatureError):
    """A rank did not answer: it has died, hangs, or does something else."""


class Ranks:
    """The ranks of a process group, which has to be initialised (`torchrun` and
    `init_process_group`).

    group: of torch.distributed; None for all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def spans(self, n: int) -> list[slice]:
        """n things shared out in order, as equally as possible: a slice for every rank."""
        bounds = [-(-n * rank // self.size) for rank in range(self.size + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def owns(self, number: int) -> bool:
        """Whether a thing, of which each rank takes one in turn, is this rank's."""
        return number % self.size == self.rank

    def sum_(self, tensors: Sequence[Tensor], step: str) -> None:
        """Replace tensors by their sums over ranks."""
        with self.named(step):
            works = [dist.all_reduce(t, group=self.group, async_op=True) for t in tensors]
            for work in works:
                work.wait()

    def sum(self, tensor: Tensor, step: str) -> Tensor:
        """The sum over ranks, contiguous."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.sum_([total], step)
        return total

    def largest(self, value: float, step: str) -> float:
        """The largest of the ranks' numbers."""
        found = torch.tensor([value], dtype=torch.float64, device=self._device)
        with self.named(step):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.item()

    def gather(self, tensor: Tensor, n: int, step: str) -> Tensor:
        """All n entries along the first axis, of which each rank has those of its span."""
        spans = self.spans(n)
        longest = spans[0].stop - spans[0].start
        # collectives take pieces of one size only
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        pieces = [torch.empty_like(padded) for _ in spans]
        with self.named(step):
            dist.all_gather(pieces, padded, group=self.group)
        return torch.cat(
            [piece[: span.stop - span.start] for piece, span in zip(pieces, spans, strict=True)]
        )

    def visits(self, tensors: Sequence[Tensor], n: int, step: str) -> Iterator[list[Tensor]]:
        """The tensors of one rank after the other, each [entries of its span, ...]; n entries in
        all.
        """
        for source, span in enumerate(self.spans(n)):
            if source == self.rank:
                visitors = [t.contiguous() for t in tensors]
            else:
                visitors = [t.new_empty(span.stop - span.start, *t.shape[1:]) for t in tensors]
            with self.named(step):
                for t in visitors:
                    dist.broadcast(t, group_src=source, group=self.group)
            yield visitors

    def columns(self, rows: Tensor, n: int, k: int, step: str) -> Tensor:
        """Own columns [n k, P_r] of all rows, of which each rank has k for each of the n things in
        its span.
        """
        mine = self.spans(rows.shape[1])
        sent = [rows[:, own].reshape(-1) for own in mine]
        width = _length(mine[self.rank])
        return self._swap(sent, [k * _length(span) * width for span in self.spans(n)], step).view(
            n * k, width
        )

    def rows(self, columns: Tensor, n_own: int, size: int, k: int, step: str) -> Tensor:
        """The way back: own rows [n_own, P] from the columns of all ranks."""
        widths = [_length(own) for own in self.spans(size)]
        sent = [
            columns[k * span.start : k * span.stop].reshape(-1)
            for span in self.spans(len(columns) // k)
        ]
        found = self._swap(sent, [n_own * width for width in widths], step)
        pieces = zip(found.split([n_own * width for width in widths]), widths, strict=True)
        return torch.cat([piece.view(n_own, width) for piece, width in pieces], 1)

    def _swap(self, sent: Sequence[Tensor], received: list[int], step: str) -> Tensor:
        """Give each rank its piece, and take those of all ranks, one after the other."""
        found = sent[0].new_empty(sum(received))
        with self.named(step):
            dist.all_to_all_single(
                found, torch.cat(list(sent)), received, [len(s) for s in sent], group=self.group
            )
        return found

    def from_first(self, compute: Callable[[], T], step: str) -> T:
        """What the first rank computes, on all ranks; if it fails, all do."""
        found: list[Any] = [None, None]
        if self.first:
            try:
                found[0] = compute()
            except Exception as error:
                found[1] = error
        with self.named(step):
            dist.broadcast_object_list(found, group_src=0, group=self.group, device=self._device)
        if found[1] is not None:
            raise found[1]
        return found[0]

    def agree(self, values: Sequence[float], step: str) -> bool:
        """Whether all ranks have the same numbers."""
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        extremes = torch.cat([own, -own])
        with self.named(step):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        return bool((extremes == torch.cat([own, -own])).all())

    def barrier(self, step: str) -> None:
        """Wait for all ranks."""
        with self.named(step):
            if dist.get_backend(self.group) == "gloo":
                dist.monitored_barrier(self.group)  # which names the rank that is missing
            else:
                dist.barrier(self.group)

    @contextlib.contextmanager
    def named(self, step: str) -> Iterator[None]:
        """Errors of torch.distributed inside become a `RanksError` that names the step."""
        try:
            yield
        except RuntimeError as error:
            if not _of_a_collective(error):
                raise
            # no place in gloo
            reason = re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
            raise RanksError(
                f"rank {self.rank} of {self.size} got no answer in the step '{step}' ({reason}); "
                "another rank has died, or hangs for longer than the timeout of collectives"
            ) from error

    @property
    def _device(self) -> torch.device:
        cuda = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _length(span: slice) -> int:
    return span.stop - span.start


def _of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it: gloo has no exception class of its own."""
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "NCCL", "monitoredBarrier")
    )
