"""Hyperparameters learned by the marginal likelihood of the linearised Laplace approximation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asdl_marglik import STRUCTURES, Structure
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.methods.base import (
    AUGMENT_RATES,
    HYPER_RATES,
    ROUNDS,
    Learned,
    Method,
    Problem,
)
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.methods.mode import MeasuredByBlocks
from ntkmarglik.runs.loggers import Metrics

if TYPE_CHECKING:
    from laplace_marglik import Evidence


class Laplace(MeasuredByBlocks):
    """Gradient steps on the evidence of blocks of data; all of it is done by the learner.

    With all data in the block the curvature is computed once a round, and the prior takes its steps
    on it; steps of the augmentation need it anew, or, with `--aug-block`, a gradient from blocks
    of that size.
    """

    learns_by = "evidence"

    def __init__(self, problem: Problem):
        from laplace_marglik import EvidenceLearner

        super().__init__(problem, self.structure)
        estimator, training = problem.config.estimator, problem.config.training
        self.learner = EvidenceLearner(
            self.ml,
            (problem.data.x_train, problem.data.y_train),
            partition=None if problem.full_batch else problem.partition(),
            rows=None,
            steps=training.prior_steps,
            lr=training.lr_hyp,
            lr_min=training.lr_hyp_min,
            prior_update=training.prior_update,
            augment_steps=training.aug_steps,
            lr_augment=training.lr_aug,
            lr_augment_min=training.lr_aug_min,
            steps_per_block=training.steps_per_block,
            blocks_per_step=problem.blocks_per_step,
            burn_in=training.burnin,
            every=training.frequency,
            total_rounds=training.epochs,
            augment_block=estimator.aug_block,
            augment_blocks=estimator.aug_blocks,
            batch_size=training.batch_size,
            ranks=None if problem.shares_blocks else problem.ranks,
        )

    @classmethod
    def uses(cls, config: Config) -> frozenset[str]:
        steps = {"prior_steps", "aug_steps", "steps_per_block", "blocks_per_step", "shard_blocks"}
        rates = HYPER_RATES | AUGMENT_RATES
        others = {"prior_update", "aug_block", "aug_blocks", "learn_temperature"}
        return super().uses(config) | ROUNDS | rates | steps | others

    @classmethod
    def check(cls, config: Config) -> None:
        estimator = config.estimator
        if not estimator.inducing:
            return
        if STRUCTURES[cls.structure].additive:
            raise NtkMarglikError(
                f"--inducing {estimator.inducing:g} conditions rows on others, and --method "
                f"{cls.name} has no rows; use --method ntk, full or blockdiag, or --inducing 0."
            )
        if estimator.root == "paper":
            raise NtkMarglikError(
                "--inducing needs the rows of a true root, and --root paper is none for single "
                "outputs; use --root eigen (the default with --inducing), fisher or symmetric."
            )
        if not estimator.subset:
            raise NtkMarglikError(
                "--inducing conditions the rows of a block, of which --subset is the number: give "
                "one above 0, or --inducing 0 for all data at once."
            )
        for flag, value, usual in (
            ("--outputs", estimator.outputs, 1),
            ("--columns", estimator.columns, "shared"),
            ("--partition", estimator.partition, "random"),
        ):
            if value != usual:
                raise NtkMarglikError(
                    f"{flag} {value} deals data into independent blocks; with --inducing rows are "
                    "drawn one by one: leave it out, or use --method ntk."
                )

    def baseline(self, fixed: Problem) -> Method:
        return Map(fixed, self.structure)

    def learn(self, epoch: int) -> Learned | None:
        report = self.learner.round()
        return None if report is None else Learned(report.evidence)

    def evidence(self) -> Evidence:
        """That of fresh blocks; conditioned ones have the inducing rows that training chose."""
        if self.problem.config.estimator.inducing:
            return self.measured(self.learner.on_blocks)
        return super().evidence()

    def extras(self) -> Metrics:
        """Scores of the posterior's predictions, of the structure of the method."""
        import torch

        from ntkmarglik.learn.predictive import BATCH, SCORED, posterior_scores

        problem = self.problem
        found = super().extras()
        if problem.config.run.predict == "none":
            return found
        # of one process, with draws of its own
        seeds = torch.Generator().manual_seed(problem.config.run.seed)
        alone = replace(problem, ranks=None, generator=seeds)
        x, y = (t[:SCORED] for t in (problem.data.x_test, problem.data.y_test))
        test = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        with torch.no_grad():
            network = torch.cat([self.outputs(x) for x, _ in test])
        ml = alone.marginal_likelihood(self.structure)
        return found | posterior_scores(ml, self.structure, self.batches(), test, network)

    def state(self) -> dict[str, Any]:
        return {"learner": self.learner.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])


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


class ConditionedNtk(Laplace):
    """The NTK bound conditioned on inducing rows, with one block for all steps of a round."""

    name = "ntk-conditioned"
    label = "conditioned NTK"
    colour = "#332288"
    structure = "ntk"
    # As chosen on digits and MNIST-1000 (docs/alternatives.md). Few rows make a loose bound, which
    # asks for too much decay: larger blocks, and half as many. By its fixed point the prior goes
    # anywhere in few steps. Weights that begin with next to no decay, while it is learned, do not
    # make up for it later.
    defaults = {
        "subset": 400,
        "inducing": 0.5,
        "steps_per_block": 4,
        "prior_steps": 4,
        "frequency": 10,
        "prior_update": "fixed-point",
        "lr_hyp": 0.4,
        "prior_precision": 1.0,
    }

    @classmethod
    def run_name(cls, config: Config) -> str:
        return f"{cls.name}-{config.estimator.subset}"

    @classmethod
    def check(cls, config: Config) -> None:
        if not config.estimator.inducing:
            raise NtkMarglikError(
                f"--method {cls.name} conditions on inducing rows and needs --inducing above 0; "
                "without them it is --method ntk."
            )
        super().check(config)
