"""Hyperparameters learned by the marginal likelihood of the linearised Laplace approximation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from laplace_marglik import Evidence, evidence_by_blocks

from .base import LearnsBy, Problem, Round
from .map import Map


class Laplace(Map):
    """Gradient steps on the evidence of a block of data; a new block for every step.

    With all data in the block the curvature is computed once a round, and the prior takes its steps on it; steps of the
    augmentation need it anew, or, with `--aug-block`, a gradient from a block of that size.
    """

    learns_by: LearnsBy = "evidence"

    def __init__(self, problem: Problem):
        super().__init__(problem, problem.config.estimator.method)
        self.partition = problem.partition()

    @property
    def full_batch(self) -> bool:
        return self.problem.config.estimator.subset in (0, self.problem.data.n_data)

    def learn(self, round_: Round) -> None:
        self.partition.redraw()
        cached: Callable[[], Evidence] | None = None
        size = self.problem.config.estimator.aug_block
        if self.full_batch and size and round_.augment_steps:
            generator = self.problem.generator
            cached = evidence_by_blocks(self.ml, self.problem.data.dealt(size, generator), generator)
        for step in range(round_.steps):
            moves_augmentation = step < round_.augment_steps
            if not self.full_batch:
                evidence = self._on_block()
            elif moves_augmentation and not size:
                evidence = self.ml.full_batch(self.batches())
            else:
                cached = cached or self.ml.cached_full_batch(self.batches())
                evidence = cached()
            self._step(round_, step, evidence)

    def _on_block(self) -> Evidence:
        data, block = self.problem.data, self.partition.sample()
        return self.ml(data.x_train[block.index], data.y_train[block.index], block=block)

    def _step(self, round_: Round, step: int, evidence: Evidence) -> None:
        optimizers = [
            optimizer
            for optimizer, steps in (
                (round_.prior_optimizer, round_.prior_steps),
                (round_.augment_optimizer, round_.augment_steps),
            )
            if optimizer is not None and step < steps
        ]
        round_.set_rates(step)
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        gradients = torch.autograd.grad(-evidence.total / self.ml.n_data, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        self.problem.project()
        round_.evidences.append(evidence.detach())
