"""Every setting of a bound grid: which bounds, on which values, at which network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from asdl_marglik import STRUCTURES
from ntkmarglik.learn.config import (
    METHOD,
    Config,
    Estimator,
    Hyperparameters,
    Problem,
    Run,
    Training,
)
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.programs.paper.presets import expanded
from ntkmarglik.settings import Choices, Settings, parse_as
from ntkmarglik.values import (
    AnyFloat,
    Fraction,
    Limit,
    NonNegativeInt,
    NonNegativeInts,
    Points,
    PositiveFloat,
    PositiveInt,
    Threads,
)

METHOD.offer(METHODS)
STRUCTURE = Choices(STRUCTURES)
CSV = "grid.csv"  # in the folder of a grid
SUBSETS = (10, 20, 50, 100, 250, 500, 0)


@dataclass(frozen=True)
class Grid:
    """Which bounds are evaluated where: every combination of the choices below."""

    # which rows a csv has, not what is in them
    FREE: ClassVar = (
        *("structures", "subsets", "outputs", "columns", "partitions", "roots", "blocks"),
        "exact",
    )

    hyperparameter: Literal["prior", "rotation"] = "prior"
    """What varies: prior precision (1e-4 to 1e4, evenly in its logarithm) or rotation range (0 to pi, evenly)."""
    points: Points = 100
    """Values on the grid."""
    structures: Annotated[tuple[str, ...], STRUCTURE.several()] = (
        "ntk",
        "blockdiag",
        "kfac",
        "diag",
    )
    """Curvature structures; full is the same number as ntk."""
    subsets: NonNegativeInts = SUBSETS
    """Data points S in a block; 0 = all."""
    outputs: tuple[Literal["all", "single"], ...] = ("all", "single")
    """Outputs in a block."""
    columns: tuple[Literal["shared", "iid"], ...] = ("shared",)
    """For single outputs: whether the data points of a block share theirs or each has its own."""
    partitions: tuple[Literal["random", "class", "inducing"], ...] = ("random", "class")
    """How data are dealt into blocks; inducing draws S single rows conditioned on inducing rows, for single outputs and true roots."""
    inducing: Fraction = 0.5
    """Fraction of the rows of an inducing partition's blocks that the others are conditioned on."""
    roots: tuple[Literal["paper", "fisher", "symmetric", "eigen", "empirical", "sampled"], ...] = (
        "paper",
        "fisher",
        "symmetric",
        "eigen",
    )
    """For single outputs: root of the likelihood's curvature (with all outputs every root gives the same number). Besides, the curvatures empirical and sampled, which have no outputs to choose from."""
    root_samples: PositiveInt = 1
    """Labels drawn for each datum with the root sampled."""
    kfac: Literal["expand", "reduce"] = "expand"
    """Weight-sharing setting of KFAC."""
    weight_blocks: Literal["tensor", "module", "parent"] = "module"
    """Blocks of blockdiag: single parameter tensors, the parameters of a module, or those of all modules with the same parent (residual blocks)."""
    blocks: NonNegativeInt = 0
    """Blocks evaluated of each partition, drawn at random; 0 = all of them, then the mean is the bound itself."""
    exact: bool = True
    """Also evaluate the exact value (all data and outputs in one block), if it fits in memory."""


@dataclass(frozen=True)
class Reference:
    """The network at which bounds are evaluated."""

    FREE: ClassVar = ("checkpoint",)

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Take the network of this run folder instead of training one; the settings of its training then do not apply."""
    train_method: Annotated[str, METHOD.one()] = "ntk"
    """Method by which its hyperparameters are learned."""
    train_subset: NonNegativeInt = 0
    """Data points S in a block of that method; 0 = all."""
    train_outputs: NonNegativeInt = 0
    """Outputs K in a block of that method; 0 = all."""
    prior_precision: PositiveFloat = 1.0
    """Initial prior precision, one for all weights."""
    aug_samples: PositiveInt = 30
    """Transformed copies A of each input, in training and in the bounds (rotation only)."""
    aug_init: AnyFloat = 0.05
    """Initial ranges of the transformations (rotation only)."""


@dataclass(frozen=True)
class Place:
    """Where and how it runs."""

    FREE: ClassVar = ("device", "threads", "out", "memory_budget", "dry_run")

    seed: NonNegativeInt = 711
    """Seed of data subset, initial weights, partitions and augmentations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU if there is one."""
    precision: Literal["float32", "float64"] = "float32"
    """Number format of the network in training."""
    grid_precision: Literal["float32", "float64"] = "float64"
    """Number format of the network in the bounds; small prior precisions need float64."""
    threads: Threads = 1
    """CPU threads."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Folder of the trained network and of grid.csv; by default runs/ and a name made of the settings."""
    memory_budget: Limit = 0.0
    """Gigabytes the evidence may use; 0 = half of what is free."""
    dry_run: bool = False
    """Print the bounds and estimates of their time; nothing is trained or written."""


@dataclass(frozen=True)
class GridConfig(Settings):
    """Evaluate bounds of the evidence over a grid of one hyperparameter at a trained network.

    The same command again continues where it was stopped.
    """

    script = "scripts/bound_grid.py"
    note = "--preset NAME takes settings of the paper; --preset list names them."

    grid: Grid = field(default_factory=Grid)
    reference: Reference = field(default_factory=Reference)
    problem: Problem = field(
        default_factory=lambda: Problem(dataset="mnist", n_data=1000, model="mininet")
    )
    training: Training = field(
        default_factory=lambda: Training(
            batch_size=250, lr=1e-3, lr_min=1e-4, prior_steps=10, aug_steps=2
        )
    )
    place: Place = field(default_factory=Place)

    @property
    def folder(self) -> Path:
        """Where results go."""
        if self.place.out is not None:
            return Path(self.place.out)
        problem = self.problem
        data = f"{problem.dataset}-{problem.n_data or 'all'}"
        name = f"bound-grid-{self.grid.hyperparameter}-{data}-{problem.model}"
        return Path("runs") / f"{name}-seed{self.place.seed}"

    def run_config(self) -> Config:
        """The run that trains the network."""
        reference, place = self.reference, self.place
        return Config(
            Estimator(
                method=reference.train_method,
                subset=reference.train_subset,
                outputs=reference.train_outputs,
            ),
            self.problem,
            Hyperparameters(
                "scalar",
                reference.prior_precision,
                "affine" if self.grid.hyperparameter == "rotation" else "none",
                reference.aug_samples,
                reference.aug_init,
            ),
            self.training,
            Run(
                place.seed,
                place.device,
                place.precision,
                place.threads,
                self.folder / "reference",
                resume=True,
                baseline=False,
                eval_every=self.training.epochs,
                memory_budget=place.memory_budget,
            ),
        )


def parse(arguments: Sequence[str] | None = None) -> GridConfig:
    """Settings from flags, `--config` files and presets."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return parse_as(GridConfig, expanded(arguments, GridConfig().flat()))
