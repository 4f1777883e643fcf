"""Processes that work together, by a few collectives of torch.distributed.

Every rank has to make the same calls in the same order. What is reduced or gathered is bitwise the
same on all ranks. Every collective takes the name of the step it belongs to, for error messages.
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

from asdl_marglik.errors import RanksError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group, which `torch.distributed` has to have initialised.

    Args:
        group: of torch.distributed; None for all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def spans(self, n: int) -> list[slice]:
        """A span of n things for every rank, in order and as equal as possible."""
        bounds = [-(-n * rank // self.size) for rank in range(self.size + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def owns(self, number: int) -> bool:
        """Whether this rank has the thing of this number, if ranks take things in turn."""
        return number % self.size == self.rank

    def sum_(self, tensors: Sequence[Tensor], step: str) -> None:
        """Replace tensors by their sums over ranks, in place.

        Args:
            tensors: contiguous, of the same shapes on all ranks.
            step: name for error messages.
        """
        with self.named(step):
            works = [dist.all_reduce(t, group=self.group, async_op=True) for t in tensors]
            for work in works:
                work.wait()

    def sum(self, tensor: Tensor, step: str) -> Tensor:
        """The sum of a tensor over ranks, as a new contiguous tensor without a graph.

        Args:
            tensor: of the same shape on all ranks.
            step: name for error messages.
        """
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.sum_([total], step)
        return total

    def sums(self, tensors: Sequence[Tensor], step: str) -> list[Tensor]:
        """The sums of several small tensors over ranks, in one message in float64.

        Args:
            tensors: of the same shapes on all ranks.
            step: name for error messages.
        """
        message = torch.cat([t.detach().double().flatten() for t in tensors])
        parts = self.sum(message, step).split([t.numel() for t in tensors])
        return [part.view_as(t).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]

    def largest(self, value: float, step: str) -> float:
        """The largest of the ranks' numbers.

        Args:
            value: the number of this rank.
            step: name for error messages.
        """
        maximum = torch.tensor([value], dtype=torch.float64, device=self._device)
        with self.named(step):
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        return maximum.item()

    def gather(self, tensor: Tensor, n: int, step: str) -> Tensor:
        """All n entries [n, ...], of which each rank has those of its span.

        Args:
            tensor: entries [entries of the span, ...] of this rank.
            n: number of entries of all ranks together.
            step: name for error messages.
        """
        spans = self.spans(n)
        longest = _length(spans[0])
        # collectives take pieces of one size only
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        pieces = [torch.empty_like(padded) for _ in spans]
        with self.named(step):
            dist.all_gather(pieces, padded, group=self.group)
        entries = [piece[: _length(span)] for piece, span in zip(pieces, spans, strict=True)]
        return torch.cat(entries)

    def visits(self, tensors: Sequence[Tensor], n: int, step: str) -> Iterator[list[Tensor]]:
        """The tensors of one rank after the other, each [entries of its span, ...].

        Args:
            tensors: those of this rank.
            n: number of entries of all ranks together.
            step: name for error messages.
        """
        for source, span in enumerate(self.spans(n)):
            if source == self.rank:
                visitors = [t.contiguous() for t in tensors]
            else:
                visitors = [t.new_empty(_length(span), *t.shape[1:]) for t in tensors]
            with self.named(step):
                for t in visitors:
                    dist.broadcast(t, group_src=source, group=self.group)
            yield visitors

    def columns(self, rows: Tensor, n: int, k: int, step: str) -> Tensor:
        """This rank's columns [n k, P_r] of all rows; before, each rank has all columns of some.

        Args:
            rows: rows [k times the data points of the span, P] of this rank.
            n: number of data points of all ranks together.
            k: rows per datum.
            step: name for error messages.
        """
        column_spans = self.spans(rows.shape[1])
        width = _length(column_spans[self.rank])
        sent = [rows[:, span].reshape(-1) for span in column_spans]
        sizes = [k * _length(span) * width for span in self.spans(n)]
        return self._swap(sent, sizes, step).view(n * k, width)

    def rows(self, columns: Tensor, n_own: int, size: int, k: int, step: str) -> Tensor:
        """The way back from `columns`: this rank's rows [n_own, P].

        Args:
            columns: columns [n k, P_r] of this rank.
            n_own: number of rows of this rank.
            size: number of columns P of all ranks together.
            k: rows per datum.
            step: name for error messages.
        """
        data_spans = self.spans(len(columns) // k)
        sent = [columns[k * span.start : k * span.stop].reshape(-1) for span in data_spans]
        widths = [_length(span) for span in self.spans(size)]
        sizes = [n_own * width for width in widths]
        pieces = self._swap(sent, sizes, step).split(sizes)
        blocks = [piece.view(n_own, width) for piece, width in zip(pieces, widths, strict=True)]
        return torch.cat(blocks, 1)

    def _swap(self, sent: Sequence[Tensor], sizes: list[int], step: str) -> Tensor:
        """Send each rank its piece; the pieces that the ranks sent to this one, in their order.

        Args:
            sent: one flat tensor for every rank.
            sizes: number of entries that come from every rank.
            step: name for error messages.
        """
        received = sent[0].new_empty(sum(sizes))
        sent_sizes = [len(piece) for piece in sent]
        with self.named(step):
            dist.all_to_all_single(
                received, torch.cat(list(sent)), sizes, sent_sizes, group=self.group
            )
        return received

    def from_first(self, compute: Callable[[], T], step: str) -> T:
        """What the first rank computes, on all ranks; if it fails, all raise its error.

        Args:
            compute: called on the first rank only; its result can be pickled.
            step: name for error messages.
        """
        result_and_error: list[Any] = [None, None]
        if self.first:
            try:
                result_and_error[0] = compute()
            except Exception as error:
                result_and_error[1] = error
        with self.named(step):
            dist.broadcast_object_list(
                result_and_error, group_src=0, group=self.group, device=self._device
            )
        result, failure = result_and_error
        if failure is not None:
            raise failure
        return result

    def agree(self, values: Sequence[float], step: str) -> bool:
        """Whether all ranks have the same numbers.

        Args:
            values: those of this rank, as many as on the others.
            step: name for error messages.
        """
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        bounds = torch.cat([numbers, -numbers])
        extremes = bounds.clone()
        with self.named(step):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        return bool((extremes == bounds).all())

    def barrier(self, step: str) -> None:
        """Wait for all ranks."""
        with self.named(step):
            if dist.get_backend(self.group) == "gloo":
                dist.monitored_barrier(self.group)  # its error names the rank that is missing
            else:
                dist.barrier(self.group)

    @contextlib.contextmanager
    def named(self, step: str) -> Iterator[None]:
        """Context in which errors of torch.distributed become a `RanksError` that names the step.

        Args:
            step: the name.
        """
        try:
            yield
        except RuntimeError as error:
            if not _of_a_collective(error):
                raise
            raise RanksError(
                f"rank {self.rank} of {self.size} got no answer in the step '{step}' "
                f"({_reason(error)}); another rank has died, or hangs for longer than the timeout "
                "of collectives"
            ) from error

    @property
    def _device(self) -> torch.device:
        """Where the backend wants tensors to be."""
        if dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _reason(error: RuntimeError) -> str:
    """The first sentence of an error, without the place in the source of gloo it starts with."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error))
    line = text.partition("\n")[0]
    return line.partition(". ")[0]


def _length(span: slice) -> int:
    """Number of entries in a span."""
    return span.stop - span.start


def _of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it; the errors of gloo have no class of their own."""
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error) for word in ("gloo", "NCCL", "monitoredBarrier"))
