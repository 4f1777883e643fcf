"""log|I + sum_g w_g K_g| for many coefficients w: what does not depend on them is done once.

Of the symmetric K_g only the lower triangles are read and kept, side by side, so that the sum and
its derivative are one product with a vector each. Kernels of rank one (of a group that is a single
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
        kernels: [N, N], given one by one.
        count: how many.
        dtype: in which they were computed.
        conditioning: of their rows.
    """

    def __init__(
        self,
        kernels: Iterable[Tensor],
        count: int,
        dtype: torch.dtype,
        conditioning: Conditioning | None = None,
    ):
        self.conditioning = conditioning
        self.coarse = dtype != torch.float64
        eps = torch.finfo(dtype).eps
        vectors: list[Tensor] = []
        of_rank_one: list[bool] = []
        for kernel in kernels:
            if not of_rank_one:
                self._measure(len(kernel), kernel.device)
                lower = self._occurs.new_empty(count, len(self._entries))
            v = _root_of_rank_one(kernel, eps)
            if v is not None:
                vectors.append(v.double())
            else:  # written in place: fresh memory for each would cost more than filling it
                place = len(of_rank_one) - len(vectors)
                lower[place] = kernel.flatten().index_select(0, self._entries)
            of_rank_one.append(v is not None)
        self._order = torch.tensor(of_rank_one, device=self._entries.device).argsort(
            descending=True, stable=True
        )
        self._back = self._order.argsort()
        filled = count - len(vectors)
        self._sizes = [len(vectors), filled]
        self._vectors = torch.stack(vectors) if vectors else None  # [G1, N]
        if vectors:
            lower = lower[:filled].clone()
        self._lower = lower if filled else None  # [G2, N (N + 1) / 2]

    def _measure(self, side: int, device: torch.device) -> None:
        """Where the entries of the triangle stand in a matrix, and those of the matrix in it."""
        numbers = torch.arange(side, device=device)
        rows, columns = torch.tril_indices(side, side, device=device)
        self.side = side
        self._entries = rows * side + columns
        # row i of the triangle begins after i (i + 1) / 2 entries
        begins = numbers * (numbers + 1) // 2
        of_row = torch.maximum(begins[:, None], begins)
        self._places = (of_row + torch.minimum(numbers[:, None], numbers)).flatten()
        # an entry of the triangle stands for two of the matrix
        self._occurs = torch.full((len(rows),), 2.0, dtype=torch.float64, device=device)
        self._occurs[begins + numbers] = 1.0

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
