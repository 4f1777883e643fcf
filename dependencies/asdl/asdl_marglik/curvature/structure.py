"""Structures of the curvature: which parts cover which weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from asdl_marglik.curvature.blocks import blocks_of
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
    """The exact block of some weights, in the smaller of row space and weight space.

    Both have the same determinant (Sylvester).
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
    blocks = blocks_of(problem.sizes, problem.granularity)
    return [_exact(problem, names) for names in blocks.values()]


def _diag(problem: Problem) -> list[Term]:
    return [_diagonal(problem, name, size) for name, size in problem.sizes.items()]


def _diagonal(problem: Problem, name: str, size: int) -> Term:
    """The diagonal of one weight; from factors where its rows have a single position."""
    plan = problem.plan
    uses = plan.uses_of[name]
    single = name in plan.kronecker and problem.copies * plan.positions[name] == len(uses) == 1
    return Diagonal(
        {name: size},
        problem.groups,
        keep=_keeps(problem, size),
        factored=problem.fast.factored_rows and single and uses[0][1] != "bias",
        transposed=plan.rules[name] == "matmul",
    )


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
        transposed=problem.plan.rules[name] == "matmul" and not bias,
        by_moment=problem.fast.input_moments,
        double=problem.double,
    )


Guarantee = Literal["exact", "bound", "approximation"]


@dataclass(frozen=True)
class Structure:
    """A named approximation of the curvature: which parts cover which weights.

    Args:
        name: Key in `STRUCTURES`, and what users write (`structure="kfac"`, `--method kfac`).
        parts: Function from a problem to its terms; every weight is in exactly one of them.
        guarantee: What its log-determinant is for all rows at once: "exact"; a "bound", never
            below that of independent blocks of them; or an "approximation", which says nothing.
        additive: Whether its statistics are sums over data, so that the curvature of all data
            takes the memory of a batch.
        label: Name in figures and tables; `name` if empty.
        colour: Colour in figures, as matplotlib reads it.
    """

    name: str
    parts: Callable[[Problem], list[Term]]
    guarantee: Guarantee = "approximation"
    additive: bool = False
    label: str = ""
    colour: str = "#999999"

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name)


STRUCTURES: dict[str, Structure] = {}


def register_structure(structure: Structure) -> Structure:
    """Make a structure known by its name to everything that offers, draws or checks structures.

    Args:
        structure: The new one; its name must not be taken.
    """
    if structure.name in STRUCTURES:
        raise CurvatureError(f"there is already a structure named {structure.name!r}")
    STRUCTURES[structure.name] = structure
    return structure


# colours that are told apart with any colour vision
register_structure(Structure("ntk", _ntk, "exact", label="NTK", colour="#0072B2"))
register_structure(Structure("full", _full, "exact", colour="#000000"))
register_structure(
    Structure("blockdiag", _blockdiag, "bound", label="block-diagonal", colour="#009E73")
)
register_structure(Structure("kfac", _kfac, additive=True, label="KFAC", colour="#D55E00"))
register_structure(
    Structure("diag", _diag, "bound", additive=True, label="diagonal", colour="#CC79A7")
)


def parts_of(structure: str, problem: Problem) -> list[Term]:
    """The parts of a named structure; every weight is in exactly one of them.

    Args:
        structure: by name.
        problem: plan, prior, data points and rows.
    """
    if structure not in STRUCTURES:
        raise CurvatureError(
            f"unknown structure {structure!r}; choose one of {', '.join(STRUCTURES)}"
        )
    return STRUCTURES[structure].parts(problem)
