"""The variance of minibatch gradients of L and of L' (see `system`), in closed form.

With rows V_i of datum i, M_i = V_i^T V_i, one precision a, K = V V^T / a and S = K (I + K)^-1, a
datum's gradient has these second moments over the noise of samples:

                    L, noise in the data        L', noise in the prior
    at the solution tr M_i - tr M_i^2 H^-1      tr M_i^2 H^-1       = a tr K_ii S_ii
    at the start    tr M_i + tr M_i^2 A^-1      tr M_i^2 A^-1       = a tr K_ii^2

and the sum over all data tr M - a gamma or a gamma at the solution (L' and L), tr M^2 A^-1 (L') and
tr M more (L) at the start. So L' has the smaller second moment at the solution where the leverage

    sum_i tr M_i^2 H^-1 / sum_i tr M_i

is below 1/2. That is the mean of the leverages S_ii weighted by curvature, not gamma / (N C): a few
steep directions, which determine themselves, decide it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from laplace_marglik.checks import one_of
from laplace_marglik.errors import MarglikError

At = Literal["start", "solution"]


class GradientNoise(NamedTuple):
    """Variances E |g - E g|^2 of estimates from a batch, over batches and the noise of samples."""

    data: float  # of L
    prior: float  # of L'
    leverage: float  # weighted by curvature
    mean_leverage: float  # gamma / (N C)

    @property
    def ratio(self) -> float:
        """Of L to L': how many times larger a batch L needs for the same variance."""
        return self.data / self.prior


def gradient_noise(
    kernel: Tensor, precision: float, batch: int, at: At = "solution"
) -> GradientNoise:
    """The variance of gradients from `batch` of N data, drawn without replacement.

    Args:
        kernel: V V^T of the root rows of N data [N, C, N, C].
        precision: of the prior, of all weights.
        batch: data in a batch, below N.
        at: z = A^{-1/2} n, the "start", or the "solution".
    """
    one_of("at", at, ("start", "solution"))
    n, c = kernel.shape[:2]
    if kernel.shape != (n, c, n, c) or not 0 < batch < n:
        raise MarglikError(
            f"expected a kernel [N, C, N, C] and a batch from 1 to N - 1, got "
            f"{tuple(kernel.shape)} and {batch}"
        )
    K = kernel.double().reshape(n * c, n * c) / precision
    S = torch.eye(n * c, dtype=K.dtype, device=K.device)
    S = S - torch.cholesky_inverse(torch.linalg.cholesky(S + K))
    each, smoothed = (_diagonal_blocks(matrix, n) for matrix in (K, S))
    trace, gamma = K.trace().item(), S.trace().item()  # of M / a and of H^-1 M
    levered = (each * smoothed).sum().item()
    squares = {"prior": levered, "data": trace - levered}
    means = {"prior": trace - gamma, "data": gamma}
    if at == "start":
        squares = {"prior": each.square().sum().item(), "data": each.square().sum().item() + trace}
        means = {"prior": K.square().sum().item(), "data": K.square().sum().item() + trace}
    factor = precision * n * (n - batch) / (batch * (n - 1))
    variances = {name: factor * (squares[name] - means[name] / n) for name in squares}
    return GradientNoise(variances["data"], variances["prior"], levered / trace, gamma / (n * c))


def _diagonal_blocks(matrix: Tensor, n: int) -> Tensor:
    """The blocks [n, c, c] of a matrix [nc, nc]."""
    c = len(matrix) // n
    return torch.stack([matrix[i * c : (i + 1) * c, i * c : (i + 1) * c] for i in range(n)])
