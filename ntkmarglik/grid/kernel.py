"""The kernel of all rows, computed once: every bound by the kernel is made of its diagonal blocks.

log|A| <= sum_m log|A_m|,   A = I + U^T K U,   K = J P0^-1 J^T [N C, N C],   U [C, columns] a root for each datum
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from asdl_marglik import eigenvalues, log_det_identity_plus, mixed_gram
from laplace_marglik import Block, Evidence, SpectralMarginalLikelihood, Spectrum
from laplace_marglik.evidence import Status
from torch import Tensor

from .bound import Bound

STRUCTURES = ("ntk", "full")  # whose values are functions of the kernel


@dataclass(frozen=True)
class Kernel:
    """K of all N data and C outputs at one value of the hyperparameters, with the outputs f [N, C] there."""

    ml: SpectralMarginalLikelihood
    y: Tensor
    f: Tensor
    gram: Tensor  # [N C, N C]

    @classmethod
    def of(cls, ml: SpectralMarginalLikelihood, x: Tensor, y: Tensor) -> Kernel:
        """One pass over all data with the prior as it is now; `ml` has the structure ntk and all outputs."""
        f, gram = ml.gram(x, y)
        return cls(ml, y, f, gram)

    def spectrum(self, bound: Bound, block: Block) -> Spectrum:
        """The block as a function of the prior precision, of which K must have been computed with 1."""
        square = self.ml.prior.scatter(self.ml.prior.squares(self.ml.weights)).detach()
        values = eigenvalues(self._rows(bound, block))
        return Spectrum(values, self._log_likelihood(block), square, block.n_blocks, _status(bound, block))

    def evidence(self, bound: Bound, block: Block) -> Evidence:
        """The block at the prior of K."""
        log_det = log_det_identity_plus(self._rows(bound, block))
        scatter = self.ml.prior.scatter(self.ml.prior.squares(self.ml.weights)).detach()
        return Evidence(
            self._log_likelihood(block), scatter, block.n_blocks * log_det, block.n_blocks, _status(bound, block)
        )

    def _log_likelihood(self, block: Block) -> Tensor:
        return (
            block.n_data_blocks * self.ml.likelihood.log_prob(self.f[block.index].double(), self.y[block.index]).sum()
        )

    @torch.no_grad()
    def _rows(self, bound: Bound, block: Block) -> Tensor:
        """U^T K U of the block's rows."""
        order = block.index.argsort()  # any order within a block will do; this one needs no copy of the whole
        index, columns = block.index[order], block.columns[order]
        f, y, n_outputs = self.f[index].double(), self.y[index], self.f.shape[1]
        if bound.outputs == "all":
            mixing = self.ml.likelihood.block_root(f, y, columns.sort(1).values)
        elif bound.root == "paper":
            mixing = self.ml.likelihood.block_root(f, y, columns)
            return mixed_gram(self._cut((index[:, None] * n_outputs + columns).flatten()).double(), mixing)
        else:
            mixing = self.ml.likelihood.root(f, y, bound.ml_root, columns)
        everything = torch.arange(n_outputs)
        return mixed_gram(self._cut((index[:, None] * n_outputs + everything).flatten()).double(), mixing)

    def _cut(self, rows: Tensor) -> Tensor:
        return self.gram if len(rows) == len(self.gram) else self.gram[rows][:, rows]


def _status(bound: Bound, block: Block) -> Status:
    if block.n_blocks == 1:
        return "exact"
    return "approximation" if bound.root == "paper" else "bound"
