"""How the passes are laid out in memory: inputs per chunk, what stays between the passes, and
whether it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from asdl_marglik.curvature.problem import Problem
from asdl_marglik.curvature.structure import parts_of
from asdl_marglik.curvature.term import Memory, Term

CHUNK_BYTES = 3 * 2**26  # activations of one chunk
# inputs; convolutions are inefficient below, caches overflow above
SMALLEST_CHUNK, LARGEST_CHUNK = (16, 512)


@dataclass(frozen=True)
class Arrangement:
    """What was decided, and the bytes it is expected to take."""

    chunk_inputs: int
    defer: bool  # make rows at the end, weight by weight
    kept_chunks: int  # whose graphs stay for the second pass
    bytes: int


def arrange(
    problem: Problem,
    parts: Sequence[Term],
    *,
    again: bool,
    budget: float,
    spend: bool = False,
    chunk: int | None = None,
) -> Arrangement:
    """The fastest layout within the budget, or the smallest there is.

    again: a second pass will follow. spend: use what is left of the budget to recompute less in it;
    otherwise memory does not grow with the number of augmented copies. chunk: inputs per chunk, if
    that is fixed.
    """
    memory = sum((part.memory(problem) for part in parts), Memory())
    inputs, outputs = problem.plan.bytes_of_uses
    n_inputs = problem.held * problem.copies
    seeds = problem.rows_per_datum if again else min(2, problem.rows_per_datum)
    per_input = problem.plan.bytes_per_input + seeds * outputs + memory.per_datum // problem.copies
    size = chunk or min(max(CHUNK_BYTES // per_input, SMALLEST_CHUNK), LARGEST_CHUNK)
    # gradients, and room to breathe
    working = memory.working + 2 * problem.element * sum(problem.sizes.values())
    kept, defer = memory.kept, False
    all_inputs = n_inputs * (inputs + problem.rows_per_datum * outputs)
    if problem.fast.deferred_rows and not again and all_inputs < memory.kept:
        kept, defer = all_inputs, True
        at_once = n_inputs * per_input <= memory.kept + CHUNK_BYTES
        size = chunk or (n_inputs if at_once else size)
    while chunk is None and size > problem.copies and kept + working + size * per_input > budget:
        size = max(problem.copies, size // 2)
    size = max(size, problem.copies)
    total = kept + working + min(size, n_inputs) * per_input
    keep = int(problem.fast.kept_chunks)
    if keep and spend:
        keep += max(0, int((budget - total) // (size * per_input)))
    return Arrangement(size, defer, keep, total)


def largest_fitting(structure: str, problem: Problem, *, again: bool, budget: float) -> int:
    """The most data points of such a block that fit the budget; 0 if not even one does."""
    low, high = 0, problem.n_data
    while low < high:
        n = (low + high + 1) // 2
        smaller = replace(problem, n_data=n)
        fits = (
            arrange(smaller, parts_of(structure, smaller), again=again, budget=budget).bytes
            <= budget
        )
        low, high = (n, high) if fits else (low, n - 1)
    return low


def free_memory(device: torch.device) -> float:
    """Bytes that can still be had; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next(
        (1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")),
        float("inf"),
    )
