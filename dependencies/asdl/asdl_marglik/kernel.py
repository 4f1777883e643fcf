"""The neural tangent kernel: the Gram matrix of Jacobian rows, kept apart by prior group so that the prior can move.

    log|I + V P0^-1 V^T|,   V P0^-1 V^T = sum_g exp(-log_precision_g) V_g V_g^T

Cost N^2 P for N rows; the rows (N P numbers) are kept only if a second pass will need them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunk import Chunk
from .linalg import log_det_identity_plus, weighted_sum
from .part import Groups, Part


class Gram(Part):
    """Exact curvature of its weights, in the space of rows."""

    label = "kernel"

    def __init__(self, names: tuple[str, ...], groups: Groups):
        self.names, self.groups = names, groups
        self.kinds = tuple("rows" for _ in names)
        self.shared = sorted({g for name in names if isinstance(g := groups[name], int)})
        self.elementwise = [name for name in names if isinstance(groups[name], slice)]

    def observe(self, chunk: Chunk) -> list[Tensor]:
        return [chunk.rows(name).reshape(chunk.n, chunk.k, -1) for name in self.names]  # each [n, K, P]

    def summarise(self, observations: list[Tensor], log_precision: Tensor) -> list[Tensor]:
        """One Gram matrix per shared prior group, then one for all weights with a precision per element."""
        n_rows = observations[0].shape[:2].numel()
        grams = observations[0].new_zeros(len(self.shared) + bool(self.elementwise), n_rows, n_rows)
        for name, rows in zip(self.names, observations, strict=True):
            v, group = rows.flatten(0, 1), self.groups[name]
            index = self.shared.index(group) if isinstance(group, int) else -1
            scaled = v if isinstance(group, int) else v * torch.exp(-log_precision[group]).to(v.dtype)
            grams[index].addmm_(scaled, v.mT)
        return [grams]

    def _row_bar(self, name: str, gram_bar: Tensor, rows: Tensor, log_precision: Tensor) -> Tensor:
        """Cotangent of the rows that `gram_bar` [m, N] belongs to."""
        bar = gram_bar @ rows.flatten(0, 1)
        group = self.groups[name]
        return bar if isinstance(group, int) else bar * torch.exp(-log_precision[group]).to(bar.dtype)

    def _bar_of(self, name: str, bars: list[Tensor]) -> Tensor:
        group = self.groups[name]
        return bars[0][self.shared.index(group) if isinstance(group, int) else -1]

    def precision_gradient(
        self, observations: list[Tensor], bars: list[Tensor], log_precision: Tensor
    ) -> Tensor | None:
        if not self.elementwise:
            return None
        gradient = torch.zeros_like(log_precision)
        for name, rows in zip(self.names, observations, strict=True):
            if name in self.elementwise:
                weighted = self._row_bar(name, self._bar_of(name, bars), rows, log_precision)
                gradient[self.groups[name]] = -(weighted * rows.flatten(0, 1)).sum(0).to(gradient.dtype)
        return gradient

    def pull(
        self, chunk: Chunk, observations: list[Tensor], bars: list[Tensor], rows: slice, log_precision: Tensor
    ) -> None:
        k = observations[0].shape[1]
        own = slice(rows.start * k, rows.stop * k)
        for name, v in zip(self.names, observations, strict=True):
            gram_bar = self._bar_of(name, bars)
            symmetric = gram_bar[own] + gram_bar[:, own].mT
            bar = self._row_bar(name, symmetric, v, log_precision)
            chunk.pull_rows(name, bar.reshape(chunk.n, k, *chunk.plan.weights[name].shape))

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        weights = torch.exp(-log_precision[self.shared])
        if self.elementwise:
            weights = torch.cat([weights, weights.new_ones(1)])
        gram = weighted_sum(scale * weights, statistics[0])
        if mixing is not None:
            n, k, r = mixing.shape
            gram = torch.einsum("ikr,ikjl->irjl", mixing, gram.reshape(n, k, n, k))
            gram = torch.einsum("irjl,jls->irjs", gram, mixing).reshape(n * r, n * r)
        return log_det_identity_plus(gram)
