"""Hyperparameters learned by the evidence, in somebody's own training loop.

Three things enter a loop: the learned weight decay in every step of the weights (`attach`), a round
of hyperparameter steps now and then (`round`), and a state for its checkpoints.

    learner = EvidenceLearner(ml, train_set, rows=200, total_rounds=epochs)
    learner.attach(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            ml.data_loss(model(x), y).backward()
            optimizer.step()
        learner.round()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asdl_marglik import STRUCTURES, Ranks, evaluating
from laplace_marglik import checks
from laplace_marglik.attachment import Attachment
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.by_blocks import evidence_by_blocks
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.gradient_rows import is_gradient
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood
from laplace_marglik.evidence.on_blocks import DrawnBlock, OnBlocks
from laplace_marglik.evidence.rows import n_root_columns
from laplace_marglik.examples import Batches, dealt, examples_of, in_order
from laplace_marglik.inducing import InducingPartition
from laplace_marglik.moves import AdamMoves, FixedPointMoves, Moves
from laplace_marglik.partition import Partition
from laplace_marglik.schedule import is_due

PriorUpdate = Literal["adam", "fixed-point"]

# Hyperparameters that move outputs learn from the gradient of the log-likelihood, of which few rows
# know little: so many are enough, and with fewer so many data come besides. With 100 rows, 400 data
# besides brought a rotation to 2.5 in 55 instead of 75 epochs, and took 3.5 times as long.
ENOUGH_ROWS = 100
DATA_BESIDES = 250


@dataclass(frozen=True)
class Round:
    """What happened in a round of hyperparameter steps.

    Args:
        evidence: the mean over its steps, each at the hyperparameters of that step.
        steps: how many there were.
        seconds: that they took.
    """

    evidence: Evidence
    steps: int
    seconds: float

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the evidence, if all steps saw the same inducing rows; else ask `measure`."""
        return self.evidence.interval


