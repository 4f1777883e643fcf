"""log|I + sum_g w_g K_g| for many coefficients w: what does not depend on them is done once.

Of the symmetric K_g only the lower triangles are kept, side by side, so that the sum and its
derivative are one product with a vector each. Kernels of rank one (of a group that is a single
weight) are kept as vectors: K_g = v v^T.

    d log|I + K| / d w_g = <(I + K)^-1, K_g>
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from asdl_marglik.linalg import Conditioning, derivative_of, log_det_factor

RANK_ONE = 16  # rounding errors of an entry's product that a kernel of rank one may be off


class Combination:
    """Symmetric positive semi-definite kernels K_g.

    Args:
        kernels: [N, N] in float64, given one by one.
        dtype: in which they were computed.
        conditioning: of their rows.
    """

    def __init__(
        self,
        kernels: Iterable[Tensor],
        dtype: torch.dtype,
        conditioning: Conditioning | None = None,
    ):
        self.conditioning = conditioning
        self.coarse = dtype != torch.float64
        eps = torch.finfo(dtype).eps
        vectors: list[Tensor] = []
        lower: list[Tensor] = []
        of_rank_one: list[bool] = []
        for kernel in kernels:
            if not of_rank_one:
                self.side = len(kernel)
                rows, columns = torch.tril_indices(self.side, self.side, device=kernel.device)
                self._entries = rows * self.side + columns
                self._places = _places(rows, columns, self.side)
                # an entry of the triangle stands for two of the matrix
                self._occurs = 2.0 - (rows == columns).double()
            v = _root_of_rank_one(kernel, eps)
            of_rank_one.append(v is not None)
            if v is not None:
                vectors.append(v)
            else:
                lower.append((kernel + kernel.mT).flatten()[self._entries].div_(2))
        self._order = torch.tensor(of_rank_one, device=self._entries.device).argsort(
            descending=True, stable=True
        )
        self._back = self._order.argsort()
        self._sizes = [len(vectors), len(lower)]
        self._vectors = torch.stack(vectors) if vectors else None  # [G1, N]
        self._lower = torch.stack(lower) if lower else None  # [G2, N (N + 1) / 2]

    def log_det_identity_plus(self, coefficients: Tensor) -> Tensor:
        """log|I + sum_g coefficients[g] K_g|, differentiable in the coefficients.

        Args:
            coefficients: inverse precision of each group, times the scale [G].
        """
        return _LogDet.apply(coefficients, self)

    def total(self, coefficients: Tensor) -> Tensor:
        """The weighted sum [N, N]."""
        of_vectors, of_lower = coefficients.index_select(0, self._order).split(self._sizes)
        if self._lower is None:
            total = coefficients.new_zeros(self.side, self.side)
        else:  # a gather, which is faster than to scatter the triangle into zeros
            lower = of_lower @ self._lower
            total = lower.index_select(0, self._places).view(self.side, self.side)
        if self._vectors is not None:
            total.addmm_(self._vectors.mT * of_vectors, self._vectors)
        return total

    def inner_products(self, matrix: Tensor) -> Tensor:
        """<matrix, K_g> [G] with a symmetric matrix."""
        products = []
        if self._vectors is not None:
            products.append(((self._vectors @ matrix) * self._vectors).sum(1))
        if self._lower is not None:
            # inverses come by column: no copy
            entries = matrix.mT.reshape(-1).index_select(0, self._entries)
            products.append(self._lower @ entries.mul_(self._occurs))
        return torch.cat(products).index_select(0, self._back)


class _LogDet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coefficients: Tensor, kernels: Combination) -> Tensor:
        identity_plus = kernels.total(coefficients)
        identity_plus.diagonal().add_(1)
        value, saved, ctx.is_factor = log_det_factor(
            identity_plus, coarse=kernels.coarse, conditioning=kernels.conditioning
        )
        ctx.save_for_backward(saved)
        ctx.kernels = kernels
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        kernels: Combination = ctx.kernels
        derivative = derivative_of(saved, ctx.is_factor, kernels.conditioning)
        return cotangents[0] * kernels.inner_products(derivative), None


def _places(rows: Tensor, columns: Tensor, side: int) -> Tensor:
    """Where in a triangle, given by its rows and columns, each entry of the matrix stands [N N]."""
    places = torch.empty(side, side, dtype=torch.long, device=rows.device)
    numbers = torch.arange(len(rows), device=rows.device)
    places[rows, columns] = numbers
    places[columns, rows] = numbers
    return places.flatten()


def _root_of_rank_one(kernel: Tensor, eps: float) -> Tensor | None:
    """v with K = v v^T up to rounding, if there is one."""
    diagonal = kernel.diagonal()
    largest, pivot = diagonal.max(0)
    if not largest > 0:
        return None if kernel.any() else kernel.new_zeros(len(kernel))
    v = kernel[:, pivot] / largest.sqrt()
    limit = RANK_ONE * eps * largest
    if (diagonal - v.square()).abs().max() > limit:  # most kernels of higher rank end here
        return None
    return v if (kernel - v[:, None] * v).abs().max() <= limit else None
