"""From Gaussian outputs N(f, Sigma) of each datum to predictions.

probit   softmax(f / sqrt(1 + pi/8 diag Sigma))                                 (MacKay 1992)
bridge   the mean of the Dirichlet whose Laplace approximation, in the softmax basis, is
         N(f, Sigma) without its component along the constant direction    (Hobbhahn et al. 2022)
mc       the mean prediction over samples of the outputs
mode     the prediction of the network itself
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Categorical, Likelihood

Kind = Literal["probit", "mc", "bridge", "mode"]
KINDS = ("probit", "mc", "bridge", "mode")
# relative to the largest variance: added to a covariance so that rounding leaves it a factor
JITTER = 1e-10


def bridge(f: Tensor, covariance: Tensor, *, normalised: bool = False) -> Tensor:
    """Class probabilities [n, C] by the Laplace bridge.

    Conditioned on sum f = 0, with variances v, the Dirichlet has

        alpha_k = (1 - 2/C + exp(f_k) sum_l exp(-f_l) / C^2) / v_k,      p = alpha / sum alpha

    Args:
        f: mean of the logits [n, C].
        covariance: of the logits [n, C, C].
        normalised: scale variances to a mean of sqrt(C/2), and logits with them, first: keeps the
            bridge in the range where it is accurate.
    """
    c = f.shape[1]
    along = covariance.sum(2)  # Sigma 1
    total = along.sum(1, keepdim=True)  # 1^T Sigma 1
    f = f - along * f.sum(1, keepdim=True) / total
    variance = covariance.diagonal(dim1=1, dim2=2) - along.square() / total
    if normalised:
        size = variance.mean(1, keepdim=True) / (c / 2) ** 0.5
        f = f / size.sqrt()
        variance = variance / size
    # in log space: logits of a network that is sure overflow
    log_spread = torch.logsumexp(-f, 1, keepdim=True) + f - 2 * math.log(c)
    constant = torch.full_like(f, 1 - 2 / c).log() if c > 2 else torch.full_like(f, -math.inf)
    log_alpha = torch.logaddexp(constant, log_spread) - variance.log()
    return log_alpha.softmax(1)


def bridge_of(likelihood: Likelihood, f: Tensor, covariance: Tensor) -> Tensor:
    """Class probabilities shaped as the logits [n, C, ...], by the bridge at every position.

    Args:
        likelihood: of classes.
        f: mean of the logits [n, C, ...].
        covariance: of all outputs of a datum [n, C T, C T].
    """
    if not isinstance(likelihood, Categorical):
        raise MarglikError(
            "the Laplace bridge is for class probabilities, not for "
            f"{type(likelihood).__name__}; use kind='mc'"
        )
    n, c = f.shape[:2]
    t = f[0, 0].numel()
    blocks = covariance.reshape(n, c, t, c, t).diagonal(dim1=2, dim2=4)  # [n, C, C, T]
    flat = f.reshape(n, c, t).transpose(1, 2).reshape(n * t, c)
    p = bridge(flat, blocks.permute(0, 3, 1, 2).reshape(n * t, c, c))
    return p.reshape(n, t, c).transpose(1, 2).reshape(f.shape)


def root_of(covariance: Tensor) -> Tensor:
    """A lower factor L with L L^T = Sigma [..., C, C], also where Sigma is singular."""
    largest = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)
    jitter = JITTER * largest + torch.finfo(covariance.dtype).tiny
    size = covariance.shape[-1]
    padded = covariance + jitter[..., None, None] * torch.eye(size).to(covariance)
    L, failed = torch.linalg.cholesky_ex(padded)
    if not failed.any():
        return L
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def samples_of(f: Tensor, covariance: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Samples [k, n, ...] of N(f, Sigma), independent between data.

    Args:
        f: mean [n, ...].
        covariance: of the outputs of each datum [n, C, C].
        k: number of samples.
        generator: source of the noise.
    """
    n, c = covariance.shape[:2]
    xi = torch.randn(k, n, c, generator=generator, dtype=covariance.dtype, device=generator.device)
    noise = torch.einsum("ncd,knd->knc", root_of(covariance), xi.to(covariance.device))
    return f + noise.reshape(k, *f.shape)
