"""Hyperparameters learned by the marginal likelihood of the linearised Laplace approximation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from asdl_marglik import Structure
from laplace_marglik import Evidence, evidence_by_blocks
from ntkmarglik.learn.distributed import together
from ntkmarglik.learn.methods.base import Method, Problem, Round
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.methods.mode import MeasuredByBlocks


class Laplace(MeasuredByBlocks):
    """Gradient steps on the evidence of a block of data; a new block for every step, or several, on
    several ranks.

    With all data in the block the curvature is computed once a round, and the prior takes its steps
    on it; steps of the augmentation need it anew, or, with `--aug-block`, a gradient from a block
    of that size.
    """

    learns_by = "evidence"

    def __init__(self, problem: Problem):
        super().__init__(problem, self.structure)
        self.partition = problem.partition()

    def baseline(self, fixed: Problem) -> Method:
        return Map(fixed, self.structure)

    def learn(self, round_: Round) -> None:
        self.partition.redraw()
        cached: Callable[[], Evidence] | None = None
        size, full_batch = self.problem.config.estimator.aug_block, self.problem.full_batch
        if full_batch and size and round_.augment_steps:
            generator = self.problem.generator
            cached = evidence_by_blocks(
                self.ml, self.problem.data.dealt(size, generator), generator
            )
        for step in range(round_.steps):
            optimizers = round_.moving(step)
            parameters = [
                p for o in optimizers for group in o.param_groups for p in group["params"]
            ]
            if not full_batch:
                evidence, gradients = self._on_blocks(parameters)
            else:
                if step < round_.augment_steps and not size:
                    evidence = self.ml.full_batch(self.batches())
                else:
                    cached = cached or self.ml.cached_full_batch(self.batches())
                    evidence = cached()
                gradients = self._gradients(evidence, parameters)
            round_.set_rates(step)
            for parameter, gradient in zip(parameters, self._of_all_ranks(gradients), strict=True):
                parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            self.problem.project()
            round_.evidences.append(evidence.detach())

    def _on_blocks(self, parameters: list[Tensor]) -> tuple[Evidence, list[Tensor]]:
        """The mean over the blocks of a step, and the gradient of those of them that are computed
        here.
        """
        count, found = self.problem.blocks_per_step, []
        evidences = self.on_blocks(
            self.partition, count, lambda e: found.append(self._gradients(e, parameters, count))
        )
        gradients = found[0] if found else [torch.zeros_like(p) for p in parameters]
        for more in found[1:]:
            gradients = [total + gradient for total, gradient in zip(gradients, more, strict=True)]
        return Evidence.mean(evidences), gradients

    def _gradients(
        self, evidence: Evidence, parameters: list[Tensor], count: int = 1
    ) -> list[Tensor]:
        return list(torch.autograd.grad(-evidence.total / (count * self.ml.n_data), parameters))

    def _of_all_ranks(self, gradients: list[Tensor]) -> list[Tensor]:
        """The sum over ranks; of a block that they share, on which they agree up to rounding, the
        mean.
        """
        ranks = self.problem.ranks
        if ranks is None:
            return gradients
        if self.problem.shares_blocks:
            gradients = [gradient / ranks.size for gradient in gradients]
        return together(gradients, ranks, "gradients of the evidence")


@functools.cache
def laplace_with(curvature: Structure) -> type[Laplace]:
    """The method whose evidence has this structure of the curvature, and which is named by it."""

    class LaplaceWithStructure(Laplace):
        name = curvature.name
        label = curvature.label
        colour = curvature.colour
        structure = curvature.name
        sums_over_data = curvature.additive

    return LaplaceWithStructure
