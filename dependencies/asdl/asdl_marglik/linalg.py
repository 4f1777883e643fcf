"""Small-matrix algebra, in float64 whatever the dtype of the model, with derivatives that stay
finite.

Rounding. A sum of products in float32 has an error of about 1e-7 of its largest eigenvalue in every
direction, also in those where it should vanish. With a weak prior that error is not small beside
the identity it is added to. What can be seen of it is checked: all pivots of I + K are at least 1,
and eigenvalues below the rounding level are unknown.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from asdl_marglik.errors import CurvatureError, PrecisionLost

# how far rounding may move a pivot of I + K below 1, or a log-determinant, relative to it
ROUNDING = 1e-3
# rounding level of eigenvalues, in units of the largest one times the precision of a number
LEVEL = 16
COLUMNS = 2**22  # numbers of a piece of rows that is taken to float64 at a time
MANY_ROWS = 128  # from here on half a product is faster than a whole one


def log_det_factor(identity_plus: Tensor, *, coarse: bool = False) -> tuple[Tensor, Tensor, bool]:
    """log|M| of M = I + K given by its lower triangle, and what `inverse_of` takes: a factor of M,
    or its inverse.

    Args:
        identity_plus: [..., n, n] in float64.
        coarse: K was computed in lower precision; then too large an error is a `PrecisionLost`,
            else a warning.
    """
    factor, info = torch.linalg.cholesky_ex(identity_plus)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    if not info.any() and pivots.amin() >= 1 - ROUNDING:
        return pivots.log().sum(-1), factor, True
    if not identity_plus.isfinite().all():
        raise CurvatureError(
            "the kernel contains NaN or infinity; check inputs and weights for such values"
        )
    if coarse:
        raise PrecisionLost
    warnings.warn(
        "rounding moves eigenvalues of the curvature by more than the prior's precision, so that "
        "its log-determinant is known to few digits only; use a larger prior precision or noise, "
        "or a network in float64",
        RuntimeWarning,
        stacklevel=2,
    )
    values, vectors = torch.linalg.eigh(identity_plus)
    values = values.clamp_min(1.0)  # their true range
    return values.log().sum(-1), (vectors / values.unsqueeze(-2)) @ vectors.mT, False


def inverse_of(saved: Tensor, is_factor: bool) -> Tensor:
    """M^-1 from what `log_det_factor` returned."""
    return torch.cholesky_inverse(saved) if is_factor else saved


class _LogDetIdentityPlus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, coarse: bool) -> Tensor:
        identity_plus = matrix.to(torch.float64, copy=True)
        identity_plus = (identity_plus + identity_plus.mT).div_(2)
        identity_plus.diagonal(dim1=-2, dim2=-1).add_(1)
        value, saved, ctx.is_factor = log_det_factor(identity_plus, coarse=coarse)
        if coarse and ctx.is_factor and ctx.needs_input_grad[0]:
            saved, ctx.is_factor = _inverse_if_in_doubt(saved, identity_plus)
        ctx.save_for_backward(saved)
        ctx.dtype = matrix.dtype
        return value

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        return (cotangents[0][..., None, None] * inverse_of(saved, ctx.is_factor)).to(
            ctx.dtype
        ), None


def _inverse_if_in_doubt(factor: Tensor, identity_plus: Tensor) -> tuple[Tensor, bool]:
    """The factor of I + K, or its inverse where the derivative had to be looked at: what
    `inverse_of` takes.

    Cotangents of rows V with K = V V^T are (I + K)^-1 V, of squared size tr (I + K)^-1 - |(I +
    K)^-1|^2. In float32 they are off by about eps |(I + K)^-1| |V| / sqrt(n), which is no small
    part of them if all that K determines is steep and the rest is flat.
    """
    eps = torch.finfo(torch.float32).eps
    if factor.diagonal(dim1=-2, dim2=-1).amax().square() <= ROUNDING / eps:
        return factor, True
    inverse = torch.cholesky_inverse(factor)
    n, square = len(inverse), inverse.square().sum()
    noise = eps**2 * square * (identity_plus.diagonal().sum() - n) / n
    if noise > ROUNDING**2 * (inverse.diagonal().sum() - square):
        raise PrecisionLost
    return inverse, False


def log_det_identity_plus(matrix: Tensor, *, coarse: bool = False) -> Tensor:
    """log|I + K| of symmetric positive semi-definite K [..., n, n]; its derivative is (I + K)^-1.

    coarse: K was computed in lower precision, and should be computed anew where that is not enough.
    """
    return _LogDetIdentityPlus.apply(matrix, coarse)


def is_coarse(statistic: Tensor) -> bool:
    """Whether a statistic was computed in lower precision than the algebra that follows."""
    return statistic.dtype != torch.float64


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(weights, matrices)
        if matrices.dtype == weights.dtype:
            return (weights @ matrices.flatten(1)).view(matrices.shape[1:])
        total = torch.zeros(matrices.shape[1:], dtype=torch.float64, device=matrices.device)
        for weight, matrix in zip(weights, matrices, strict=True):
            total += weight * matrix
        return total

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        weights, matrices = ctx.saved_tensors
        cotangent = cotangents[0]
        weights_bar = matrices_bar = None
        if ctx.needs_input_grad[0]:
            if matrices.dtype == cotangent.dtype:
                weights_bar = matrices.flatten(1) @ cotangent.flatten()
            else:
                weights_bar = torch.stack([(cotangent * matrix).sum() for matrix in matrices])
        if ctx.needs_input_grad[1]:
            matrices_bar = torch.empty_like(matrices)
            for weight, bar in zip(weights, matrices_bar, strict=True):
                bar.copy_(weight * cotangent)
        return weights_bar, matrices_bar


def weighted_sum(weights: Tensor, matrices: Tensor) -> Tensor:
    """sum_g weights[g] matrices[g] in float64, without a float64 copy of all matrices, here and on
    the way back.
    """
    return _WeightedSum.apply(weights, matrices)


class _PsdSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        roots = resolved(
            values, torch.finfo(matrix.dtype).eps
        ).sqrt()  # of an eigenvalue 1e-17 it would be far above rounding
        ctx.save_for_backward(roots, vectors)
        return (vectors * roots.unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        # S dS + dS S = dM: in the eigenbasis dS_ij = dM_ij / (s_i + s_j), finite also for repeated
        # eigenvalues
        roots, vectors = ctx.saved_tensors
        total = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        inner = vectors.mT @ ((cotangents[0] + cotangents[0].mT) / 2) @ vectors
        return (
            vectors
            @ torch.where(total > _tiny(roots), inner / total, torch.zeros_like(inner))
            @ vectors.mT
        )


def psd_sqrt(matrix: Tensor) -> Tensor:
    """Symmetric square root of the positive semi-definite part of M [..., n, n]."""
    return _PsdSqrt.apply(matrix)


class _EigenRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        values, vectors = resolved(values, torch.finfo(matrix.dtype).eps).flip(-1), vectors.flip(-1)
        ctx.save_for_backward(values, vectors)
        return vectors * values.sqrt().unsqueeze(-2)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        # u_r = sqrt(e_r) v_r: de_r = v_r^T dM v_r, dv_r = sum_j v_j (v_j^T dM v_r) / (e_r - e_j)
        values, vectors = ctx.saved_tensors
        roots = values.sqrt()
        inner = vectors.mT @ cotangents[0]  # [j, r]
        gap = values.unsqueeze(-2) - values.unsqueeze(-1)
        separate = gap.abs() > 1e-10 * values.amax(-1, keepdim=True).unsqueeze(-1).clamp_min(1e-300)
        mixed = torch.where(separate, inner * roots.unsqueeze(-2) / gap, torch.zeros_like(inner))
        scale = torch.where(roots > _tiny(roots).squeeze(-1), 0.5 / roots, torch.zeros_like(roots))
        mixed = mixed + torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1) * scale)
        matrix_bar = vectors @ mixed @ vectors.mT
        return (matrix_bar + matrix_bar.mT) / 2


def eigen_root(matrix: Tensor) -> Tensor:
    """Root U = V sqrt(E) of positive semi-definite M = V E V^T, columns by decreasing eigenvalue.

    Where two eigenvalues coincide their eigenvectors are not differentiable and the coupling's
    derivative is set to 0.
    """
    return _EigenRoot.apply(matrix)


def _tiny(roots: Tensor) -> Tensor:
    """What counts as zero among the roots [..., n], shaped [..., 1, 1]."""
    return 1e-8 * roots.amax(-1, keepdim=True).unsqueeze(-1).clamp_min(1e-150)


class _Eigenvalues(torch.autograd.Function):
    """Values in float64; derivatives, which are as precise as what they are derived from, in the
    dtype given.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix.to(torch.float64))
        ctx.save_for_backward(vectors.to(matrix.dtype))
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return _spectral(ctx.saved_tensors[0], cotangents[0])


