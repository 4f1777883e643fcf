"""The evidence of all data, with augmentation gradients estimated from blocks of them.

The curvature statistics of all data are sums over data, G = sum_i G_i(eta). One pass over all data
gives G and the derivative of the evidence in it; the derivative in eta is then a sum over data too,
estimated without bias by one block or several, S data points together:

    d log q / d eta = sum_i <d log q / d G, d G_i / d eta>
                   ~= (N/S) sum_{i in blocks} <d log q / d G, d G_i / d eta>

Steps of one round share G, so that a step costs as much as its blocks (after Immer et al. 2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from asdl_marglik import PrecisionLost
from laplace_marglik import checks
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.block import PreparedBlock
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood


def evidence_by_blocks(
    ml: MarginalLikelihood,
    blocks: Sequence[tuple[Any, Tensor]],
    generator: torch.Generator,
    per_gradient: int = 1,
) -> Callable[[], Evidence]:
    """A function that evaluates all data for the current prior.

    Each gradient in the augmentation is of new blocks.

    Args:
        ml: with an additive structure.
        blocks: all data as batches (x, y) that can be read any number of times.
        generator: of their order.
        per_gradient: blocks over which a gradient in the augmentation is summed; all of them give
            that of all data.
    """
    checks.positive_integer("per_gradient", per_gradient)
    if per_gradient > len(blocks):
        raise MarglikError(
            f"per_gradient={per_gradient}, but there are {len(blocks)} blocks; give at most as "
            "many, or smaller blocks"
        )
    order = _rounds(len(blocks), generator)

    def next_batches() -> Iterator[tuple[int, Any, Tensor]]:
        for number in itertools.islice(order, per_gradient):
            yield number, *blocks[number]

    def prepared() -> PreparedBlock:
        whole = ml._all_data(blocks)
        for part in whole.passes.parts:
            if not part.additive:
                raise MarglikError(
                    "gradients by blocks need a curvature that is a sum over data (kfac, diag), "
                    f"but that of {part.names[0]} is a kernel; use ml.full_batch"
                )
        whole.passes.reuse = True
        whole.passes.next_batches = next_batches
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
