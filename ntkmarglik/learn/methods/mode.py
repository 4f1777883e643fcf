"""What methods share that train weights to the mode of their posterior: the loss, and the evidence
by blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laplace_marglik import Evidence, Partition, Ranks
from ntkmarglik.learn.methods.base import Method, Problem

SCORED_BLOCKS = 20  # blocks averaged for the final evidence of a stochastic estimator


class AtMode(Method):
    """Weights at the mode of the posterior: the log-likelihood and the prior are the loss."""

    def __init__(self, problem: Problem, structure: str = "ntk"):
        super().__init__(problem)
        self.ml = problem.marginal_likelihood(structure)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ml.map_loss(x, y)

    def outputs(self, x: Tensor) -> Tensor:
        return self.ml.outputs_of(x, seed=self.problem.config.run.seed)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The training data in fixed batches, for estimators that pass over all of them."""
        data, size = self.problem.data, self.problem.config.training.batch_size
        return list(zip(data.x_train.split(size), data.y_train.split(size), strict=True))


class MeasuredByBlocks(AtMode):
    """The evidence is measured in blocks of the configured size with the curvature `structure`."""

    def __init__(self, problem: Problem, structure: str = "ntk"):
        super().__init__(problem, structure)
        self.structure = structure

    def evidence(self) -> Evidence:
        """The mean over the blocks of a partition (at most SCORED_BLOCKS of them) with its standard
        error.
        """
        partition = self.problem.partition()
        with torch.no_grad():
            if self.problem.full_batch:
                rounds = (
                    1
                    if partition.n_column_blocks == 1
                    else min(SCORED_BLOCKS, partition.n_column_blocks)
                )
                return Evidence.mean([self.ml.full_batch(self.batches()) for _ in range(rounds)])
            return Evidence.mean(self.on_blocks(partition, min(SCORED_BLOCKS, len(partition))))

    def on_blocks(
        self, partition: Partition, count: int, use: Callable[[Evidence], None] = lambda _: None
    ) -> list[Evidence]:
        """The evidence of the next blocks; where ranks do not share blocks, they take them in turn.

        use: what to do with one that is computed here, while it has its graph.
        """
        data = self.problem.data
        generator = self.problem.generator
        found = {}
        ranks = None if self.ml.ranks is not None else self.problem.ranks
        for number in range(count):
            block, before = partition.sample(), generator.get_state()
            if ranks is None or ranks.owns(number):
                evidence = self.ml(
                    data.x_train[block.index], data.y_train[block.index], block=block
                )
                use(evidence)
                found[number] = evidence.detach()
            # all ranks go on as if they had evaluated it, which takes one seed
            if ranks is not None:
                generator.set_state(before)
                torch.randint(2**31, (), generator=generator)
        return (
            list(found.values()) if ranks is None else self._of_all(found, count, partition, ranks)
        )

    def _of_all(
        self, own: dict[int, Evidence], count: int, partition: Partition, ranks: Ranks
    ) -> list[Evidence]:
        """The evidences of every rank, on all of them."""
        values = torch.zeros(count, 3, dtype=torch.float64, device=self.problem.data.x_train.device)
        for number, evidence in own.items():
            values[number] = torch.stack(
                [evidence.log_likelihood, evidence.scatter, evidence.log_det_ratio]
            )
        # a rank without a block cannot tell the status; the first, which records it, always has one
        status = next(iter(own.values())).status if own else "approximation"
        rows = ranks.sum(values, "evidence of the blocks").unbind()
        return [Evidence(row[0], row[1], row[2], len(partition), status) for row in rows]

    def state(self) -> dict[str, Any]:
        return {"in_double": self.ml.in_double}

    def restore(self, state: dict[str, Any]) -> None:
        self.ml.in_double = state.get("in_double", False)