class _EigenvaluesOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(_smaller_gram(rows))
        ctx.save_for_backward(vectors.to(rows.dtype), rows)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        vectors, rows = ctx.saved_tensors
        gram_bar = _spectral(vectors, 2 * cotangents[0])
        return gram_bar @ rows if rows.shape[-2] <= rows.shape[-1] else rows @ gram_bar


def _spectral(vectors: Tensor, values: Tensor) -> Tensor:
    """V diag(values) V^T."""
    return (vectors * values.unsqueeze(-2).to(vectors.dtype)) @ vectors.mT


def _smaller_gram(rows: Tensor) -> Tensor:
    rows = rows.to(torch.float64)
    return rows @ rows.mT if rows.shape[-2] <= rows.shape[-1] else rows.mT @ rows


def eigenvalues(matrix: Tensor) -> Tensor:
    """Eigenvalues of symmetric M [..., n, n] in float64, ascending; their derivative needs no
    gaps.
    """
    if torch.is_grad_enabled() and matrix.requires_grad:
        return _Eigenvalues.apply(matrix)
    return torch.linalg.eigvalsh(matrix.to(torch.float64))


def eigenvalues_of_rows(rows: Tensor) -> Tensor:
    """Those of R^T R for rows R [..., N, D], but for zeros, from the smaller of R^T R and R R^T."""
    if torch.is_grad_enabled() and rows.requires_grad:
        return _EigenvaluesOfRows.apply(rows)
    return torch.linalg.eigvalsh(_smaller_gram(rows))


