"""The kernel of all rows, computed once: every bound by the kernel is made of its diagonal blocks.

log|A| <= sum_m log|A_m|,   A = I + U^T K U,   K = J P0^-1 J^T [N C, N C],   U [C, columns] a root
for each datum
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from asdl_marglik import eigenvalues, log_det_identity_plus, mixed_gram
from laplace_marglik import Block, Evidence, SpectralMarginalLikelihood, Spectrum
from laplace_marglik.evidence.evidence import Status
from laplace_marglik.likelihood.base import Root
from ntkmarglik.programs.grid.bound import Bound


@dataclass(frozen=True)
class Kernel:
    """K of all N data and C outputs at one value of the hyperparameters, with the outputs f [N, C]
    there.
    """

    ml: SpectralMarginalLikelihood
    y: Tensor
    f: Tensor
    gram: Tensor  # [N C, N C]

    @classmethod
    def of(cls, ml: SpectralMarginalLikelihood, x: Tensor, y: Tensor) -> Kernel:
        """One pass over all data with the prior as it is now; `ml` has the structure ntk and all
        outputs.
        """
        f, gram = ml.gram(x, y)
        return cls(ml, y, f, gram)

    def spectra(self, bound: Bound, blocks: list[Block]) -> list[Spectrum]:
        """The blocks as functions of the prior precision, of which K must have been computed with
        1.
        """
        square = self._scatter()
        spectra = []
        for group, grams in self._grams(bound, blocks):
            eigenvalues_of_blocks = eigenvalues(grams).clamp_min(0)
            for block, values in zip(group, eigenvalues_of_blocks, strict=True):
                log_likelihood = self._log_likelihood(block)
                status = _status(bound, block)
                spectra.append(Spectrum(values, log_likelihood, square, block.n_blocks, status))
        return spectra

    def evidences(self, bound: Bound, blocks: list[Block]) -> list[Evidence]:
        """The blocks at the prior of K."""
        scatter = self._scatter()
        evidences = []
        for group, grams in self._grams(bound, blocks):
            for block, log_det in zip(group, log_det_identity_plus(grams), strict=True):
                evidence = Evidence(
                    self._log_likelihood(block),
                    scatter,
                    block.n_blocks * log_det,
                    block.n_blocks,
                    _status(bound, block),
                )
                evidences.append(evidence)
        return evidences

    def _scatter(self) -> Tensor:
        prior = self.ml.prior
        return prior.scatter(prior.squares(self.ml.weights)).detach()

    def _log_likelihood(self, block: Block) -> Tensor:
        f = self.f[block.index].double()
        log_probs = self.ml.likelihood.log_prob(f, self.y[block.index])
        return block.n_data_blocks * log_probs.sum()

    @torch.no_grad()
    def _grams(self, bound: Bound, blocks: list[Block]) -> Iterator[tuple[list[Block], Tensor]]:
        """U^T K U of the rows of every block [blocks, rows, rows], blocks of the same data
        together.

        The order of rows does not matter: data are taken in theirs, in which the whole kernel needs
        no copy.
        """
        groups: dict[tuple[int, ...], list[Block]] = {}
        for block in blocks:
            groups.setdefault(tuple(sorted(block.index.tolist())), []).append(block)
        for data, group in groups.items():
            columns = torch.stack([block.columns[block.index.argsort()] for block in group])
            yield group, self._grams_of_data(bound, torch.tensor(data), columns)

    def _grams_of_data(self, bound: Bound, index: Tensor, columns: Tensor) -> Tensor:
        """Those of blocks of the same data, with the outputs `columns` [blocks, n, K] in them."""
        likelihood = self.ml.likelihood
        n_outputs = self.f.shape[1]
        f = self.f[index].double()
        y = self.y[index]
        if bound.root == "paper":
            rows = (index[:, None] * n_outputs + columns).flatten(1)
            grams = []
            for rows_of_block, columns_of_block in zip(rows, columns, strict=True):
                mixing = likelihood.block_root(f, y, columns_of_block)
                grams.append(mixed_gram(self._cut(rows_of_block), mixing))
            return torch.stack(grams)
        outputs = torch.arange(n_outputs)
        gram = self._cut((index[:, None] * n_outputs + outputs).flatten())
        if bound.outputs == "all":
            contrasts = likelihood.contrasts(self.f.shape[1:])
            if contrasts is None:
                root = likelihood.block_root(f, y, outputs.expand(len(f), -1))
            else:  # fewer rows than outputs
                root = contrasts.mT @ likelihood.contrast_root(f, y)
            return mixed_gram(gram, root).unsqueeze(0)
        # the columns of a root, all of them mixed once, are cut out for each block
        kind = cast(Root, bound.ml_root)  # of gradients there is no root to cut
        root = likelihood.root(f, y, kind, outputs.expand(len(f), -1))
        mixed = mixed_gram(gram, root)
        rows = (torch.arange(len(f))[:, None] * n_outputs + columns).flatten(1)
        return torch.stack([mixed[r][:, r] for r in rows])

    def _cut(self, rows: Tensor) -> Tensor:
        if len(rows) == len(self.gram):
            return self.gram.double()
        return self.gram[rows][:, rows].double()


def _status(bound: Bound, block: Block) -> Status:
    if block.n_blocks == 1:
        return "exact"
    return "approximation" if bound.root == "paper" else "bound"
