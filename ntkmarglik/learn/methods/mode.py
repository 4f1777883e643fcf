"""What methods share that train weights to a mode: the loss, and the evidence by blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ntkmarglik.learn.config import Config
from ntkmarglik.learn.methods.base import BLOCKS, Method, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from laplace_marglik import Evidence
    from laplace_marglik.evidence.on_blocks import OnBlocks

# settings of single structures of the curvature
OF_STRUCTURE = {"kfac": frozenset({"kfac"}), "blockdiag": frozenset({"weight_blocks"})}
SCORED_BLOCKS = 20  # blocks averaged for the final evidence of a stochastic estimator


class AtMode(Method):
    """Weights at the mode of the posterior: the log-likelihood and the prior are the loss."""

    def __init__(self, problem: Problem, structure: str = "ntk"):
        super().__init__(problem)
        self.ml = problem.marginal_likelihood(structure)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ml.data_loss(self.ml.outputs_of(x), y)

    def prior_loss(self) -> Tensor:
        import torch

        with torch.no_grad():
            return self.problem.prior.penalty(self.ml.weights) / (2 * self.ml.n_data)

    def attach(self, weights: torch.optim.Optimizer) -> None:
        from laplace_marglik.attachment import Attachment

        Attachment(weights, self.problem.prior, self.ml.weights, self.ml.n_data)

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

    @classmethod
    def uses(cls, config: Config) -> frozenset[str]:
        return BLOCKS | OF_STRUCTURE.get(cls.structure, frozenset())

    def evidence(self) -> Evidence:
        """The mean over blocks (at most SCORED_BLOCKS of them) with its standard error."""
        import torch

        from laplace_marglik import Evidence, Partition
        from laplace_marglik.evidence.on_blocks import OnBlocks

        partition = self.problem.partition()
        if not self.problem.full_batch:
            ranks = None if self.ml.ranks is not None else self.problem.ranks
            return self.measured(OnBlocks(self.ml, self.problem.examples, partition, ranks))
        assert isinstance(partition, Partition)
        with torch.no_grad():
            rounds = min(SCORED_BLOCKS, partition.n_column_blocks)
            return Evidence.mean([self.ml.full_batch(self.batches()) for _ in range(rounds)])

    def measured(self, on_blocks: OnBlocks) -> Evidence:
        """The mean over blocks that are drawn now."""
        from laplace_marglik import Partition

        partition = on_blocks.partition
        count = SCORED_BLOCKS
        if isinstance(partition, Partition):
            count = min(count, len(partition))
        return on_blocks.measured(count)

    def state(self) -> dict[str, Any]:
        return {"in_double": self.ml.in_double}

    def restore(self, state: dict[str, Any]) -> None:
        self.ml.in_double = state.get("in_double", False)
