"""How an estimate is computed, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from asdl_marglik import Arrangement, Plan, Term


def described(plan: Plan, parts: Sequence[Term], arrangement: Arrangement) -> str:
    """A line for each weight, and one for the passes.

    Args:
        plan: of the network.
        parts: terms of the log-determinant.
        arrangement: of the passes in memory.
    """
    labels = {name: part.label for part in parts for name in part.names}
    width = max(len(name) for name in ("parameter", *plan.weights))
    lines = [f"{'parameter':<{width}}  {'size':>10}  {'rows by':<26}  curvature"]
    for name, w in plan.weights.items():
        lines.append(f"{name:<{width}}  {w.numel():>10}  {plan.rules[name]:<26}  {labels[name]}")
    lines.append(
        f"piecewise linear: {plan.piecewise_linear}; inputs per chunk: "
        f"{arrangement.chunk_inputs}; about {arrangement.bytes / 1e6:.0f} MB"
    )
    return "\n".join(lines)
