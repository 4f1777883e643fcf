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
    table = [("parameter", "size", "rows by", "curvature")]
    for name, weight in plan.weights.items():
        table.append((name, str(weight.numel()), plan.rules[name], labels[name]))
    names, sizes, rules, _ = (max(map(len, column)) for column in zip(*table, strict=True))
    lines = [
        f"{name:<{names}}  {size:>{sizes}}  {rule:<{rules}}  {label}"
        for name, size, rule, label in table
    ]
    lines.append(
        f"piecewise linear: {plan.piecewise_linear}; inputs per chunk: "
        f"{arrangement.chunk_inputs}; about {arrangement.bytes / 1e6:.0f} MB"
    )
    return "\n".join(lines)
