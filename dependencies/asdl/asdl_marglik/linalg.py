"""Small-matrix algebra in float64, whatever the dtype of the model; derivatives stay finite.

Rounding. A sum of products in float32 has an error of about 1e-7 of its largest eigenvalue in every
direction, also in those where it should vanish. With a weak prior that error is not small beside
the identity it is added to. Two facts reveal it: all pivots of I + K are at least 1, and
eigenvalues below the rounding level are unknown.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asdl_marglik.errors import CurvatureError, PrecisionLost

# How far rounding may move a pivot of I + K below 1, or a log-determinant or its derivative,
# relative to it: about three digits stay right.
ROUNDING = 1e-3
# Rounding level of eigenvalues, in units of the largest one times the precision of a number: sums
# of rounding errors stay within a few such units, an eigenvalue above them is taken to be real.
LEVEL = 16
# Two eigenvalues count as equal if their gap is below this part of the largest one: the derivative
# of their eigenvectors would be rounding, divided by the gap.
EQUAL = 1e-10
# A root counts as zero below this part of the largest root; its square is about the eps of float64.
ZERO_ROOT = 1e-8
# Least scale of eigenvalues, and of their roots: keeps the limits of a zero matrix above zero.
SMALLEST = 1e-300
SMALLEST_ROOT = 1e-150
COLUMNS = 2**22  # rows are taken to float64 in pieces of so many numbers (32 megabytes)
MANY_ROWS = 128  # from here on half a product is faster than a whole one


@dataclass(frozen=True)
class Conditioning:
    """Rows of a matrix M of which the first u count once, and the others m times, given the first.

        log|M_U| + m log|M / M_U|  =  m log|M| + (1 - m) log|M_U|

    M / M_U is the Schur complement. With the Cholesky factor L of M it is one sum over pivots,
    2 log L_ii, with the weights W = diag(1, ..., m, ...), and its derivative is L^-T W L^-1.

    Args:
        n_inducing: u.
        weight: m.
    """

    n_inducing: int
    weight: float

    def sum(self, log_pivots: Tensor) -> Tensor:
        """The conditioned log-determinant, from the logarithms [..., n] of all pivots."""
        first = log_pivots[..., : self.n_inducing].sum(-1)
        others = log_pivots[..., self.n_inducing :].sum(-1)
        return first + self.weight * others

    def weighted(self, factor: Tensor) -> Tensor:
        """L W^-1/2, of which the "inverse of L L^T" is the derivative L^-T W L^-1."""
        weighted = factor.clone()
        weighted[:, self.n_inducing :] /= self.weight**0.5
        return weighted

    def combine_(self, whole: Tensor, inducing: Tensor) -> Tensor:
        """m M^-1 + (1 - m) M_U^-1, its derivative, written to M^-1 [n, n]; M_U^-1 is [u, u]."""
        u = self.n_inducing
        whole *= self.weight
        whole[:u, :u] += (1 - self.weight) * inducing
        return whole


def log_det_factor(
    identity_plus: Tensor, *, coarse: bool = False, conditioning: Conditioning | None = None
) -> tuple[Tensor, Tensor, bool]:
    """log|M| of M = I + K, a Cholesky factor of M or the derivative, and whether it is the factor.

    The last two are what `derivative_of` takes.

    Args:
        identity_plus: M [..., n, n] in float64, of which the lower triangle is read.
        coarse: K was computed in lower precision; then too large an error is a `PrecisionLost`,
            else a warning.
        conditioning: of the rows of one M [n, n].
    """
    factor, info = torch.linalg.cholesky_ex(identity_plus)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    if not info.any() and pivots.amin().item() >= 1 - ROUNDING:
        logs = pivots.log()
        return logs.sum(-1) if conditioning is None else conditioning.sum(logs), factor, True
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
    value, inverse = _by_eigenvalues(identity_plus)
    if conditioning is None:
        return value, inverse, False
    u, m = conditioning.n_inducing, conditioning.weight
    first, first_inverse = _by_eigenvalues(identity_plus[:u, :u])
    return m * value + (1 - m) * first, conditioning.combine_(inverse, first_inverse), False


def _by_eigenvalues(identity_plus: Tensor) -> tuple[Tensor, Tensor]:
    """log|M| and M^-1 of M = I + K that rounding has made indefinite."""
    values, vectors = torch.linalg.eigh(identity_plus)
    values = values.clamp_min(1.0)  # their true range
    inverse = (vectors / values.unsqueeze(-2)) @ vectors.mT
    return values.log().sum(-1), inverse


def derivative_of(
    saved: Tensor, is_factor: bool, conditioning: Conditioning | None = None
) -> Tensor:
    """The derivative M^-1 of log|M|, from what `log_det_factor` returned.

    Args:
        saved: a Cholesky factor of M, or the derivative [..., n, n].
        is_factor: which of the two.
        conditioning: as it was there.
    """
    if not is_factor:
        return saved
    return torch.cholesky_inverse(saved if conditioning is None else conditioning.weighted(saved))


class _LogDetIdentityPlus(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, matrix: Tensor, coarse: bool, conditioning: Conditioning | None
    ) -> Tensor:
        identity_plus = matrix.to(torch.float64, copy=True)
        identity_plus = (identity_plus + identity_plus.mT).div_(2)
        identity_plus.diagonal(dim1=-2, dim2=-1).add_(1)
        value, saved, is_factor = log_det_factor(
            identity_plus, coarse=coarse, conditioning=conditioning
        )
        if coarse and is_factor and ctx.needs_input_grad[0]:
            inverse = _inverse_if_in_doubt(saved, identity_plus)
            if inverse is not None and conditioning is None:
                is_factor = False
                saved = inverse
        ctx.save_for_backward(saved)
        ctx.is_factor = is_factor
        ctx.conditioning = conditioning
        ctx.dtype = matrix.dtype
        return value

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        derivative = derivative_of(saved, ctx.is_factor, ctx.conditioning)
        matrix_bar = cotangents[0][..., None, None] * derivative
        return matrix_bar.to(ctx.dtype), None, None


def _inverse_if_in_doubt(factor: Tensor, identity_plus: Tensor) -> Tensor | None:
    """M^-1 of M = I + K where the derivative had to be checked, else None.

    Cotangents of rows V with K = V V^T are M^-1 V, of squared size tr M^-1 - |M^-1|^2. In float32
    they are off by about eps |M^-1| |V| / sqrt(n), which is no small part of them if all that K
    determines is steep and the rest is flat. Raises `PrecisionLost` in that case.
    """
    eps = torch.finfo(torch.float32).eps
    if factor.diagonal(dim1=-2, dim2=-1).amax().square() <= ROUNDING / eps:
        return None
    inverse = torch.cholesky_inverse(factor)
    n = len(inverse)
    square = inverse.square().sum()
    trace_of_K = identity_plus.diagonal().sum() - n  # |V|^2
    noise = eps**2 * square * trace_of_K / n
    signal = inverse.diagonal().sum() - square
    if noise > ROUNDING**2 * signal:
        raise PrecisionLost
    return inverse


def log_det_identity_plus(
    matrix: Tensor, *, coarse: bool = False, conditioning: Conditioning | None = None
) -> Tensor:
    """log|I + K| in float64; its derivative is (I + K)^-1.

    Args:
        matrix: symmetric positive semi-definite K [..., n, n].
        coarse: K was computed in lower precision: a `PrecisionLost` is raised where that is not
            enough, so that the caller computes it again in float64.
        conditioning: of the rows of one K [n, n]; then the conditioned log-determinant.
    """
    return _LogDetIdentityPlus.apply(matrix, coarse, conditioning)


def pivot_order(matrix: Tensor, count: int) -> Tensor:
    """The rows of a positive definite matrix by conditional variance, largest first [count].

    Pivoted Cholesky: each row is the one of largest variance given those before it.

    Args:
        matrix: I + K [n, n] in float64: all variances are at least 1, so that no row comes twice.
        count: how many rows.
    """
    factor = matrix.new_zeros(len(matrix), count)  # L, one column after the other
    variance = matrix.diagonal().clone()  # given the rows chosen; theirs become zero
    # views made once: in this loop each of them would cost as much as the arithmetic
    rows, factor_rows, factor_columns = matrix.unbind(0), factor.unbind(0), factor.unbind(1)
    order = []
    for step in range(count):
        pivot = int(variance.argmax())
        order.append(pivot)
        row = torch.addmv(rows[pivot], factor, factor_rows[pivot], alpha=-1)
        inverse = 1 / float(row[pivot])
        torch.mul(row, inverse**0.5, out=factor_columns[step])
        variance.addcmul_(row, row, value=-inverse)
    return torch.tensor(order, device=matrix.device)


def is_coarse(statistic: Tensor) -> bool:
    """Whether a statistic was computed in lower precision than the algebra that follows."""
    return statistic.dtype != torch.float64


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coefficients: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(coefficients, matrices)
        if matrices.dtype == coefficients.dtype:
            return (coefficients @ matrices.flatten(1)).view(matrices.shape[1:])
        total = torch.zeros(matrices.shape[1:], dtype=torch.float64, device=matrices.device)
        for coefficient, matrix in zip(coefficients, matrices, strict=True):
            total += coefficient * matrix
        return total

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        coefficients, matrices = ctx.saved_tensors
        cotangent = cotangents[0]
        coefficients_bar = matrices_bar = None
        if ctx.needs_input_grad[0]:
            if matrices.dtype == cotangent.dtype:
                coefficients_bar = matrices.flatten(1) @ cotangent.flatten()
            else:
                products = [(cotangent * matrix).sum() for matrix in matrices]
                coefficients_bar = torch.stack(products)
        if ctx.needs_input_grad[1]:
            matrices_bar = torch.empty_like(matrices)
            for coefficient, bar in zip(coefficients, matrices_bar, strict=True):
                bar.copy_(coefficient * cotangent)
        return coefficients_bar, matrices_bar


def weighted_sum(coefficients: Tensor, matrices: Tensor) -> Tensor:
    """sum_g coefficients[g] matrices[g] in float64.

    Neither this nor the way back makes a float64 copy of all matrices.

    Args:
        coefficients: [G] in float64.
        matrices: [G, ...] of any dtype.
    """
    return _WeightedSum.apply(coefficients, matrices)


class _PsdSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        # the root of a rounding error of 1e-17 would be 3e-9, far above rounding: set it to zero
        roots = resolved(values, torch.finfo(matrix.dtype).eps).sqrt()
        ctx.save_for_backward(roots, vectors)
        return (vectors * roots.unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        # S dS + dS S = dM: in the eigenbasis dS_ij = dM_ij / (s_i + s_j), finite also for repeated
        # eigenvalues
        roots, vectors = ctx.saved_tensors
        total = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        symmetric = (cotangents[0] + cotangents[0].mT) / 2
        inner = vectors.mT @ symmetric @ vectors
        scaled = torch.where(total > _zero_below(roots), inner / total, torch.zeros_like(inner))
        return vectors @ scaled @ vectors.mT


def psd_sqrt(matrix: Tensor) -> Tensor:
    """Symmetric square root S of the positive semi-definite part of M: S S = M.

    Args:
        matrix: symmetric M [..., n, n].
    """
    return _PsdSqrt.apply(matrix)


class _EigenRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        values = resolved(values, torch.finfo(matrix.dtype).eps)
        values, vectors = values.flip(-1), vectors.flip(-1)  # decreasing
        ctx.save_for_backward(values, vectors)
        return vectors * values.sqrt().unsqueeze(-2)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        # u_r = sqrt(e_r) v_r: de_r = v_r^T dM v_r, dv_r = sum_j v_j (v_j^T dM v_r) / (e_r - e_j)
        values, vectors = ctx.saved_tensors
        roots = values.sqrt()
        inner = vectors.mT @ cotangents[0]  # [j, r]
        gap = values.unsqueeze(-2) - values.unsqueeze(-1)
        largest = values.amax(-1, keepdim=True).unsqueeze(-1)
        separate = gap.abs() > EQUAL * largest.clamp_min(SMALLEST)
        of_vectors = inner * roots.unsqueeze(-2) / gap
        of_vectors = torch.where(separate, of_vectors, torch.zeros_like(inner))
        positive = roots > _zero_below(roots).squeeze(-1)
        scale = torch.where(positive, 0.5 / roots, torch.zeros_like(roots))
        of_values = torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1) * scale)
        matrix_bar = vectors @ (of_vectors + of_values) @ vectors.mT
        return (matrix_bar + matrix_bar.mT) / 2


def eigen_root(matrix: Tensor) -> Tensor:
    """Root U = Q sqrt(E) of M = Q E Q^T, columns by decreasing eigenvalue: U U^T = M.

    Where two eigenvalues coincide their eigenvectors are not differentiable; the derivative of one
    in the direction of the other is set to 0.

    Args:
        matrix: symmetric positive semi-definite M [..., n, n].
    """
    return _EigenRoot.apply(matrix)


def _zero_below(roots: Tensor) -> Tensor:
    """The limit [..., 1, 1] up to which one of the roots [..., n] counts as zero."""
    largest = roots.amax(-1, keepdim=True).unsqueeze(-1)
    return ZERO_ROOT * largest.clamp_min(SMALLEST_ROOT)


class _Eigenvalues(torch.autograd.Function):
    """Values in float64; derivatives in the dtype of the matrix, whose precision limits them."""

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
        return gram_bar @ rows if _is_wide(rows) else rows @ gram_bar


def _spectral(vectors: Tensor, values: Tensor) -> Tensor:
    """Q diag(values) Q^T of eigenvectors Q."""
    return (vectors * values.unsqueeze(-2).to(vectors.dtype)) @ vectors.mT


def _is_wide(rows: Tensor) -> bool:
    """Whether there are no more rows than columns."""
    return rows.shape[-2] <= rows.shape[-1]


def _smaller_gram(rows: Tensor) -> Tensor:
    """The smaller of R R^T and R^T R, in float64."""
    rows = rows if _is_wide(rows) else rows.mT
    if rows.shape[:-2].numel() == 1:  # half of one large product is enough
        gram = gram_in_double(rows.reshape(rows.shape[-2:]))
        return gram.reshape(*rows.shape[:-2], *gram.shape)
    rows = rows.to(torch.float64)
    return rows @ rows.mT


def eigenvalues(matrix: Tensor) -> Tensor:
    """Eigenvalues in float64, ascending; their derivative is finite also for repeated ones.

    Args:
        matrix: symmetric M [..., n, n].
    """
    if torch.is_grad_enabled() and matrix.requires_grad:
        return _Eigenvalues.apply(matrix)
    return torch.linalg.eigvalsh(matrix.to(torch.float64))


def eigenvalues_of_rows(rows: Tensor) -> Tensor:
    """Eigenvalues of the smaller of R^T R and R R^T, which are the same but for zeros.

    Args:
        rows: R [..., N, D].
    """
    if torch.is_grad_enabled() and rows.requires_grad:
        return _EigenvaluesOfRows.apply(rows)
    return torch.linalg.eigvalsh(_smaller_gram(rows))


def resolved(values: Tensor, eps: float) -> Tensor:
    """Eigenvalues of a positive semi-definite matrix; 0 for those that rounding alone can explain.

    Args:
        values: [..., n].
        eps: relative precision of the matrix.
    """
    largest = values.detach().amax(-1, keepdim=True).clamp_min(0)
    level = LEVEL * eps * largest
    return torch.where(values > level, values, 0.0)


def precision_of_sums(dtype: torch.dtype) -> float:
    """Relative precision of the eigenvalues of a matrix that was summed up in this dtype."""
    return torch.finfo(dtype).eps


def precision_of_rows(dtype: torch.dtype) -> float:
    """The same for products, in float64, of rows of this dtype: errors of the rows are squared."""
    of_products = LEVEL * torch.finfo(dtype).eps ** 2
    return max(torch.finfo(torch.float64).eps, of_products)


def gram_of(rows: Tensor) -> Tensor:
    """R R^T; for many rows, part of the upper triangle is mirrored instead of computed.

    Not differentiable by autograd: for passes, which compute their derivatives themselves.

    Args:
        rows: R [N, D].
    """
    n = len(rows)
    if n < MANY_ROWS:
        return rows @ rows.mT
    gram = rows.new_empty(n, n)
    _fill_gram(rows, gram)
    return gram


def gram_in_double(rows: Tensor, inverse_precision: Tensor | None = None) -> Tensor:
    """R P^-1 R^T in float64, some columns of R at a time; not differentiable, as `gram_of`.

    Args:
        rows: R [N, D] of any dtype.
        inverse_precision: diagonal [D] of P^-1; None for the identity.
    """
    gram = rows.new_zeros(len(rows), len(rows), dtype=torch.float64)
    for columns in _column_spans(rows):
        piece = rows[:, columns].double()
        if inverse_precision is not None:
            piece = piece * inverse_precision[columns].double().sqrt()
        gram += gram_of(piece)
    return gram


def product_in_double(matrix: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """M R, computed in float64 and rounded to the dtype of R at the end only.

    Args:
        matrix: M [N', N] in float64.
        rows: R [N, D] of any dtype.
        out: where to write the result [N', D].
    """
    if out is None:
        out = rows.new_empty(len(matrix), rows.shape[1])
    for columns in _column_spans(rows):
        out[:, columns] = matrix @ rows[:, columns].double()
    return out


def _column_spans(rows: Tensor) -> Iterator[slice]:
    """Slices of the columns, such that a piece of the rows has about `COLUMNS` numbers."""
    step = max(1, COLUMNS // len(rows))
    return (slice(start, start + step) for start in range(0, rows.shape[1], step))


def _fill_gram(rows: Tensor, gram: Tensor) -> None:
    """Write R R^T, by halves of the rows; the upper right quarter is mirrored."""
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
    """Sum of outer products [channel groups, D, D].

    Args:
        rows: [N, channel groups, D].
    """
    return _SecondMoment.apply(rows.movedim(1, 0))