def resolved(values: Tensor, eps: float) -> Tensor:
    """Eigenvalues [..., n] of a positive semi-definite matrix, those that rounding can make of
    nothing set to 0.

    eps: relative precision of the matrix.
    """
    level = LEVEL * eps * values.detach().amax(-1, keepdim=True).clamp_min(0)
    return torch.where(values > level, values, 0.0)


def precision_of_sums(dtype: torch.dtype) -> float:
    """Relative precision of the eigenvalues of a matrix that was summed up in some dtype."""
    return torch.finfo(dtype).eps


def precision_of_rows(dtype: torch.dtype) -> float:
    """The same for rows of that dtype whose products are summed up in float64: their errors are
    squared.
    """
    return max(torch.finfo(torch.float64).eps, LEVEL * torch.finfo(dtype).eps ** 2)


def gram_of(rows: Tensor) -> Tensor:
    """R R^T of rows R [N, D]; of many rows, what is above the diagonal is mirrored instead of
    computed.

    For passes, which make their own derivatives: autograd does not follow it.
    """
    n = len(rows)
    if n < MANY_ROWS:
        return rows @ rows.mT
    gram = rows.new_empty(n, n)
    _fill_gram(rows, gram)
    return gram


def gram_in_double(rows: Tensor, inverse_precision: Tensor | None = None) -> Tensor:
    """R P^-1 R^T in float64 of rows R [N, D] of any dtype, some columns at a time; for passes, as
    `gram_of`.
    """
    gram = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for some in _pieces(rows):
        piece = rows[:, some].double()
        if inverse_precision is not None:
            piece = piece * inverse_precision[some].double().sqrt()
        gram += gram_of(piece)
    return gram


def product_in_double(matrix: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """M R of M [N', N] in float64 and rows R [N, D] of any dtype, rounded to it at the end only."""
    out = rows.new_empty(len(matrix), rows.shape[1]) if out is None else out
    for some in _pieces(rows):
        out[:, some] = matrix @ rows[:, some].double()
    return out


def _pieces(rows: Tensor) -> Iterator[slice]:
    """Some columns at a time."""
    step = max(1, COLUMNS // len(rows))
    return (slice(start, start + step) for start in range(0, rows.shape[1], step))


def _fill_gram(rows: Tensor, gram: Tensor) -> None:
    if len(rows) < MANY_ROWS:
        torch.mm(rows, rows.mT, out=gram)
        return
    half = len(rows) // 2
    _fill_gram(rows[:half], gram[:half, :half])
    if half < MANY_ROWS:
        torch.mm(rows[half:], rows.mT, out=gram[half:])
    else:
        torch.mm(rows[half:], rows[:half].mT, out=gram[half:, :half])
        _fill_gram(rows[half:], gram[half:, half:])
    gram[:half, half:] = gram[half:, :half].mT


class _SecondMoment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.mT @ rows

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        # one product, where autograd would make two
        return rows @ (cotangents[0] + cotangents[0].mT)


def second_moment(rows: Tensor) -> Tensor:
    """Sum of outer products [groups, D, D] of rows [N, groups, D]."""
    return _SecondMoment.apply(rows.movedim(1, 0))
