"""Kronecker-factored curvature (KFAC) of one weight, in the "expand" and "reduce" settings of weight sharing.

    H ~= B (x) A     expand: A = 1/(n T) sum_nt a_nt a_nt^T,               B = sum_nrt g_nrt g_nrt^T
                     reduce: A = 1/n sum_n (mean_t a_nt)(mean_t a_nt)^T,   B = sum_nr (sum_t g_nrt)(sum_t g_nrt)^T
    log|I + P0^-1 (B (x) A)| = sum_jk log(1 + beta_j alpha_k / precision)

(Eschenhagen et al. 2023.) Augmented copies are reduced first: activations averaged, cotangents (which carry 1/A)
summed, so that A equal copies give the value of one. Groups of a grouped convolution are separate blocks. A bias has
A = 1. Where a factor has fewer rows than its side, its rows are kept and the eigenvalues come from their Gram matrix.

With one precision per element the log precision of the block is projected on row effect + column effect, which keeps
the Kronecker form; exact whenever the precision is constant, per row, per column, or a product of both.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .chunk import Chunk
from .linalg import eigenvalues
from .part import Group, Part, mix

Setting = Literal["expand", "reduce"]
Uses = list[
    tuple[Tensor | None, list[Tensor]]
]  # per use: patches [n, A, T, groups, D], positions [n, A, T, groups, O] per seed


class Kron(Part):
    """Kronecker-factored curvature of one weight of a linear map or convolution."""

    def __init__(
        self,
        name: str,
        group: Group,
        setting: Setting,
        n_data: int,
        *,
        keep_inputs: bool,
        keep_outputs: bool,
        bias: bool,
        transposed: bool = False,
    ):
        self.transposed = transposed  # the weight is stored [inputs, outputs]
        self.names, self.group, self.setting, self.n_data, self.bias = (name,), group, setting, n_data, bias
        self.kinds = ("rows" if keep_inputs else "sum", "rows" if keep_outputs else "sum")
        self.label = f"kronecker ({setting})"

    def _observe(self, uses: Uses, mixing: Tensor | None) -> list[Tensor]:
        """Observations from all uses of the weight, as if they were further shared positions."""
        patches = (
            None if self.bias else torch.cat([p.mean(1) for p, _ in uses if p is not None], 1)
        )  # [n, T, groups, D]
        positions = torch.cat([torch.stack([g.sum(1) for g in gs], 1) for _, gs in uses], 2)  # [n, K, T, groups, O]
        if self.setting == "reduce":
            patches = None if patches is None else patches.mean(1, keepdim=True)
            positions = positions.sum(2, keepdim=True)
        if patches is None:
            patches = positions.new_ones(len(positions), 1, 1, 1)
        patches = patches / (self.n_data * patches.shape[1]) ** 0.5
        first = patches if self.kinds[0] == "rows" else torch.einsum("ntgd,ntge->gde", patches, patches)
        if self.kinds[1] == "sum":
            positions = mix(positions, mixing)
            return [first, torch.einsum("nktgo,nktgp->gop", positions, positions)]
        return [first, positions]

    def observe(self, chunk: Chunk) -> list[Tensor]:
        return self._observe(chunk.factors(self.names[0]), chunk.weights())

    def pull(
        self, chunk: Chunk, observations: list[Tensor], bars: list[Tensor], rows: slice, log_precision: Tensor
    ) -> None:
        uses = chunk.factors(self.names[0])
        bars = [bar[rows] if kind == "rows" else bar for bar, kind in zip(bars, self.kinds, strict=True)]
        mixing = chunk.weights()
        with torch.enable_grad():
            leaves = [p.requires_grad_() for p, _ in uses if p is not None]
            leaves += [g.requires_grad_() for _, gs in uses for g in gs]
            if mixing is not None:
                leaves.append(mixing.requires_grad_())
            results = self._observe(uses, mixing)
            live = [(r, bar) for r, bar in zip(results, bars, strict=True) if r.requires_grad]
            found = iter(torch.autograd.grad([r for r, _ in live], leaves, [b for _, b in live], allow_unused=True))
        patches_bars = [next(found) if p is not None else None for p, _ in uses]
        chunk.pull_factors(
            self.names[0], [(p, [next(found) for _ in gs]) for p, (_, gs) in zip(patches_bars, uses, strict=True)]
        )
        if mixing is not None:
            chunk.pull_mixing(next(found))

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        inputs, outputs = (s.to(torch.float64) for s in statistics)
        if self.kinds[1] == "rows":
            outputs = mix(outputs, mixing).flatten(0, 2)  # [N R T, groups, O]
        if self.kinds[0] == "rows":
            inputs = inputs.flatten(0, 1)
        d = inputs.shape[-1]
        theta = log_precision[self.group]
        row_effect = column_effect = None
        if isinstance(self.group, slice):
            o = outputs.shape[-1]
            table = theta.reshape(-1, d, o).mT if self.transposed else theta.reshape(-1, o, d)  # [groups, O, D]
            row_effect = table.mean(2)
            column_effect = table.mean(1) - table.mean((1, 2), keepdim=True).squeeze(2)
            theta = table.new_zeros(())
        alpha = self._spectrum(inputs, self.kinds[0], column_effect)
        beta = self._spectrum(outputs, self.kinds[1], row_effect)
        return torch.log1p(scale * torch.exp(-theta) * beta[:, :, None] * alpha[:, None, :]).sum()

    def _spectrum(self, factor: Tensor, kind: str, log_scale: Tensor | None) -> Tensor:
        """Eigenvalues [groups, m] of a factor given by its rows [N, groups, D] or itself [groups, D, D]."""
        if kind == "rows":
            if log_scale is not None:
                factor = factor * torch.exp(-log_scale / 2)
            factor = factor.movedim(1, 0)
            gram = factor @ factor.mT if factor.shape[1] <= factor.shape[2] else factor.mT @ factor
            return eigenvalues(gram)
        if log_scale is not None:
            root = torch.exp(-log_scale / 2)
            factor = root[:, :, None] * factor * root[:, None, :]
        return eigenvalues(factor)
