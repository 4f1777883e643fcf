"""The definition: what this package computes, written out as formulas, one datum at a time.

Everything here is slow, needs all matrices at once, and is right: the fast engine is tested against
it. Root rows V = U^T J come from the Jacobian J of the network and a root U U^T = Lambda of the
likelihood's curvature; a prior with precisions delta gives five log-determinants of I + P0^-1 H.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    >>> x = torch.randn(5, 3).double()
    >>> J = jacobian(model, dict(model.named_parameters()), x)  # n = 5, C = 2, P = 26
    >>> J.shape
    torch.Size([5, 2, 26])
    >>> U = torch.eye(2).double().expand(5, 2, 2)  # a Gaussian likelihood with unit noise
    >>> V, delta = root_rows(J, U), torch.ones(26).double()
    >>> layers = [torch.arange(16), torch.arange(16, 26)]
    >>> full, kernel = log_det_full(V, delta), log_det_kernel(V, delta)
    >>> torch.testing.assert_close(full, kernel)  # Sylvester: the same determinant on either side
    >>> bool(full <= log_det_blocks(V, delta, layers) <= log_det_diagonal(V, delta))  # Fischer
    True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def jacobian(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """J[i, c] = d f_c(x_i) / d w of all weights in a row, [n, C, P].

    Args:
        model: network that maps inputs [n, ...] to outputs [n, C].
        weights: its weights by name.
        x: inputs [n, ...].
    """
    rows = []
    for x_i in x:
        f = model(x_i[None]).reshape(-1)
        for f_c in f:
            row = gradients(f_c, list(weights.values()))
            rows.append(torch.cat([g.reshape(-1) for g in row]))
    return torch.stack(rows).unflatten(0, (len(x), -1))


def gradients(scalar: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The derivative of a scalar in each tensor, zero where it does not depend on it."""
    return list(torch.autograd.grad(scalar, tensors, create_graph=True, materialize_grads=True))


def root_rows(J: Tensor, U: Tensor) -> Tensor:
    """V = U^T J, one row for each datum and root column [n K, P].

    Args:
        J: Jacobians [n, C, P].
        U: columns [n, C, K] of a root of the likelihood's curvature.
    """
    return torch.einsum("nck,ncp->nkp", U, J).flatten(0, 1)


def log_det(H: Tensor, delta: Tensor) -> Tensor:
    """log|I + P0^-1 H| = log|P0 + H| - log|P0| with the prior P0 = diag(delta).

    Args:
        H: curvature [P, P].
        delta: prior precisions [P].
    """
    return torch.logdet(torch.diag(delta) + H) - delta.log().sum()


def log_det_full(V: Tensor, delta: Tensor) -> Tensor:
    """log|I + P0^-1 H| of the whole curvature H = V^T V, from root rows V [n K, P]."""
    return log_det(V.mT @ V, delta)


def log_det_kernel(V: Tensor, delta: Tensor) -> Tensor:
    """The same number from the neural tangent kernel: log|I + V P0^-1 V^T|."""
    K = (V / delta) @ V.mT
    return torch.logdet(torch.eye(len(V)).to(V) + K)


def log_det_blocks(V: Tensor, delta: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Blocks of weights as if they were independent: never less than `log_det_full`.

    Args:
        V: root rows [n K, P].
        delta: prior precisions [P].
        blocks: indices of the weights of each block.
    """
    return torch.stack([log_det_full(V[:, b], delta[b]) for b in blocks]).sum()


def log_det_diagonal(V: Tensor, delta: Tensor) -> Tensor:
    """All weights as if they were independent: sum log(1 + h / delta), h = diagonal of H."""
    h = V.square().sum(0)
    return torch.log1p(h / delta).sum()


def kronecker_factors(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A = 1/(n T) sum a a^T and B = sum g g^T of a linear map (KFAC "expand"), H ~= B (x) A.

    Args:
        a: inputs [n, T, D] of the map at T shared positions (pixels, tokens).
        g: cotangents [n, K, T, O] of its outputs, one for each root row.
    """
    n, t = a.shape[:2]
    A = torch.einsum("ntd,nte->de", a, a) / (n * t)
    B = torch.einsum("nkto,nktp->op", g, g)
    return A, B


def log_det_kronecker(A: Tensor, B: Tensor, delta: Tensor) -> Tensor:
    """log|I + P0^-1 (B (x) A)| of one weight [O, D].

    Args:
        A: input factor [D, D].
        B: output factor [O, O].
        delta: prior precisions [O D].
    """
    return log_det(torch.kron(B, A), delta)
