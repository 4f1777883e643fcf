"""Blocks of weights that a block-diagonal curvature takes for independent: a partition of them.

Any partition gives a log-determinant that is not below that of all weights together (Fischer), and
merging two of its blocks never raises it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from asdl_marglik.errors import CurvatureError
from asdl_marglik.watch.model import matches

# blocks by name: each parameter tensor; the parameters of a module; those of all modules that have
# the same parent, as the layers of a residual block
Named = Literal["tensor", "module", "parent"]
# or lists of name patterns, one list for each block
Granularity = Named | Sequence[Sequence[str]]
NAMED: tuple[str, ...] = get_args(Named)
SHOWN = 5  # names in an error


def blocks_of(names: Iterable[str], granularity: Granularity) -> dict[str, tuple[str, ...]]:
    """The weights of each block, by a name of the block; every weight is in exactly one.

    Examples:
        >>> blocks_of(["0.weight", "0.bias", "2.weight"], "module")
        {'0': ('0.weight', '0.bias'), '2': ('2.weight',)}
        >>> blocks_of(["0.weight", "0.bias", "2.weight"], [["*.weight"], ["0.bias"]])
        {'*.weight': ('0.weight', '2.weight'), '0.bias': ('0.bias',)}

    Args:
        names: of all weights.
        granularity: "tensor", "module", "parent", or name patterns of each block.
    """
    if not isinstance(granularity, str):
        return _by_patterns(list(names), granularity)
    if granularity not in NAMED:
        raise CurvatureError(
            f"blocks must be one of {', '.join(NAMED)}, or lists of name patterns, one for each "
            f"block, got {granularity!r}"
        )
    blocks: dict[str, list[str]] = {}
    for name in names:
        module = name.rpartition(".")[0]
        block = {"tensor": name, "module": module, "parent": module.rpartition(".")[0]}[granularity]
        blocks.setdefault(block, []).append(name)
    return {block: tuple(members) for block, members in blocks.items()}


def _by_patterns(names: list[str], patterns: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Blocks of the weights that fit their patterns, if these make a partition."""
    if any(isinstance(block, str) or not block for block in patterns):
        raise CurvatureError(
            "blocks must be lists of name patterns, one list for each block, as "
            f'[["0.*", "2.bias"], ["2.weight"]], got {list(patterns)!r}'
        )
    fitting = {name: [block for block in patterns if matches(name, block)] for name in names}
    missing = [name for name, blocks in fitting.items() if not blocks]
    doubled = [name for name, blocks in fitting.items() if len(blocks) > 1]
    unused = [p for block in patterns for p in block if not any(matches(n, [p]) for n in names)]
    for faulty, what in (
        (missing, "in none of the blocks"),
        (doubled, "in more than one of the blocks"),
        (unused, "patterns that fit no weight"),
    ):
        if faulty:
            more = f" and {len(faulty) - SHOWN} more" if len(faulty) > SHOWN else ""
            raise CurvatureError(
                f"blocks must have every weight exactly once; {', '.join(faulty[:SHOWN])}{more}: "
                f"{what}; weights are named {', '.join(names[:SHOWN])}"
                + (", ..." if len(names) > SHOWN else "")
            )
    return {
        ", ".join(block): tuple(name for name in names if matches(name, block))
        for block in patterns
    }
