"""The shortcuts of the engine, each exact, each with a switch.

Tests turn them off one by one, and a caller that wants the rows of single outputs turns off
`fewer_cotangents`; nobody else does.

A shortcut is another way to a result where it applies. A derivative given in closed form (`linalg`)
is the only way to its result and has no switch; the tests compare it with autograd.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FastPaths:
    """Which shortcuts may be taken where they apply."""

    piecewise_linear: bool = True  # leave out the derivative of output cotangents where it is zero
    factored_rows: bool = True  # a kernel from the factors of rows, without the rows
    # the same for several cotangents and positions, which share a datum's inputs
    shared_factors: bool = True
    # half of a symmetric kernel of many rows is the mirror image of the other
    mirrored_kernels: bool = True
    factored_sides: bool = True  # a Kronecker factor's eigenvalues from the Gram matrix of its rows
    input_moments: bool = True  # a Kronecker factor without patches side by side
    kept_rows: bool = True  # rows of few numbers stay for the second pass
    deferred_rows: bool = True  # rows of one weight at a time, where no second pass follows
    kept_chunks: bool = True  # the last chunks of the first pass are the first of the second
    fewer_cotangents: bool = (
        True  # none along a direction of the outputs that the likelihood ignores
    )
    # of a cached block: lower triangles side by side, vectors where the rank is one
    packed_kernels: bool = True
    kept_log_prob: bool = True  # of a cached block: log-likelihoods that no parameter can change
    # for few single weights with kept rows: one backward pass for all cotangents together
    weighted_cotangents: bool = True
    # where no second pass follows: the root is part of the cotangents, each of which is done with
    # before the next is made
    mixed_cotangents: bool = True
    image_gradients: bool = True  # of convolutions, with every image as a channel group of its own


ALL = FastPaths()
