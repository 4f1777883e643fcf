"""Whether an estimate fits in memory, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asdl_marglik import Arrangement, Problem, Term, arrange, free_memory, largest_fitting
from laplace_marglik.errors import MarglikError

SHARE = 0.5  # of the free memory that an estimate may take, unless a budget is given


@dataclass(frozen=True)
class Budget:
    """What an estimate may take, and how it is laid out within that."""

    bytes: float | None  # None: a share of the free memory, used sparingly
    chunk: int | None
    device: torch.device

    @property
    def allowed(self) -> float:
        return SHARE * free_memory(self.device) if self.bytes is None else self.bytes

    def arrange(self, problem: Problem, parts: list[Term], *, again: bool) -> Arrangement:
        """The layout of both passes in memory, or of the first alone."""
        return arrange(
            problem,
            parts,
            again=again,
            budget=self.allowed,
            spend=self.bytes is not None,
            chunk=self.chunk,
        )

    def check(self, structure: str, problem: Problem, found: Arrangement, *, again: bool) -> None:
        """Refuse what cannot fit, naming what does."""
        allowed = self.allowed
        if found.bytes <= allowed:
            return
        points = largest_fitting(structure, problem, again=again, budget=allowed)
        choices = [f"a block of {points} data points"] if points else []
        for other in ("kfac", "diag"):
            if largest_fitting(other, problem, again=again, budget=allowed) == problem.n_data:
                choices.append(f"structure={other!r}")
                break
        raise MarglikError(
            f"{structure} curvature of {problem.n_data} data points with {problem.rows_per_datum} "
            f"rows each needs about {found.bytes / 1e9:.2g} GB, and {allowed / 1e9:.2g} GB may be "
            "used (memory_budget); "
            + (
                f"use {' or '.join(choices)}"
                if choices
                else "nothing smaller fits: raise memory_budget"
            )
        )
