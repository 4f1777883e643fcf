"""Augerino: augmentation ranges learned with the weights by the training loss (Benton et al.
2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.methods.base import AUGMENT_RATES, Method, Problem
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.methods.mode import MeasuredByBlocks

if TYPE_CHECKING:
    from torch import Tensor, nn


class Augerino(MeasuredByBlocks):
    """The MAP loss of the averaged network less a reward for wide ranges; prior fixed.

    loss = -log p(y | mean_a f(g_a x)) / tau + delta |w|^2 / 2N - r |eta|        (r:
    --augerino-regulariser)

    Without the reward the loss prefers no augmentation, which fits the training data best.
    """

    name = "augerino"
    label = "Augerino"
    colour = "#56B4E9"
    learns_by = "loss"

    @classmethod
    def uses(cls, config: Config) -> frozenset[str]:
        return super().uses(config) | AUGMENT_RATES | {"augerino_regulariser"}

    @classmethod
    def check(cls, config: Config) -> None:
        if config.hyperparameters.augment == "none":
            raise NtkMarglikError(
                "--method augerino learns the ranges of an augmentation and needs --augment affine."
            )

    def parameters_of_loss(self) -> list[nn.Parameter]:
        return [] if self.problem.augment is None else list(self.problem.augment.parameters())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        import torch

        from asdl_marglik import augmented, run_averaged

        problem = self.problem
        if problem.augment is None:
            return super().loss(x, y)
        seed = int(torch.randint(2**31, (), generator=problem.generator))
        copies = augmented(problem.augment, x, seed)
        f = run_averaged(problem.model, copies)
        reward = torch.cat([p.flatten() for p in problem.augment.parameters()]).norm()
        rate = problem.config.hyperparameters.augerino_regulariser
        return self.ml.data_loss(f, y) - rate * reward

    def baseline(self, fixed: Problem) -> Method:
        return Map(fixed, self.structure)
