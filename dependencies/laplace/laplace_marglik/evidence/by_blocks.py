"""The evidence of all data, with augmentation gradients estimated from one block at a time.

The curvature statistics of all data are sums over data, G = sum_i G_i(eta). One pass over all data
gives G and the derivative of the evidence in it; the derivative in eta is then a sum over data too,
estimated without bias by a block:

    d log q / d eta = sum_i <d log q / d G, d G_i / d eta>
                   ~= (N/S) sum_{i in block} <d log q / d G, d G_i / d eta>

Steps of one round share G, so that a step costs as much as its block (after Immer et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from asdl_marglik import PrecisionLost
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.block import PreparedBlock
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood


def evidence_by_blocks(
    ml: MarginalLikelihood, blocks: Sequence[tuple[Any, Tensor]], generator: torch.Generator
) -> Callable[[], Evidence]:
    """A function that evaluates all data for the current prior.

    Each gradient in the augmentation is of a new block.

    Args:
        ml: with an additive structure.
        blocks: all data as batches (x, y) that can be read any number of times.
        generator: of their order.
    """
    order = _rounds(len(blocks), generator)

    def next_batch() -> tuple[int, Any, Tensor]:
        number = next(order)
        return number, *blocks[number]

    def prepared() -> PreparedBlock:
        whole = ml._all_data(blocks)
        for part in whole.passes.parts:
            if not part.additive:
                raise MarglikError(
                    "gradients by blocks need a curvature that is a sum over data (kfac, diag), "
                    f"but that of {part.names[0]} is a kernel; use ml.full_batch"
                )
        whole.passes.reuse = True
        whole.passes.next_batch = next_batch
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
