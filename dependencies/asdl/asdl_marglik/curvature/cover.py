"""How terms cover the weights of a network: one function from a problem to them per structure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from asdl_marglik.curvature.blocks import blocks_of
from asdl_marglik.curvature.dense import Dense, Diagonal
from asdl_marglik.curvature.kernel.gram import Gram
from asdl_marglik.curvature.kernel.row_storage import Factors, HalfRows, Rows, SharedFactors, Store
from asdl_marglik.curvature.kron import Kron
from asdl_marglik.curvature.problem import Problem
from asdl_marglik.curvature.term import Term
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


def ntk(problem: Problem) -> list[Term]:
    """One kernel of all weights.

    Args:
        problem: plan, prior, data points and rows.
    """
    return [_gram(problem, tuple(problem.sizes))]


def full(problem: Problem) -> list[Term]:
    """One exact block of all weights.

    Args:
        problem: plan, prior, data points and rows.
    """
    return [_exact(problem, tuple(problem.sizes))]


def blockdiag(problem: Problem) -> list[Term]:
    """An exact block for every block of the weights.

    Args:
        problem: plan, prior, data points and rows.
    """
    blocks = blocks_of(problem.sizes, problem.granularity)
    return [_exact(problem, names) for names in blocks.values()]


def diag(problem: Problem) -> list[Term]:
    """The diagonal, weight by weight.

    Args:
        problem: plan, prior, data points and rows.
    """
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


def kfac(problem: Problem) -> list[Term]:
    """A Kronecker product for every weight that has one, and its exact block or diagonal else.

    Args:
        problem: plan, prior, data points and rows.
    """
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
        mixed=problem.mixed,
    )
