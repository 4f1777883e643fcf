"""Values of a bound on the grid: the mean over the blocks of its partition."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from asdl_marglik.curvature.blocks import Named
from laplace_marglik import (
    Block,
    Evidence,
    GaussianPrior,
    InducingPartition,
    SpectralMarginalLikelihood,
)
from laplace_marglik.evidence.rows import n_root_columns
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods import Problem
from ntkmarglik.problem.augment import ROTATION, AffineAugmentation
from ntkmarglik.problem.data import Dataset
from ntkmarglik.programs.grid.bound import Bound
from ntkmarglik.programs.grid.config import Grid, GridConfig
from ntkmarglik.programs.grid.copies import PairedCopies
from ntkmarglik.programs.grid.kernel import Kernel

CHOOSING = 50  # evaluations that choose the inducing rows
DRAWN = 20  # conditioned blocks that a bound is averaged over, if their number is not given


def values_of(grid: Grid) -> list[float]:
    """The hyperparameter's values."""
    if grid.hyperparameter == "prior":
        return np.logspace(-4, 4, grid.points).tolist()
    return np.linspace(0, math.pi, grid.points).tolist()


def n_blocks(bound: Bound, data: Dataset, config: GridConfig) -> int:
    """Blocks that a bound is averaged over."""
    if bound.conditioned:
        return config.grid.blocks or DRAWN
    return len(bound.blocks(data, config.place.seed, config.grid.blocks))


@dataclass(frozen=True)
class Reference:
    """The trained network with the hyperparameter that varies, and the data it was trained on."""

    data: Dataset
    model: nn.Module
    prior: GaussianPrior
    augment: PairedCopies | None
    root_samples: int = 1
    weight_blocks: Named = "module"

    def marginal_likelihood(
        self, bound: Bound, kfac: Literal["expand", "reduce"]
    ) -> SpectralMarginalLikelihood:
        return SpectralMarginalLikelihood(
            self.model,
            "classification",
            n_data=self.data.n_data,
            prior=self.prior,
            structure=bound.structure,
            outputs=bound.n_columns,
            columns=cast(Literal["shared", "iid"], bound.columns),
            root=bound.ml_root,
            samples=self.root_samples if bound.root == "sampled" else 1,
            augment=self.augment,
            kfac=kfac,
            blocks=self.weight_blocks,
            generator=torch.Generator().manual_seed(0),
        )


def reference_of(problem: Problem, config: GridConfig) -> Reference:
    """A trained problem made ready for the grid: number format, scalar prior or paired
    augmentation.
    """
    dtype = getattr(torch, config.place.grid_precision)
    data = problem.data
    old = problem.augment
    data = Dataset(
        data.name, data.x_train.to(dtype), data.y_train, data.x_test, data.y_test, data.n_classes
    )
    model = copy.deepcopy(problem.model).to(dtype).eval()
    augment = None
    turning = config.grid.hyperparameter == "rotation"
    if old is not None or turning:
        if isinstance(old, AffineAugmentation) and old.flip:
            raise NtkMarglikError(
                "The network was trained with --flip, which a grid cannot repeat; use one without."
            )
        eta = old.eta.detach() if isinstance(old, AffineAugmentation) else data.x_train.new_zeros(6)
        seed = config.place.seed
        augment = PairedCopies(config.reference.aug_samples, data.n_data, seed, eta.to(dtype))
    if turning:
        prior = copy.deepcopy(problem.prior).to(dtype)
    else:
        prior = GaussianPrior(model, "scalar")
    grid = config.grid
    return Reference(data, model, prior, augment, grid.root_samples, grid.weight_blocks)


class Evaluator:
    """Values of bounds at a network; `share` has one kernel of all rows serve every bound made of
    its blocks.
    """

    def __init__(self, reference: Reference, config: GridConfig, *, share: bool):
        self.reference = reference
        self.config = config
        self.share = share
        self._kernel: tuple[float | None, Kernel] | None = None  # and the value it belongs to

    def __call__(self, bound: Bound, values: list[float]) -> list[Evidence]:
        """The bound at each value, averaged over blocks, with its standard error."""
        ml = self.reference.marginal_likelihood(bound, self.config.grid.kfac)
        blocks = self.blocks(bound, ml)
        shared = self.share and bound.cut_from_kernel
        means = []
        with torch.no_grad():
            if self.config.grid.hyperparameter == "prior":
                if shared:
                    spectra = self._kernel_at(None).spectra(bound, blocks)
                else:
                    spectra = [ml.spectrum(*self._data(block)) for block in blocks]
                for value in values:
                    means.append(Evidence.mean([spectrum.evidence(value) for spectrum in spectra]))
                return means
            for value in values:
                if shared:
                    evidences = self._kernel_at(value).evidences(bound, blocks)
                else:
                    evidences = [self._turned(ml, value, block) for block in blocks]
                means.append(Evidence.mean(evidences))
        return means

    def blocks(self, bound: Bound, ml: SpectralMarginalLikelihood) -> list[Block]:
        """The blocks that a bound is averaged over."""
        if bound.conditioned:
            return self._conditioned_blocks(bound, ml)
        return bound.blocks(self.reference.data, self.config.place.seed, self.config.grid.blocks)

    def _conditioned_blocks(self, bound: Bound, ml: SpectralMarginalLikelihood) -> list[Block]:
        """Random blocks with inducing rows that some evaluations have chosen.

        They are chosen at the reference network's hyperparameters, and are the same for all values
        of the grid: the bound holds for any.
        """
        data = self.reference.data
        partition = InducingPartition(
            data.n_data,
            data.n_classes,
            bound.subset,
            self.config.grid.inducing,
            n_columns=n_root_columns(
                ml.likelihood, torch.Size([data.n_classes]), bound.ml_root, ml.samples
            ),
            generator=torch.Generator().manual_seed(self.config.place.seed),
        )
        with torch.no_grad():
            for _ in range(CHOOSING):
                block = partition.sample()
                x, y, _ = self._data(block)
                partition.update(block, ml(x, y, block=block))
        return [partition.sample() for _ in range(self.config.grid.blocks or DRAWN)]

    def _data(self, block: Block) -> tuple[Tensor, Tensor, Block]:
        """Inputs, targets and the block itself, its augmentations prepared."""
        data = self.reference.data
        if self.reference.augment is not None:
            self.reference.augment.index = block.index
        return data.x_train[block.index], data.y_train[block.index], block

    def _turned(self, ml: SpectralMarginalLikelihood, value: float, block: Block) -> Evidence:
        """A block at a rotation range; the other ranges stay as they were learned."""
        self._turn(value)
        x, y, _ = self._data(block)
        return ml(x, y, block=block)

    def _turn(self, value: float) -> None:
        assert self.reference.augment is not None
        self.reference.augment.eta[ROTATION] = value

    def _kernel_at(self, value: float | None) -> Kernel:
        """The kernel of all data: at a rotation range, or (None) as everything is."""
        if self._kernel is None or self._kernel[0] != value:
            self._kernel = None  # its memory is needed
            if value is not None:
                self._turn(value)
            data = self.reference.data
            whole = Bound("ntk", data.n_data, "all")
            ml = self.reference.marginal_likelihood(whole, self.config.grid.kfac)
            if self.reference.augment is not None:
                self.reference.augment.index = torch.arange(data.n_data)
            self._kernel = (value, Kernel.of(ml, data.x_train, data.y_train))
        return self._kernel[1]
