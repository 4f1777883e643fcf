"""Structures of the curvature: which parts cover which weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from asdl_marglik.curvature.dense import Dense, Diagonal
from asdl_marglik.curvature.kernel.gram import Gram
from asdl_marglik.curvature.kernel.row_storage import Factors, HalfRows, Rows, SharedFactors, Store
from asdl_marglik.curvature.kron import Kron
from asdl_marglik.curvature.problem import Problem
from asdl_marglik.curvature.term import Term
from asdl_marglik.errors import CurvatureError
from asdl_marglik.ranks.sharded_gram import ShardedGram

# a weight without a Kronecker form gets its exact block up to this side, else its diagonal
EXACT_BLOCK = 1024
EXACT_BLOCK_ROWS = 2**24  # and up to this many numbers in its rows
FACTOR_MARGIN = 2  # elementwise products of factors run below the speed of matrix products
FACTOR_PAIRS = 2**25  # entries of the products of factors at most
# numbers in rows of a weight that are kept: then a second pass need not compute them again
KEPT_ROWS = 2**19


def _exact(problem: Problem, names: tuple[str, ...]) -> Term:
    """The exact block of some weights, in the smaller of row space and weight space (Sylvester:
    same determinant).
    """
    sizes = {name: problem.sizes[name] for name in names}
    if problem.n_rows <= sum(sizes.values()):
        return _gram(problem, names)
    # conditioning tells rows apart; there are more of them than weights here, so they are small
    keep = _keeps(problem, sum(sizes.values())) or problem.conditioning is not None
    return Dense(
        sizes,
        problem.groups,
        keep=keep,
        weighted=problem.fast.weighted_cotangents,
        double=problem.double,
        conditioning=problem.conditioning,
    )


def _keeps(problem: Problem, size: int) -> bool:
    """Whether rows of so many numbers stay for the second pass."""
    return problem.fast.kept_rows and problem.n_rows * size <= KEPT_ROWS


def _gram(problem: Problem, names: tuple[str, ...]) -> Term:
    stores = [_store(problem, name) for name in names]
    # with more rows than weights the kernel is singular: rounding would fill what should be its
    # null space
    double = problem.double or problem.n_rows > sum(problem.sizes[name] for name in names)
    kind: Callable[..., Gram] = Gram
    if problem.ranks is not None:
        kind = partial(ShardedGram, ranks=problem.ranks, n_data=problem.n_data)
    return kind(
        stores,
        problem.groups,
        packed=problem.fast.packed_kernels,
        double=double,
        conditioning=problem.conditioning,
    )


def _store(problem: Problem, name: str) -> Store:
    """Rows, or the factors of rows where their products cost less for each pair of data points."""
    rows = (HalfRows if problem.half_rows else Rows)(name, mirrored=problem.fast.mirrored_kernels)
    plan, k = problem.plan, problem.rows_per_datum
    single = name in plan.kronecker & plan.factor_sides.keys() and len(plan.uses_of[name]) == 1
    if (
        not single
        or plan.uses_of[name][0][1] == "bias"
        or not isinstance(problem.groups[name], int)
    ):
        return rows
    t, (o, d) = problem.copies * plan.positions[name], plan.factor_sides[name]
    if problem.fast.shared_factors and k > 1 and t > 1:
        cheaper = FACTOR_MARGIN * (t**2 * d + k * o * t**2 + k**2 * o * t) < k**2 * d * o
        return SharedFactors(name) if cheaper else rows
    cheaper = FACTOR_MARGIN * t**2 * (d + o) < d * o and (t * problem.n_rows) ** 2 < FACTOR_PAIRS
    return Factors(name) if problem.fast.factored_rows and cheaper else rows


def _ntk(problem: Problem) -> list[Term]:
    return [_gram(problem, tuple(problem.sizes))]


def _full(problem: Problem) -> list[Term]:
    return [_exact(problem, tuple(problem.sizes))]


def _blockdiag(problem: Problem) -> list[Term]:
    blocks: dict[str, list[str]] = {}
    for name in problem.sizes:
        blocks.setdefault(
            name.rpartition(".")[0] if problem.granularity == "module" else name, []
        ).append(name)
    return [_exact(problem, tuple(names)) for names in blocks.values()]


def _diag(problem: Problem) -> list[Term]:
    return [
        Diagonal({name: size}, problem.groups, keep=_keeps(problem, size))
        for name, size in problem.sizes.items()
    ]


def _kfac(problem: Problem) -> list[Term]:
    return [_kron(problem, name, size) for name, size in problem.sizes.items()]


def _kron(problem: Problem, name: str, size: int) -> Term:
    if name not in problem.plan.kronecker:
        exact = (
            min(size, problem.n_rows) <= EXACT_BLOCK and size * problem.n_rows <= EXACT_BLOCK_ROWS
        )
        return _exact(problem, (name,)) if exact else Diagonal({name: size}, problem.groups)
    weight = problem.plan.weights[name]
    bias = problem.plan.uses_of[name][0][1] == "bias"
    reduce = problem.setting == "reduce"
    # the side that has fewer: rows of all data, or features
    observed = problem.n_data * (1 if reduce else problem.plan.positions[name])
    return Kron(
        name,
        problem.groups[name],
        problem.setting,
        problem.n_data,
        bias=bias,
        keep_inputs=problem.fast.factored_sides and observed < (1 if bias else size // len(weight)),
        keep_outputs=reduce and (problem.n_rows <= len(weight) or _keeps(problem, len(weight))),
        called_once=len(problem.plan.uses_of[name]) == 1,
        transposed=problem.plan.rules[name] == "matmul",
        by_moment=problem.fast.input_moments,
        double=problem.double,
    )


Guarantee = Literal["exact", "bound", "approximation"]


@dataclass(frozen=True)
class Structure:
    """Which parts cover which weights, and what can be said of their determinant.

    guarantee: "exact" for all rows at once, "bound" if it is never below the determinant of
    independent blocks of them.
    """

    parts: Callable[[Problem], list[Term]]
    guarantee: Guarantee = "approximation"

    def __call__(self, problem: Problem) -> list[Term]:
        return self.parts(problem)


STRUCTURES: dict[str, Callable[[Problem], list[Term]]] = {
    "ntk": Structure(_ntk, "exact"),
    "full": Structure(_full, "exact"),
    "blockdiag": Structure(_blockdiag, "bound"),
    "kfac": Structure(_kfac, "approximation"),
    "diag": Structure(_diag, "bound"),
}


def guarantee_of(structure: str) -> Guarantee:
    """What a structure says of itself; nothing, if it is a plain function that somebody
    registered.
    """
    return getattr(STRUCTURES[structure], "guarantee", "approximation")


def parts_of(structure: str, problem: Problem) -> list[Term]:
    """The parts of a named structure; every weight is in exactly one of them."""
    if structure not in STRUCTURES:
        raise CurvatureError(
            f"unknown structure {structure!r}; choose one of {', '.join(STRUCTURES)}"
        )
    return STRUCTURES[structure](problem)
