"""The shortcuts of the engine, each exact, each with a switch: turned off one by one by the tests, by nobody else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FastPaths:
    """Which shortcuts may be taken where they apply."""

    piecewise_linear: bool = True  # leave out the derivative of output cotangents where it is zero
    factored_rows: bool = True  # a kernel from the factors of rows, without the rows
    shared_factors: bool = True  # the same for several seeds and positions, which share a datum's inputs
    factored_sides: bool = True  # a Kronecker factor's eigenvalues from the Gram matrix of its rows
    kept_rows: bool = True  # rows of few numbers stay for the second pass
    deferred_rows: bool = True  # rows of one weight at a time, where no second pass follows
    kept_chunks: bool = True  # the last chunks of the first pass are the first of the second
    fewer_seeds: bool = True  # no seed along a direction of the outputs that the likelihood ignores
    packed_kernels: bool = True  # of a cached block: lower triangles side by side, vectors where the rank is one
    weighted_seeds: bool = True  # for few single weights with kept rows: one backward pass for the seeds together


ALL = FastPaths()
