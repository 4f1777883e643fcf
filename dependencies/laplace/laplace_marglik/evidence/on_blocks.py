"""The evidence of blocks of a training set: read, evaluated, and shared out among processes.

Every process draws the same blocks. Where they share each block (`ml.ranks`) all evaluate it
together; where each has blocks of its own (`ranks`) they take them in turn and exchange the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asdl_marglik import Ranks
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood
from laplace_marglik.evidence.row_kernel import KnownSides
from laplace_marglik.examples import Examples
from laplace_marglik.inducing import InducingPartition
from laplace_marglik.partition import Block, Partition

REFRESHES = 20  # evaluations before a report, after which inducing rows hardly get better
MEASURED = 10_000  # data of the log-likelihood of a report at most


@dataclass
class DrawnBlock:
    """A block and a function that gives its evidence; none where another process evaluates it."""

    block: Block
    evaluate: Callable[[], Evidence] | None


@dataclass
class OnBlocks:
    """Draws blocks and evaluates them.

    Args:
        ml: the marginal likelihood.
        examples: the training set.
        partition: that blocks are drawn from.
        ranks: processes that take blocks in turn; None for one, or where they share every block.
        likelihood_batch: data points drawn at random for the log-likelihood of each block; 0 for
            those of the block.
    """

    ml: MarginalLikelihood
    examples: Examples
    partition: Partition | InducingPartition
    ranks: Ranks | None = None
    likelihood_batch: int = 0

    def evaluated(
        self,
        count: int,
        use: Callable[[Evidence], None] = lambda _: None,
        *,
        cached: bool = False,
        sides: bool = False,
        again: bool = True,
    ) -> tuple[list[Evidence], list[DrawnBlock]]:
        """The evidences of the next blocks, those of other processes included, and the blocks.

        Args:
            count: how many blocks.
            use: what to do with an evidence that is computed here, while it has its graph.
            cached: keep the blocks' curvature, for more evaluations of `DrawnBlock.evaluate`.
            sides: exchange what an interval needs, too.
            again: the blocks may be evaluated again, and hold their data for it.
        """
        drawn = []
        values: dict[int, Evidence] = {}
        generator = self.ml.generator
        for number in range(count):
            block = self.partition.sample()
            data = self._some_data() if self.likelihood_batch else None
            before = generator.get_state()
            evaluate = self._evaluation(block, data, cached) if self._owns(number) else None
            if evaluate is not None:
                evidence = evaluate()
                use(evidence)
                values[number] = evidence
            drawn.append(DrawnBlock(block, evaluate if again else None))
            if self.ranks is not None:  # all go on as if they had evaluated it: one seed a pass
                generator.set_state(before)
                for _ in range(1 if data is None else 2):
                    torch.randint(2**31, (), generator=generator)
        return self.of_all(values, count, sides=sides), drawn

    def _owns(self, number: int) -> bool:
        return self.ranks is None or self.ranks.owns(number)

    def _evaluation(
        self, block: Block, data: Tensor | None, cached: bool
    ) -> Callable[[], Evidence]:
        """The evidence of a block, with the log-likelihood of some data, as a function."""
        x, y = self.examples.take(block.index)
        batch = None if data is None else self.examples.take(data)
        if cached:
            return self.ml.cached(x, y, block=block, likelihood_batch=batch)
        return lambda: self.ml(x, y, block=block, likelihood_batch=batch)

    def _some_data(self) -> Tensor:
        """Data points of the log-likelihood, by number."""
        n = len(self.examples)
        if self.likelihood_batch >= n:
            return torch.arange(n)
        return torch.randperm(n, generator=self.ml.generator)[: self.likelihood_batch]

    def of_all(
        self, own: dict[int, Evidence], count: int, *, sides: bool = False
    ) -> list[Evidence]:
        """The evidences of all processes, in the order of their blocks.

        Args:
            own: those computed here, by the number of their block.
            count: blocks in all.
            sides: what an interval needs, too.
        """
        if self.ranks is None:
            return list(own.values())
        values = torch.zeros(count, 5, dtype=torch.float64, device=self.ml.device)
        for number, evidence in own.items():
            parts = [evidence.log_likelihood, evidence.scatter, evidence.log_det_ratio]
            values[number, :3] = torch.stack([part.detach() for part in parts])
            if sides and evidence.row_kernel is not None:
                values[number, 3:] = evidence.row_kernel.lower_sides()
        rows = self.ranks.sum(values, "evidence of the blocks").unbind()
        # a rank without a block cannot tell the status; the first, which records it, always has one
        status = next(iter(own.values())).status if own else "approximation"
        n_blocks = self.partition.sample_weight
        evidences = []
        for number, row in enumerate(rows):
            kernel = own[number].row_kernel if number in own else None
            if sides and kernel is None:
                kernel = self._known(row[3:])
            log_likelihood, scatter, log_det_ratio = row[:3].unbind()
            evidences.append(
                Evidence(
                    log_likelihood,
                    scatter,
                    log_det_ratio,
                    n_blocks,
                    status,
                    n_data=self.ml.n_data,
                    row_kernel=kernel,
                )
            )
        return evidences

    def _known(self, sides: Tensor) -> KnownSides | None:
        if not isinstance(self.partition, InducingPartition):
            return None
        return KnownSides(sides, self.partition.inducing_rows, self.ml.two_sided)

    def measured(self, count: int) -> Evidence:
        """The mean over fresh blocks at fixed hyperparameters, with an interval if conditioned.

        Of conditioned blocks the inducing rows are refreshed first, then fixed, and the
        log-likelihood is that of many data, which cost one pass without rows.

        Args:
            count: of blocks.
        """
        with torch.no_grad():
            if not isinstance(self.partition, InducingPartition):
                return Evidence.mean(self.evaluated(count, again=False)[0])
            alone = replace(self, likelihood_batch=0)
            for _ in range(REFRESHES):
                values, drawn = alone.evaluated(1)
                self.refresh(drawn, values)
            return Evidence.mean(alone._with_many_data(count))

    def _with_many_data(self, count: int) -> list[Evidence]:
        """Fresh blocks, each with the log-likelihood of many data; once for all if it is the same.

        Args:
            count: of blocks.
        """
        n = len(self.examples)
        with_data = replace(self, likelihood_batch=min(n, MEASURED))
        same = n <= MEASURED and self.ml.augment is None
        blocks, _ = with_data.evaluated(1 if same else count, sides=True, again=False)
        if same:
            others, _ = self.evaluated(count - 1, sides=True, again=False)
            log_likelihood = blocks[0].log_likelihood
            blocks += [replace(block, log_likelihood=log_likelihood) for block in others]
        return blocks

    def refresh(self, drawn: list[DrawnBlock], values: list[Evidence]) -> None:
        """Let the first of some evaluated blocks choose the next inducing rows.

        Args:
            drawn: the blocks.
            values: their evidences.
        """
        if isinstance(self.partition, InducingPartition):
            own = drawn[0].evaluate is not None
            self.partition.update(drawn[0].block, values[0] if own else None)
