"""The baseline: weights at the mode of the posterior under a fixed prior."""

from __future__ import annotations

import torch
from laplace_marglik import Evidence
from torch import Tensor

from .base import LearnsBy, Method, Problem

SCORED_BLOCKS = 20  # blocks averaged for the final evidence of a stochastic estimator


class Map(Method):
    """Fixed hyperparameters.

    Its evidence is measured in blocks of the configured size with the curvature `structure`: that of the method it is
    compared with.
    """

    learns_by: LearnsBy = "nothing"

    def __init__(self, problem: Problem, structure: str = "ntk"):
        super().__init__(problem)
        self.structure = structure
        self.ml = problem.marginal_likelihood(structure)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ml.map_loss(x, y)

    def outputs(self, x: Tensor) -> Tensor:
        return self.ml.outputs_of(x, seed=self.problem.config.run.seed)

    def evidence(self) -> Evidence:
        """The mean over the blocks of a partition (at most SCORED_BLOCKS of them) with its standard error."""
        data, partition = self.problem.data, self.problem.partition()
        with torch.no_grad():
            if self.problem.config.estimator.subset in (0, data.n_data):
                rounds = 1 if partition.n_column_blocks == 1 else min(SCORED_BLOCKS, partition.n_column_blocks)
                return Evidence.mean([self.ml.full_batch(self.batches()) for _ in range(rounds)])
            blocks = [partition.sample() for _ in range(min(SCORED_BLOCKS, len(partition)))]
            return Evidence.mean([self.ml(data.x_train[b.index], data.y_train[b.index], block=b) for b in blocks])

    def baseline(self, fixed: Problem) -> Method:
        return Map(fixed, self.structure)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The training data in fixed batches, for full-batch estimators."""
        data, size = self.problem.data, self.problem.config.training.batch_size
        return list(zip(data.x_train.split(size), data.y_train.split(size), strict=True))
