"""How the passes are laid out in memory: inputs per chunk, what stays, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from asdl_marglik.curvature.problem import Problem
from asdl_marglik.curvature.structure import parts_of
from asdl_marglik.curvature.term import Memory, Term
from asdl_marglik.passes.room import room_on_machine

SHARE = 0.5  # of the free memory that an estimate may take, unless a budget is given
CHUNK_BYTES = 3 * 2**26  # activations of one chunk
# inputs; convolutions are inefficient below, caches overflow above
SMALLEST_CHUNK, LARGEST_CHUNK = (16, 512)


@dataclass(frozen=True)
class Arrangement:
    """How both passes are laid out in memory.

    Args:
        chunk_inputs: inputs of a chunk.
        defer: make rows at the end, weight by weight.
        kept_chunks: whose graphs stay for the second pass.
        bytes: that it is expected to take.
    """

    chunk_inputs: int
    defer: bool
    kept_chunks: int
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

    Args:
        problem: plan, prior, data points and rows.
        parts: terms of the log-determinant.
        again: a second pass will follow.
        budget: bytes that may be used.
        spend: use what is left of the budget to recompute less in the second pass; otherwise
            memory does not grow with the number of augmented copies.
        chunk: inputs per chunk, if that is fixed.
    """
    memory = sum((part.memory(problem) for part in parts), Memory())
    inputs, outputs = problem.plan.bytes_of_uses
    cotangents = _cotangents_at_once(problem, parts, again=again)
    of_activations = problem.plan.bytes_per_input + cotangents * outputs
    per_input = of_activations + memory.per_datum // problem.copies
    size = chunk or min(max(CHUNK_BYTES // per_input, SMALLEST_CHUNK), LARGEST_CHUNK)
    n_inputs = problem.held * problem.copies
    kept = memory.kept
    of_uses = n_inputs * (inputs + problem.rows_per_datum * outputs)
    defer = problem.fast.deferred_rows and not again and of_uses < memory.kept
    if defer:
        kept = of_uses
        at_once = n_inputs * per_input <= memory.kept + CHUNK_BYTES
        size = chunk or (n_inputs if at_once else size)
    gradients = 2 * problem.element * sum(problem.sizes.values())  # twice: some room besides
    fixed = kept + memory.working + gradients
    while chunk is None and size > problem.copies and fixed + size * per_input > budget:
        size = max(problem.copies, size // 2)
    size = max(size, problem.copies)
    total = fixed + min(size, n_inputs) * per_input
    keep = int(problem.fast.kept_chunks)
    if keep and spend:
        keep += max(0, int((budget - total) // (size * per_input)))
    return Arrangement(size, defer, keep, total)


def _cotangents_at_once(problem: Problem, parts: Sequence[Term], *, again: bool) -> int:
    """Cotangents of each operation that are in memory together."""
    few = min(2, problem.rows_per_datum)
    if not again:
        return few
    constant = problem.plan.piecewise_linear and problem.fast.piecewise_linear
    if problem.cotangents_move or not constant:
        return problem.rows_per_datum
    requests = [r for part in parts for r in (*part.requests(), *part.pulls(problem.plan))]
    small = ("reduce", "weighted")  # what a chunk makes of one cotangent before the next
    reduced = all(form in small or problem.sizes[name] == 1 for name, form in requests)
    return few if reduced else problem.rows_per_datum


def largest_fitting(structure: str, problem: Problem, *, again: bool, budget: float) -> int:
    """The most data points of such a block that fit the budget; 0 if not even one does.

    Args:
        structure: by name.
        problem: of the block.
        again: a second pass will follow.
        budget: bytes that may be used.
    """
    low, high = 0, problem.n_data
    while low < high:
        n = (low + high + 1) // 2
        smaller = replace(problem, n_data=n)
        parts = parts_of(structure, smaller)
        fits = arrange(smaller, parts, again=again, budget=budget).bytes <= budget
        low, high = (n, high) if fits else (low, n - 1)
    return low


@dataclass(frozen=True)
class Budget:
    """What an estimate may take, and how it is laid out within that.

    Args:
        bytes: that may be used, and spent to recompute less; None for a share of the free memory,
            used sparingly.
        chunk: inputs per chunk, if that is fixed.
        device: of the model.
    """

    bytes: float | None
    chunk: int | None
    device: torch.device

    @property
    def allowed(self) -> float:
        """Bytes that may be used."""
        return SHARE * free_memory(self.device) if self.bytes is None else self.bytes

    def arrange(self, problem: Problem, parts: list[Term], *, again: bool) -> Arrangement:
        """The layout of both passes, or of the first alone.

        Args:
            problem: plan, prior, data points and rows.
            parts: terms of the log-determinant.
            again: a second pass will follow.
        """
        return arrange(
            problem,
            parts,
            again=again,
            budget=self.allowed,
            spend=self.bytes is not None,
            chunk=self.chunk,
        )

    def refusal(
        self, structure: str, problem: Problem, arrangement: Arrangement, *, again: bool
    ) -> str | None:
        """Why an estimate does not fit, and what does; None if it fits.

        Args:
            structure: by name.
            problem: plan, prior, data points and rows.
            arrangement: the layout that was found.
            again: a second pass will follow.
        """
        allowed = self.allowed
        if arrangement.bytes <= allowed:
            return None
        points = largest_fitting(structure, problem, again=again, budget=allowed)
        choices = [f"a block of {points} data points"] if points else []
        for other in ("kfac", "diag"):
            if largest_fitting(other, problem, again=again, budget=allowed) == problem.n_data:
                choices.append(f"structure={other!r}")
                break
        advice = "nothing smaller fits: raise memory_budget"
        if choices:
            advice = f"use {' or '.join(choices)}"
        return (
            f"{structure} curvature of {problem.n_data} data points with {problem.rows_per_datum} "
            f"rows each needs about {arrangement.bytes / 1e9:.2g} GB, and {allowed / 1e9:.2g} GB "
            f"may be used (memory_budget); {advice}"
        )


def free_memory(device: torch.device) -> float:
    """Bytes that can still be had; infinite where the system does not say.

    Args:
        device: a GPU, or the CPU for the memory of the machine, within the limits of this process
            and of its group.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return room_on_machine()
