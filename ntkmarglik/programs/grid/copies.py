"""Augmented copies whose random draws belong to the data point, so that every bound sees the same
network outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntkmarglik.problem.augment import RANGES, AffineAugmentation


class PairedCopies(AffineAugmentation):
    """Affine copies with fixed draws for each of N data points; `index` names those of the next
    call.

    With draws that depend on the block, a bound and the exact value would average over different
    copies, and the bound could lie above by chance.
    """

    def __init__(self, samples: int, n_data: int, seed: int, eta: Tensor):
        super().__init__(samples, init=eta.tolist())
        self.to(eta)
        generator = torch.Generator().manual_seed(seed)
        self.eps = (
            2 * torch.rand(n_data, samples, len(RANGES), generator=generator, dtype=torch.float64)
            - 1
        )
        self.index = torch.arange(n_data)

    def draws(self, n: int, like: Tensor) -> Tensor:
        return self.eps[self.index[:n].cpu()].flatten(0, 1).to(like)