class EvidenceLearner:
    """Learns all hyperparameters of a marginal likelihood beside the training of the weights.

    Args:
        ml: the marginal likelihood.
        data: the training set: a pair (x, y) of tensors or any map-style data set of pairs, or of
            mappings with the targets inside (`ml.labels`).
        rows: of a block: rows if it is conditioned, else data points; None for all data.
        inducing: fraction of the rows that are inducing rows; 0 for independent blocks of data
            points with `ml.outputs` root columns each.
        steps: of prior, noise and temperature in a round.
        lr: their learning rate (Adam) at the start.
        lr_min: and at the end of `total_rounds`; None for a tenth.
        prior_update: "adam" for the precisions of the prior too, or "fixed-point", MacKay's update,
            which takes them anywhere in a few steps; `lr` is then the share of the way in a step.
        augment_steps: steps in a round of hyperparameters that move outputs (augmentation, inside
            the network); None for as many.
        lr_augment: their learning rate at the start.
        lr_augment_min: and at the end; None for a tenth.
        steps_per_block: steps taken on one block, whose curvature is then computed once.
        blocks_per_step: blocks over which a step is averaged.
        likelihood_batch: data points of the log-likelihood of each block; None for those of the
            block, and 250 besides where hyperparameters move outputs and blocks have few rows.
        burn_in: calls of `round` before the first steps.
        every: calls of `round` from steps to steps.
        total_rounds: calls of `round` in all, over which rates fall along a cosine; None for
            constant rates.
        augment_block: with all data in the block, data points of each gradient of the augmentation;
            0 for all.
        augment_blocks: blocks of that size over which such a gradient is summed.
        batch_size: data points read at a time, with all data in the block.
        partition: blocks of another kind, as a `ClassPartition`.
        collate_fn: as in a DataLoader.
        ranks: processes that take blocks in turn; not needed where they share blocks (`ml.ranks`).
    """

    def __init__(
        self,
        ml: MarginalLikelihood,
        data: Any,
        *,
        rows: int | None = 200,
        inducing: float = 0.5,
        steps: int = 10,
        lr: float = 0.1,
        lr_min: float | None = None,
        prior_update: PriorUpdate = "adam",
        augment_steps: int | None = None,
        lr_augment: float = 0.05,
        lr_augment_min: float | None = None,
        steps_per_block: int = 10,
        blocks_per_step: int = 1,
        likelihood_batch: int | None = None,
        burn_in: int = 0,
        every: int = 1,
        total_rounds: int | None = None,
        augment_block: int = 0,
        augment_blocks: int = 1,
        batch_size: int = 500,
        partition: Partition | InducingPartition | None = None,
        collate_fn: Callable[[list], Any] | None = None,
        ranks: Ranks | None = None,
    ):
        for name, count in (
            ("steps_per_block", steps_per_block),
            ("blocks_per_step", blocks_per_step),
            ("every", every),
            ("augment_blocks", augment_blocks),
            ("batch_size", batch_size),
        ):
            checks.positive_integer(name, count)
        self.ml = ml
        self.examples = examples_of(data, collate_fn, ml.labels)
        if len(self.examples) != ml.n_data:
            raise MarglikError(
                f"the data set has {len(self.examples)} examples, but n_data={ml.n_data}"
            )
        self.full_batch = partition is None and rows is None
        self.augment_block = augment_block
        self.augment_blocks = augment_blocks
        self.batch_size = batch_size
        self.steps_per_block = steps_per_block
        self.blocks_per_step = blocks_per_step
        self.burn_in = burn_in
        self.every = every
        self.total_rounds = total_rounds
        self.ranks = ranks
        self.partition = self._partition(rows, inducing) if partition is None else partition
        self.on_blocks = OnBlocks(
            ml,
            self.examples,
            self.partition,
            None if ml.ranks is not None else ranks,
            self._likelihood_batch(likelihood_batch),
        )
        if augment_steps is None:
            augment_steps = steps
        self._forward = AdamMoves(
            ml.forward_hyperparameters, augment_steps, lr_augment, lr_augment_min
        )
        self._moves = [*self._of_scales(steps, lr, lr_min, prior_update), self._forward]
        self.calls = 0
        self._attached: list[Attachment] = []

    def _of_scales(
        self, steps: int, lr: float, lr_min: float | None, prior_update: PriorUpdate
    ) -> list[Moves]:
        """Moves of prior, noise and temperature, which take no new passes."""
        checks.one_of("prior_update", prior_update, ("adam", "fixed-point"))
        ml = self.ml
        forward = {id(p) for p in ml.forward_hyperparameters}
        scales = [p for p in ml.hyperparameters() if id(p) not in forward]
        own = ml.prior.log_precision
        if prior_update == "adam" or not own.requires_grad:
            return [AdamMoves(scales, steps, lr, lr_min)]
        others = [p for p in scales if p is not own]
        return [FixedPointMoves(ml, steps, lr, lr_min), AdamMoves(others, steps, lr, lr_min)]

    def _partition(self, rows: int | None, inducing: float) -> Partition | InducingPartition:
        ml = self.ml
        shape = self._output_shape()
        c = shape.numel()
        if rows is None or inducing == 0:
            outputs = None if is_gradient(ml.root) else ml.outputs
            return Partition(
                ml.n_data, c, rows, outputs, columns=ml.columns, generator=ml.generator
            )
        if STRUCTURES[ml.structure].additive:
            raise MarglikError(
                f"{ml.structure} curvature has no rows to condition on; use inducing=0, or "
                "structure='ntk', 'full' or 'blockdiag'"
            )
        columns = n_root_columns(ml.likelihood, shape, ml.root or "eigen", ml.samples)
        return InducingPartition(
            ml.n_data,
            c,
            rows,
            inducing,
            n_columns=columns,
            generator=ml.generator,
            ranks=self.ranks or ml.ranks,
        )

    def _output_shape(self) -> torch.Size:
        """Of one datum's outputs."""
        x, _ = self.examples.take(torch.arange(1))
        with torch.no_grad(), evaluating(self.ml.model):
            return self.ml.outputs_of(self.ml.placed(x), seed=0)[0].shape

    def _likelihood_batch(self, given: int | None) -> int:
        if given is not None:
            return given
        moving = bool(self.ml.forward_hyperparameters)
        if not moving or not isinstance(self.partition, InducingPartition):
            return 0
        return 0 if self.partition.rows >= ENOUGH_ROWS else DATA_BESIDES

    # ----------------------------------------------------------------------------------- rounds

    def round(self) -> Round | None:
        """Take the steps of a round, if one is due; to be called once an epoch."""
        self.calls += 1
        if not is_due(self.calls, self.burn_in, self.every):
            return None
        start = time.perf_counter()
        if isinstance(self.partition, Partition):
            self.partition.redraw()
        evidences = self._on_all_data() if self.full_batch else self._on_some_blocks()
        if not evidences:
            return None
        mean = Evidence.mean(evidences)
        return Round(mean, len(evidences), time.perf_counter() - start)

    @property
    def n_steps(self) -> int:
        """Steps in a round."""
        return max(moves.steps for moves in self._moves)

    def measure(self, blocks: int = 10) -> Evidence:
        """The evidence at the present hyperparameters, from blocks that no step has seen.

        Args:
            blocks: how many are averaged; five or more conditioned ones have an interval.
        """
        if self.full_batch:
            with torch.no_grad():
                return self.ml.full_batch(self._batches())
        return self.on_blocks.measured(blocks)

    def _on_some_blocks(self) -> list[Evidence]:
        """A step on every block, or `steps_per_block` of them where only scales move."""
        evidences = []
        drawn: list[DrawnBlock] = []
        left = 0
        for step in range(self.n_steps):
            parameters = self._parameters(step)
            new = left == 0 or self._forward.moves_at(step)
            gradients = _Gradients(parameters, self.blocks_per_step * self.ml.n_data)
            if new:
                cached = self.steps_per_block > 1 and not self._forward.moves_at(step)
                values, drawn = self.on_blocks.evaluated(
                    self.blocks_per_step, gradients.add, cached=cached
                )
                left = self.steps_per_block if cached else 1
            else:
                values = self._again(drawn, gradients)
            left -= 1
            evidence = values[0] if len(values) == 1 else Evidence.mean(values)
            if left == 0 or step + 1 == self.n_steps:  # the block's last evaluation
                self.on_blocks.refresh(drawn, values)
            self._step(step, gradients.total)
            evidences.append(replace(evidence, row_kernel=None).detach())
        return evidences

    def _again(self, drawn: list[DrawnBlock], gradients: _Gradients) -> list[Evidence]:
        """The evidences of blocks that are kept, at the hyperparameters of now."""
        values = {}
        for number, block in enumerate(drawn):
            if block.evaluate is not None:
                values[number] = block.evaluate()
                gradients.add(values[number])
        return self.on_blocks.of_all(values, len(drawn))

    def _on_all_data(self) -> list[Evidence]:
        """Steps on the curvature of all data, computed once; anew where outputs move."""
        evidences = []
        batches = self._batches()
        cached: Callable[[], Evidence] | None = None
        if self.augment_block and self._forward.steps:
            generator = self.ml.generator
            blocks = dealt(self.examples, self.augment_block, generator)
            cached = evidence_by_blocks(self.ml, blocks, generator, self.augment_blocks)
        for step in range(self.n_steps):
            if self._forward.moves_at(step) and not self.augment_block:
                evidence = self.ml.full_batch(batches)
            else:
                cached = cached or self.ml.cached_full_batch(batches)
                evidence = cached()
            gradients = _Gradients(self._parameters(step), self.ml.n_data)
            gradients.add(evidence)
            self._step(step, gradients.total)
            evidences.append(evidence.detach())
        return evidences

    def _batches(self) -> Batches:
        return in_order(self.examples, self.batch_size)

    def _parameters(self, step: int) -> list[nn.Parameter]:
        return [p for moves in self._moves if moves.moves_at(step) for p in moves.parameters]

    def _step(self, step: int, gradients: list[Tensor]) -> None:
        """One step of all hyperparameters that move."""
        for parameter, gradient in zip(
            self._parameters(step), self._of_all_ranks(gradients), strict=True
        ):
            parameter.grad = gradient
        for moves in self._moves:
            if moves.moves_at(step):
                moves.step(self._n_rounds)
        project = getattr(self.ml.augment, "project_", None)
        if project is not None:
            project()

    @cached_property
    def _n_rounds(self) -> int | None:
        """Rounds with steps in the whole training, if its length is known."""
        if self.total_rounds is None:
            return None
        calls = range(1, self.total_rounds + 1)
        return sum(is_due(call, self.burn_in, self.every) for call in calls)

    def _of_all_ranks(self, gradients: list[Tensor]) -> list[Tensor]:
        """The sum over processes; of blocks that they share, on which they agree, the mean."""
        ranks = self.ml.ranks or self.ranks
        if ranks is None:
            return gradients
        if self.ml.ranks is not None:
            gradients = [gradient / ranks.size for gradient in gradients]
        return ranks.sums(gradients, "gradients of the evidence")

    # ----------------------------------------------------------------------------------- weights

    def attach(self, optimizer: Any, *, decoupled: bool = False, also_decays: bool = False) -> None:
        """Add the prior's gradient, precision * (w - mean) / N, in every step of an optimiser.

        The loss is then that of the data alone, `ml.data_loss`. The gradient is added after
        clipping and unscaling, just before the step; weights without a gradient are left alone. A
        closure given to `step` gets the prior's part of loss and gradients.

        Args:
            optimizer: of the weights, or of some of them; also one that accelerate or Lightning has
                wrapped.
            decoupled: decay the weights beside the step as AdamW does, w -= rate * gradient.
            also_decays: accept one that has a weight decay of its own, which is then added.
        """
        attachment = Attachment(
            optimizer,
            self.ml.prior,
            self.ml.weights,
            self.ml.n_data,
            decoupled=decoupled,
            also_decays=also_decays,
        )
        known = {name for other in self._attached for name in other.names}
        twice = [name for name in attachment.names if name in known]
        if twice:
            attachment.remove()
            raise MarglikError(
                f"an optimiser with the weight {twice[0]!r} is attached already; call detach() "
                "first"
            )
        self._attached.append(attachment)

    def detach(self) -> None:
        """Undo all attachments."""
        for attachment in self._attached:
            attachment.remove()
        self._attached = []

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that determines later rounds: hyperparameters, optimisers, inducing rows."""
        partition = self.partition
        conditioned = isinstance(partition, InducingPartition)
        return {
            "calls": self.calls,
            "ml": self.ml.state_dict(),
            "optimizers": [moves.state_dict() for moves in self._moves],
            "inducing": partition.state_dict() if conditioned else None,  # type: ignore[union-attr]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit as the learner whose state it is."""
        conditioned = isinstance(self.partition, InducingPartition)
        if conditioned != (state["inducing"] is not None):
            raise MarglikError(
                "the state is of a learner with other blocks (conditioned or not); build this one "
                "with the same rows= and inducing="
            )
        if isinstance(self.partition, InducingPartition):
            self.partition.load_state_dict(state["inducing"])
        self.calls = state["calls"]
        self.ml.load_state_dict(state["ml"])
        for moves, own in zip(self._moves, state["optimizers"], strict=True):
            moves.load_state_dict(own)


class _Gradients:
    """Gradients of minus the evidence, divided by `share`, summed over blocks."""

    def __init__(self, parameters: list[nn.Parameter], share: float):
        self.parameters = parameters
        self.share = share
        self.total = [torch.zeros_like(p) for p in parameters]

    def add(self, evidence: Evidence) -> None:
        """Those of one more block."""
        loss = -evidence.total / self.share
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        self.total = [
            total if gradient is None else total + gradient
            for total, gradient in zip(self.total, gradients, strict=True)
        ]
