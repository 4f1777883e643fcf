"""What the training loop needs of a method.

Methods are known by name before torch is imported, which takes longer than to read a command line:
their files import it, and what needs it, in functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from asdl_marglik.lazy import Later
from ntkmarglik.learn.config import Config
from ntkmarglik.runs.loggers import Metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from laplace_marglik import (
        Categorical,
        Evidence,
        GaussianPrior,
        InducingPartition,
        MarginalLikelihood,
        Partition,
        Ranks,
    )
    from laplace_marglik.examples import TensorExamples
    from laplace_marglik.likelihood.base import GradientRoot, Root
    from ntkmarglik.problem.data import Dataset

LearnsBy = Literal["nothing", "loss", "evidence", "samples"]
# curvature of blocks, samples of the posterior, or draws of a variational posterior
MeasuresBy = Literal["blocks", "samples", "draws"]
# settings of what a block is, and of the optimisers that a loss or the evidence moves
BLOCKS = frozenset(
    {"subset", "outputs", "columns", "partition", "root", "root_samples", "inducing"}
)
HYPER_RATES = frozenset({"lr_hyp", "lr_hyp_min"})
AUGMENT_RATES = frozenset({"lr_aug", "lr_aug_min"})
ROUNDS = frozenset({"burnin", "frequency"})


@dataclass(frozen=True)
class Problem:
    """A configured problem: data, network, and the modules whose parameters are hyperparameters."""

    config: Config
    data: Dataset
    model: nn.Module
    prior: GaussianPrior
    augment: nn.Module | None
    generator: torch.Generator  # columns, partitions and augmentations of the evidence
    ranks: Ranks | None = None  # processes of torchrun
    likelihood: Categorical = field(  # with its temperature
        default_factory=Later("laplace_marglik:Categorical")
    )

    @property
    def full_batch(self) -> bool:
        """Whether all data are one block."""
        estimator = self.config.estimator
        return not estimator.inducing and estimator.subset in (0, self.data.n_data)

    @property
    def shares_blocks(self) -> bool:
        """Whether the ranks work on one block together; else each has its own."""
        return self.ranks is not None and (self.full_batch or self.config.estimator.shard_blocks)

    @property
    def blocks_per_step(self) -> int:
        one_each = self.ranks is not None and not self.shares_blocks
        return self.config.estimator.blocks_per_step or (
            self.ranks.size if one_each and self.ranks else 1
        )

    def marginal_likelihood(self, structure: str) -> MarginalLikelihood:
        from laplace_marglik import MarginalLikelihood

        estimator = self.config.estimator
        budget = self.config.run.memory_budget * 1e9
        return MarginalLikelihood(
            self.model,
            self.likelihood,
            n_data=self.data.n_data,
            prior=self.prior,
            structure=structure,
            outputs=self.n_outputs,
            columns=estimator.columns,
            root=None if estimator.root == "auto" else estimator.root,
            samples=estimator.root_samples,
            kfac=estimator.kfac,
            blocks=estimator.weight_blocks,
            augment=self.augment,
            generator=self.generator,
            memory_budget=budget or None,
            ranks=self.ranks if self.shares_blocks else None,
        )

    def project(self) -> None:
        """Bring the augmentation back to where it is defined; to be called after each of its
        steps.
        """
        project = getattr(self.augment, "project_", None)
        if project is not None:
            project()

    @property
    def examples(self) -> TensorExamples:
        """The training data."""
        from laplace_marglik.examples import TensorExamples

        return TensorExamples(self.data.x_train, self.data.y_train)

    @property
    def n_outputs(self) -> int | None:
        """Root columns in a block; None for all, also where there are none to choose from."""
        from laplace_marglik.evidence.gradient_rows import is_gradient

        estimator = self.config.estimator
        return None if is_gradient(estimator.root) else estimator.outputs or None

    @property
    def rows_per_datum(self) -> int:
        """Rows of each datum in a block."""
        from laplace_marglik.evidence.gradient_rows import is_gradient

        estimator = self.config.estimator
        if is_gradient(estimator.root):
            return estimator.root_samples
        return estimator.outputs or self.data.n_classes

    @property
    def n_columns(self) -> int:
        """Root columns that rows of conditioned blocks are drawn from."""
        import torch

        from laplace_marglik.evidence.rows import n_root_columns

        estimator = self.config.estimator
        root: Root | GradientRoot = "eigen" if estimator.root == "auto" else estimator.root
        shape = torch.Size([self.data.n_classes])
        return n_root_columns(self.likelihood, shape, root, estimator.root_samples)

    def partition(self) -> Partition | InducingPartition:
        """Blocks of the configured kind; all data when the subset is 0."""
        from laplace_marglik import ClassPartition, InducingPartition, Partition

        estimator, data = self.config.estimator, self.data
        if estimator.inducing:
            return InducingPartition(
                data.n_data,
                data.n_classes,
                estimator.subset,
                estimator.inducing,
                n_columns=self.n_columns,
                generator=self.generator,
                ranks=self.ranks,
            )
        options = {"columns": estimator.columns, "generator": self.generator}
        subset, outputs = estimator.subset or None, self.n_outputs
        if estimator.partition == "class":
            return ClassPartition(data.y_train, data.n_classes, subset, outputs, **options)  # type: ignore[arg-type]
        return Partition(data.n_data, data.n_classes, subset, outputs, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Learned:
    """What a round of hyperparameter steps leaves.

    Args:
        evidence: the mean over its steps, if they have one.
        metrics: what else is worth recording.
    """

    evidence: Evidence | None = None
    metrics: Metrics = field(default_factory=dict)


class Method(ABC):
    """A loss for the weights, rounds of hyperparameter steps, and a final score.

    The class says what is known before a run: its name, how it looks in figures, what it needs, and
    which settings it refuses. An object of it is the method at work on a problem.
    """

    name: ClassVar[str] = ""  # the value of --method; without one it is not on offer
    label: ClassVar[str] = ""  # in figures and tables
    colour: ClassVar[str] = "#999999"  # in figures
    learns_by: ClassVar[LearnsBy] = "nothing"  # where the steps of its hyperparameters come from
    measures_by: ClassVar[MeasuresBy] = "blocks"  # where its evidence comes from
    evidence_kind: ClassVar[str] = ""  # said of its evidence, if that is not a Laplace evidence
    # whether the curvature of all data is a sum over them: then --aug-block applies
    sums_over_data: ClassVar[bool] = False
    # of the curvature by which its evidence is measured, or the name of another estimate
    structure: str = "ntk"
    # settings that are not those of the other methods, unless they are given
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, problem: Problem):
        self.problem = problem

    @classmethod
    def learns(cls) -> bool:
        """Whether it has a baseline: the same run without learning."""
        return cls.learns_by != "nothing"

    @classmethod
    def learns_in_rounds(cls) -> bool:
        """Whether hyperparameters move between epochs, not with the weights."""
        return cls.learns_by in ("evidence", "samples")

    @classmethod
    def uses_blocks(cls) -> bool:
        """Whether it learns from blocks of S data points and K outputs, and is named by them."""
        return cls.learns_by == "evidence"

    @classmethod
    def run_name(cls, config: Config) -> str:
        """The method in the name of a run: METHOD-S-K, as the paper writes it; N and C mean all."""
        from laplace_marglik.evidence.gradient_rows import is_gradient

        if not cls.uses_blocks():
            return cls.name
        estimator = config.estimator
        if estimator.inducing:
            return f"{cls.name}-{estimator.subset}-u{estimator.inducing:g}"
        rows = estimator.root if is_gradient(estimator.root) else estimator.outputs or "C"
        return f"{cls.name}-{estimator.subset or 'N'}-{rows}"

    @classmethod
    def uses(cls, config: Config) -> frozenset[str]:
        """Those of the settings that not all methods use which it does."""
        return frozenset()

    @classmethod  # noqa: B027 - most methods take any settings
    def check(cls, config: Config) -> None:
        """Refuse settings that it cannot work with, whatever the data."""

    @classmethod
    def memory(cls, problem: Problem) -> int | None:
        """Bytes that it keeps; None where that is the curvature of a block."""
        return None

    @classmethod  # noqa: B027 - most methods have no memory of their own
    def check_memory(cls, problem: Problem, budget: float) -> None:
        """Refuse what needs more than so many bytes, if they are not those of a block."""

    @abstractmethod
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """What the weights minimise on a batch, per datum, besides `prior_loss`."""

    def prior_loss(self) -> Tensor | float:
        """What the weights minimise besides, whatever the batch; its gradient is not taken, but
        `attach` adds it to every step.
        """
        return 0.0

    def attach(self, weights: torch.optim.Optimizer) -> None:  # noqa: B027 - most need nothing
        """Take part in the steps of an optimiser of the weights, before the first of them."""

    def parameters_of_loss(self) -> list[nn.Parameter]:
        """What the loss has gradients in, besides the weights."""
        return []

    @abstractmethod
    def outputs(self, x: Tensor) -> Tensor:
        """Logits for prediction."""

    def learn(self, epoch: int) -> Learned | None:
        """Take the hyperparameter steps that are due after an epoch, if any are."""
        return None

    def hyperparameters(self) -> list[nn.Parameter]:
        """What is learned besides weights and augmentation: the prior, if its precision is learned
        by gradients.
        """
        return list(self.problem.prior.parameters())

    def progress(self) -> Evidence | None:
        """The evidence at an evaluation, for methods that take no rounds of steps on it."""
        return None

    @abstractmethod
    def evidence(self) -> Evidence:
        """The final estimate of the log marginal likelihood of all data."""

    @abstractmethod
    def baseline(self, fixed: Problem) -> Method:
        """The method with nothing learned that this one is compared with, measured in the same way
        if it can be.
        """

    def describe(self) -> Metrics:
        """Hyperparameters and numbers of its own, for the record of a run."""
        return {}

    def extras(self) -> Metrics:
        """What the summary has of its own; asked for after the evidence."""
        return self.describe()

    def round_seconds(self) -> float | None:
        """About how long a round takes, where it is not made of estimates of the evidence."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold besides model, prior, augmentation, optimisers and
        generators.
        """
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 - most methods have nothing of their own
        """Take up the state of a checkpoint."""
