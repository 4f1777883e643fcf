"""What stays in memory while the first pass goes over the chunks.

`Collected` keeps the observations of every part: all that a second pass may need, and little where
observations are sums. `Deferred` keeps, of every chunk, the inputs and output cotangents of the
operations instead, and makes the observations at the end, one after the other: the rows of all
weights are never in memory together. It serves where no second pass follows and what it keeps is
smaller than the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from asdl_marglik.curvature.term import Part
from asdl_marglik.passes.forward import Chunk


class Residency(ABC):
    """Takes chunks in, gives observations of all data out."""

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Take in one more chunk."""

    @abstractmethod
    def observations(self) -> Iterator[Iterable[Tensor]]:
        """For every part, its observations of all data; each may be used only until the next is
        asked for.
        """


class Collected(Residency):
    """Observations of every part as they come: "rows" side by side in one buffer, "sum" added
    up.
    """

    def __init__(self, parts: Sequence[Part], n_data: int):
        self._parts, self._n_data, self._count = parts, n_data, 0
        self._held: list[list[Tensor]] = [[] for _ in parts]

    def add(self, chunk: Chunk) -> None:
        own = slice(self._count, self._count + chunk.n)
        self._count += chunk.n
        if self._count > self._n_data:  # reported, with the full count, when all batches are read
            return
        for part, held in zip(self._parts, self._held, strict=True):
            self._add(part, chunk, held, own)

    def _add(self, part: Part, chunk: Chunk, held: list[Tensor], own: slice) -> None:
        if chunk.n == self._n_data:  # a single chunk
            held.extend(part.observe(chunk))
            return
        places = [h[own] for h in held] if held and set(part.kinds) == {"rows"} else None
        found = list(part.observe(chunk, places))
        if not held:
            held.extend(
                o.new_empty(self._n_data, *o.shape[1:]) if kind == "rows" else torch.zeros_like(o)
                for kind, o in zip(part.kinds, found, strict=True)
            )
        for kind, kept, observation in zip(part.kinds, held, found, strict=True):
            if kind == "sum":
                kept += observation
            elif places is None or observation.data_ptr() != kept[own].data_ptr():
                kept[own] = observation

    def observations(self) -> Iterator[Iterable[Tensor]]:
        return iter(self._held)

    @property
    def held(self) -> list[list[Tensor]]:
        """Observations by part, to keep for a second pass."""
        return self._held


class Deferred(Residency):
    """Chunks without their graphs; an observation is made of them when it is asked for."""

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        chunk.drop_graph()
        self._chunks.append(chunk)

    def observations(self) -> Iterator[Iterable[Tensor]]:
        return (self._of(part) for part in self._parts)

    def _of(self, part: Part) -> Iterator[Tensor]:
        by_chunk = [iter(part.observe(chunk)) for chunk in self._chunks]
        for kind in part.kinds:
            pieces = [next(observations) for observations in by_chunk]
            if len(pieces) == 1:
                yield pieces[0]
            else:
                yield torch.cat(pieces) if kind == "rows" else torch.stack(pieces).sum(0)
