"""Whether an estimate fits in memory, before anything is computed."""

from __future__ import annotations

import torch
from asdl_marglik import Arrangement, Part, Problem, arrange, free_memory, largest_fitting

from .errors import MarglikError

SHARE = 0.5  # of the free memory that an estimate may take, unless a budget is given


def arranged(
    structure: str, problem: Problem, parts: list[Part], again: bool, budget: float | None, chunk: int | None,
    device: torch.device,
) -> Arrangement:  # fmt: skip
    """The layout of both passes in memory; refuses what cannot fit, naming what does."""
    allowed = SHARE * free_memory(device) if budget is None else budget
    found = arrange(problem, parts, again=again, budget=allowed, spend=budget is not None, chunk=chunk)
    if found.bytes <= allowed:
        return found
    points = largest_fitting(structure, problem, again=again, budget=allowed)
    choices = [f"a block of {points} data points"] if points else []
    for other in ("kfac", "diag"):
        if largest_fitting(other, problem, again=again, budget=allowed) == problem.n_data:
            choices.append(f"structure={other!r}")
            break
    raise MarglikError(
        f"{structure} curvature of {problem.n_data} data points with {problem.rows_per_datum} rows each needs about "
        f"{found.bytes / 1e9:.2g} GB, and {allowed / 1e9:.2g} GB may be used (memory_budget); "
        + (f"use {' or '.join(choices)}" if choices else "nothing smaller fits: raise memory_budget")
    )
