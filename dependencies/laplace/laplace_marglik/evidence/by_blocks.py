"""The evidence of all data, with gradients in the augmentation that are estimated from one block at
a time.

The curvature statistics of all data are sums over data, G = sum_i G_i(eta). One pass over all data
gives G and the derivative of the evidence in it; the derivative in eta is then a sum over data too,
estimated without bias by a block:

    d log q / d eta = sum_i <d log q / d G, d G_i / d eta>
                   ~= (N/S) sum_{i in block} <d log q / d G, d G_i / d eta>

Steps of one round share G, so that a step costs as much as its block (after Immer et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asdl_marglik import Passes, PrecisionLost
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.block import PreparedBlock
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood


@dataclass
class _Turns:
    """All data in blocks, of which each second pass takes the next."""

    whole: Passes
    blocks: Sequence[tuple[Any, Tensor]]
    order: Iterator[int]

    def second(
        self, f_bar: Tensor | None, bars: list[list[Tensor]], log_precision: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of the next block, times N/S, from the cotangents of all data."""
        number, lengths = next(self.order), self.whole.batch_lengths
        own = slice(sum(lengths[:number]), sum(lengths[: number + 1]))
        chosen = [
            [
                bar[own] if kind == "rows" else bar
                for bar, kind in zip(part_bars, part.kinds, strict=True)
            ]
            for part, part_bars in zip(self.whole.parts, bars, strict=True)
        ]
        block = self.whole.only(number, *self.blocks[number])
        found = block.second(None if f_bar is None else f_bar[own], chosen, log_precision)
        scale = sum(lengths) / lengths[number]
        network, augment = ([scale * gradient for gradient in part] for part in found)
        return network, augment


def evidence_by_blocks(
    ml: MarginalLikelihood, blocks: Sequence[tuple[Any, Tensor]], generator: torch.Generator
) -> Callable[[], Evidence]:
    """A function that evaluates all data for the current prior; each gradient in the augmentation
    is of a new block.

    blocks: all data as batches (x, y) that can be read any number of times. generator: of their
    order.
    """
    order = _rounds(len(blocks), generator)

    def prepared() -> PreparedBlock:
        whole = ml._all_data(blocks)
        for part in whole.passes.parts:
            if not part.additive:
                raise MarglikError(
                    "gradients by blocks need a curvature that is a sum over data (kfac, diag), "
                    f"but that of {part.names[0]} is a kernel; use ml.full_batch"
                )
        whole.passes.reuse = True
        whole.passes.instead = _Turns(whole.passes, blocks, order).second
        return whole

    whole = ml._with_plan(prepared)

    def evaluate() -> Evidence:
        nonlocal whole
        try:
            return ml._evidence(whole)
        except PrecisionLost:
            ml.in_double = True
            whole = ml._with_plan(prepared)
            return ml._evidence(whole)

    return evaluate


def _rounds(count: int, generator: torch.Generator) -> Iterator[int]:
    """Numbers below `count` in random order, each once before any comes again."""
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
