"""Every setting of a fine-tuning run: the flags of finetune.py and the keys of its yaml files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from ntkmarglik.settings import Settings, parse_as
from ntkmarglik.values import (
    Limit,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeInts,
    PositiveFloat,
    PositiveFloats,
    PositiveInt,
    Share,
    Threads,
)

Method = Literal["map", "map-gs", "map-bo", "la-lml", "la-clml", "elbo", "de-elbo"]


@dataclass(frozen=True)
class Search:
    """How weight decay and learning rate are found."""

    method: Method = "de-elbo"
    """map: fixed weight decay; map-gs, map-bo: grid search, Bayesian optimisation on held-out data; la-lml: diagonal Laplace evidence; la-clml: grid search by the conditional evidence; elbo, de-elbo: variational bounds."""
    prior: Literal["l2-zero", "l2-sp", "ptyl"] = "l2-sp"
    """Where the backbone is pulled. l2-zero: to zero; l2-sp: to the pretrained weights; ptyl: as the low-rank Gaussian of the pretraining says, whose statistics must be in the checkpoint (not for la-lml and la-clml). The head is pulled to zero."""
    prior_jitter: PositiveFloat = 0.1
    """Added to the diagonal of the covariance of ptyl."""
    rates: PositiveFloats = (0.1, 0.01, 0.001, 0.0001)
    """Learning rates to choose from: by the training objective, or on held-out data where decays are found there."""
    backbone_decay: PositiveFloat = 1e-3
    """Weight decay towards the pretrained weights for map; where la-lml starts."""
    head_decay: PositiveFloat = 1e-3
    """Weight decay of the new head for map; where la-lml starts."""
    backbone_decays: PositiveFloats = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """Grid of map-gs and la-clml; map-bo searches between its ends."""
    head_decays: PositiveFloats = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """Grid of map-gs and la-clml; map-bo searches between its ends."""
    trials: PositiveInt = 20
    """Fits of map-bo before the last one on all data."""
    held_out: Share = 0.2
    """Share of the training data held out by map-gs, map-bo and la-clml; the last fit has all of them."""
    draws: PositiveInt = 20
    """Draws of all weights for the scores of elbo, de-elbo and la-clml."""
    laplace_every: NonNegativeInt = 0
    """Steps between Laplace approximations of la-lml; 0 = an epoch."""
    laplace_steps: NonNegativeInt = 100
    """Steps on the two log precisions (Adam) after each Laplace approximation."""
    laplace_rate: PositiveFloat = 0.1
    """Learning rate of these steps."""
    kappa: NonNegativeFloat = 0.0
    """Emphasis on the data in de-elbo; 0 = parameters / data."""
    sigma: PositiveFloat = 1e-4
    """Initial width of the posterior of elbo and de-elbo."""
    sigma_rate: NonNegativeFloat = 0.0
    """Learning rate of that width; 0 = as of the weights."""


@dataclass(frozen=True)
class Task:
    """What is learned from what."""

    FREE: ClassVar = ("data_root",)

    checkpoint: str = "hub:facebook/convnext-tiny-224"
    """Pretrained network: a folder in the format of save_pretrained, or hub:OWNER/NAME[@REVISION] on the Hugging Face hub."""
    dataset: str = "cifar10"
    """Images: digits, mnist, fmnist, usps, cifar10, cifar100, tinyimagenet, flowers102, pets37; texts: ag_news."""
    data_root: Path = Path("data")
    """Where data files are, or are downloaded to."""
    classes: NonNegativeInts = ()
    """Labels to keep, numbered anew in this order; all by default."""
    n_data: NonNegativeInt = 1000
    """Size of the training set, with classes in equal parts as far as possible; 0 = all."""
    n_test: NonNegativeInt = 0
    """Size of the random part of the test set that is used; 0 = all."""
    max_length: PositiveInt = 512
    """Longest text in tokens."""
    augment: Literal["none", "flip", "crop"] = "none"
    """Random changes of training images: mirror left and right (flip), and shift by up to an eighth too (crop)."""


@dataclass(frozen=True)
class Training:
    """How every fit trains the weights: SGD with Nesterov momentum 0.9, cosine decay to 0."""

    steps: PositiveInt = 6000
    """Steps of a fit."""
    batch_size: PositiveInt = 128
    """Data points per step, at most all of them."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the gradient of backbone and of head; 0 = no limit."""


@dataclass(frozen=True)
class Run:
    """Where and how it runs."""

    FREE: ClassVar = (
        *("device", "threads", "out", "resume", "checkpoint_seconds", "dry_run", "save_model"),
        *("predict", "predict_samples", "wandb", "tensorboard"),
    )

    seed: NonNegativeInt = 0
    """Seed of the training set, the new head and every random draw."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU if there is one."""
    threads: Threads = 0
    """CPU threads; 0 = torch's choice."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Run folder; by default runs/ and a name made of the settings."""
    resume: bool = False
    """Continue the run in its folder from the last checkpoint; without one, start it."""
    predict: Literal["probit", "none"] = "probit"
    """At the end also score predictions of a diagonal posterior with the chosen prior, by the probit link; none skips them."""
    predict_samples: NonNegativeInt = 10
    """Draws of all weights over which predictions of elbo and de-elbo are averaged at the end, beside those at the mean; 0 = none."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on the test set (not counted in times); 0 = five in a fit, the last one included."""
    checkpoint_seconds: Limit = 60.0
    """Least time between checkpoints."""
    save_model: bool = False
    """Save the final network in the folder `model` in the format of save_pretrained."""
    wandb: bool = False
    """Mirror metrics to wandb."""
    tensorboard: bool = False
    """Mirror metrics to tensorboard."""
    dry_run: bool = False
    """Print the resolved settings, sizes and an estimate of the time; no run folder is made."""


@dataclass(frozen=True)
class FinetuneConfig(Settings):
    """Fine-tune a pretrained classifier with learned regularisation.

    Weights of the backbone are pulled to their pretrained values (see --prior), those of the new head to zero.
    """

    script = "scripts/finetune.py"

    search: Search = field(default_factory=Search)
    task: Task = field(default_factory=Task)
    training: Training = field(default_factory=Training)
    run: Run = field(default_factory=Run)

    @property
    def name(self) -> str:
        """The default name of the run folder."""
        task, network = self.task, Path(self.task.checkpoint).name
        data = f"{task.dataset}-{task.n_data or 'all'}"
        prior = "" if self.search.prior == "l2-sp" else f"-{self.search.prior}"
        return f"{data}-{network}-{self.search.method}{prior}-seed{self.run.seed}"


def parse(arguments: Sequence[str] | None = None) -> FinetuneConfig:
    """Settings from flags and `--config` files."""
    return parse_as(FinetuneConfig, arguments)
