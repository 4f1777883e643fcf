"""Every setting of an experiment, with its default: the flags of the runner and the keys of its
yaml files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from ntkmarglik.problem.models import DEPTH, MODELS
from ntkmarglik.settings import Choices, Settings
from ntkmarglik.values import (
    AnyFloat,
    Fraction,
    Layers,
    Limit,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Several,
    Threads,
)

METHOD = Choices()  # `ntkmarglik.learn.methods` says which, since a method takes these settings
MODEL = Choices(MODELS)
UNNAMED = "ntk-conditioned"  # the method of a command that names none


@dataclass(frozen=True)
class Estimator:
    """How the marginal likelihood is estimated."""

    method: Annotated[str, METHOD.one()] = "ntk"
    """Curvature structure of the evidence; map learns nothing, augerino the augmentation by the training loss; elbo and de-elbo learn a Gaussian posterior, prior variances and augmentation by a variational bound; sampled learns the prior by EM steps from posterior samples."""
    subset: NonNegativeInt = 500
    """Data points S in a block, 0 = all; rows of a block with --inducing. Where there are fewer, the default is all."""
    inducing: Fraction = 0.0
    """Fraction of a block's rows that the others are conditioned on, which makes the bound far tighter; 0 = the published bound of independent blocks."""
    outputs: NonNegativeInt = 1
    """Outputs (root columns) K in a block; 0 = all."""
    columns: Literal["shared", "iid"] = "shared"
    """Whether the data points of a block share their outputs or each draws its own."""
    partition: Literal["random", "class"] = "random"
    """How data are dealt into blocks: at random, or class by class."""
    root: Literal["auto", "paper", "fisher", "symmetric", "eigen", "empirical", "sampled"] = "auto"
    """Root of the likelihood's curvature; paper is the published estimator, fisher, symmetric and eigen give true bounds; auto = paper, or eigen with --inducing. Other curvatures: empirical, of the gradients of the data's log-likelihoods, and sampled, of those of labels drawn from the network."""
    root_samples: PositiveInt = 1
    """Labels drawn for each datum with --root sampled."""
    blocks_per_step: NonNegativeInt = 0
    """Blocks over which each step is averaged; 0 = one, or one per process of torchrun."""
    shard_blocks: bool = False
    """Share each block among the processes of torchrun, for blocks larger than one can hold; else each has its own."""
    aug_block: NonNegativeInt = 0
    """With all data in the block (kfac, diag): data points of a block for gradients of the augmentation; 0 = all."""
    aug_blocks: PositiveInt = 1
    """Blocks of --aug-block over which each gradient of the augmentation is summed."""
    kfac: Literal["expand", "reduce"] = "expand"
    """Weight-sharing setting of KFAC."""
    weight_blocks: Literal["tensor", "module", "parent"] = "module"
    """Blocks of blockdiag: single parameter tensors, the parameters of a module, or those of all modules with the same parent (residual blocks)."""
    posterior: Literal["scalar", "group", "diagonal"] = "scalar"
    """Posterior of elbo and de-elbo: one width for all weights, one per group of the prior, or one per weight."""
    kappa: NonNegativeFloat = 0.0
    """Emphasis on the data in de-elbo; 0 = parameters / data."""
    antithetic: bool = False
    """Average the loss of elbo and de-elbo over two opposite draws of the weights."""


@dataclass(frozen=True)
class Sampling:
    """How posterior samples are drawn (--method sampled)."""

    samples: PositiveInt = 8
    """Samples k."""
    solver: Literal["cg", "sgd"] = "cg"
    """Conjugate gradients, in passes over all data, or minibatch gradients with Nesterov momentum."""
    solver_passes: PositiveInt = 50
    """Passes of cg over the data for a set of samples, at most."""
    solver_steps: NonNegativeInt = 0
    """Minibatch steps of sgd for a set of samples, at most; 0 = as many as the spectrum asks for."""
    solver_tolerance: PositiveFloat = 0.01
    """Relative residual at which a solver ends; a result that does not reach it is marked."""
    preconditioner_rows: NonNegativeInt = 0
    """Rows of the data that make a preconditioner for cg; as many vectors of all weights are kept."""
    em_steps: PositiveInt = 1
    """EM steps on the prior in each round."""
    em_precision: NonNegativeFloat = 0.0
    """Prior precision from which EM steps start: few passes solve for samples of a large one; 0 = --prior-precision."""
    g_prior: bool = False
    """Scale features to unit curvature; the learned precision is then that of scaled weights, and weights are trained with the initial one."""
    curvature: Literal["outputs", "averaged"] = "outputs"
    """Curvature of the likelihood at the network's outputs (Laplace), or averaged over samples: predicts better where the network is sure of its training data, and makes the evidence a variational bound."""
    exclude: str = ""
    """Name patterns of weights that samples leave fixed, separated by commas (*norm*)."""
    ladder: Several = 9
    """Precisions over which the final evidence is integrated."""


@dataclass(frozen=True)
class Problem:
    """What is learned from what."""

    FREE: ClassVar = ("data_root",)

    dataset: str = "digits"
    """digits, mnist, fmnist, usps, cifar10, cifar100, tinyimagenet; also with _r90, _r180, _translated, _scaled."""
    data_root: Path = Path("data")
    """Where data files are, or are downloaded to."""
    n_data: NonNegativeInt = 0
    """Size of the random training subset; 0 = all."""
    model: Annotated[str, MODEL.one()] = "cnn"
    """Network."""
    depth: Layers = DEPTH
    """Depth of resnet and resnet_norm."""
    width: NonNegativeInt = 0
    """Width of the network (see README); 0 = its own default."""


@dataclass(frozen=True)
class Hyperparameters:
    """What is learned by the evidence."""

    prior: Literal["scalar", "layerwise", "diagonal"] = "layerwise"
    """One prior precision for all weights, one per parameter tensor, or one per weight."""
    prior_precision: PositiveFloat = 0.01
    """Initial prior precision; elbo and de-elbo have it in closed form."""
    augment: Literal["none", "affine"] = "none"
    """Learn a distribution over affine transformations of the inputs."""
    aug_samples: PositiveInt = 20
    """Transformed copies A of each input over which the outputs are averaged."""
    aug_init: AnyFloat = 0.05
    """Initial ranges of the transformations."""
    augerino_regulariser: AnyFloat = 0.01
    """Reward of augerino for wide ranges."""
    flip: bool = False
    """Mirror copies left and right at random."""
    sigma: PositiveFloat = 0.05
    """Initial width of the posterior of elbo and de-elbo; a small one lets the prior pull random weights to zero."""
    temperature: PositiveFloat = 1.0
    """Temperature tau by which log-likelihoods are divided, in the loss and in the evidence; below 1 every datum counts more than once."""
    learn_temperature: bool = False
    """Learn the temperature by the evidence, which only grows with it (see docs/bounds.md): to study that, not to train well."""


@dataclass(frozen=True)
class Training:
    """Interleaved optimisation of weights and hyperparameters."""

    epochs: PositiveInt = 100
    """Passes over the training data."""
    batch_size: PositiveInt = 128
    """Data points per weight step."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimiser of the weights; sgd has momentum 0.9."""
    lr: PositiveFloat = 5e-3
    """Learning rate of the weights at the start (cosine decay)."""
    lr_min: NonNegativeFloat = 1e-6
    """Learning rate of the weights at the end."""
    lr_hyp: NonNegativeFloat = 0.1
    """Learning rate of the log prior precision, or of sigma in elbo and de-elbo (Adam), at the start."""
    lr_hyp_min: NonNegativeFloat = 0.01
    """Learning rate of the log prior precision or of sigma at the end."""
    prior_update: Literal["adam", "fixed-point"] = "adam"
    """How rounds move the prior: adam, or MacKay's fixed point, of which --lr-hyp is then the share in each step."""
    lr_aug: NonNegativeFloat = 0.05
    """Learning rate of the augmentation (Adam) at the start."""
    lr_aug_min: NonNegativeFloat = 0.005
    """Learning rate of the augmentation at the end."""
    burnin: NonNegativeInt = 10
    """Epochs before the first hyperparameter step."""
    frequency: PositiveInt = 5
    """Epochs between rounds of hyperparameter steps."""
    prior_steps: NonNegativeInt = 10
    """Steps on the prior in each round."""
    aug_steps: NonNegativeInt = 10
    """Steps on the augmentation in each round."""
    steps_per_block: PositiveInt = 1
    """Steps on the prior taken on one block, whose curvature is then computed once."""


@dataclass(frozen=True)
class Run:
    """Where and how it runs."""

    FREE: ClassVar = (
        *("device", "threads", "out", "resume", "baseline", "checkpoint_seconds", "dry_run"),
        *("collective_timeout", "memory_budget", "predict", "wandb", "tensorboard"),
    )

    seed: NonNegativeInt = 0
    """Seed of data subset, initial weights and every random draw."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes a GPU if there is one."""
    precision: Literal["float32", "float64"] = "float32"
    """Number format of the network."""
    threads: Threads = 0
    """CPU threads; 0 = one for a small network, for others all cores but one (threads wait for the slowest)."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Run folder; by default runs/ and a name made of the settings."""
    resume: bool = False
    """Continue the run in its folder from the last checkpoint; without one, start it."""
    baseline: bool = True
    """Also train the MAP baseline (same settings, fixed prior, no learned augmentation) and compare."""
    predict: Literal["probit", "none"] = "probit"
    """At the end also score predictions of the posterior with the learned prior, by the probit link; none skips them."""
    eval_every: NonNegativeInt = 0
    """Epochs between evaluations on the test set; 0 = about fifty in all."""
    checkpoint_seconds: Limit = 10.0
    """Least time between checkpoints."""
    collective_timeout: Seconds = 600.0
    """Seconds that processes of torchrun wait for each other in one step."""
    memory_budget: Limit = 0.0
    """Gigabytes the evidence may use; 0 = half of what is free."""
    wandb: bool = False
    """Mirror metrics to wandb."""
    tensorboard: bool = False
    """Mirror metrics to tensorboard."""
    dry_run: bool = False
    """Print the resolved settings, sizes and estimates of memory and time; no run folder is made."""


@dataclass(frozen=True)
class Config(Settings):
    """Train an image classifier while learning its hyperparameters by marginal likelihood."""

    script = "classification_image.py"
    note = "--preset NAME takes settings of the paper; --preset list names them."
    first = {
        "method": "what learns the hyperparameters; map learns none",
        "subset": "data points in a block: larger is tighter and slower",
        "outputs": "outputs in a block, 0 = all",
        "dataset": "digits need no download",
        "n_data": "training points, 0 = all",
        "model": "network",
        "epochs": "passes over the training data",
        "augment": "affine learns transformations of the images too",
        "seed": "of every random draw",
        "out": "run folder; None = below runs/, by the settings",
    }

    estimator: Estimator = field(default_factory=Estimator)
    problem: Problem = field(default_factory=Problem)
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    training: Training = field(default_factory=Training)
    run: Run = field(default_factory=Run)
    sampling: Sampling = field(default_factory=Sampling)

    def defaults(self) -> Config:
        """Those of a command line: it may name no method, and a method has defaults of its own."""
        own = Config().updated(method=self.estimator.method)
        return replace(own, estimator=replace(own.estimator, method=UNNAMED))

    def updated(self, **changes: Any) -> Config:
        """A copy with some settings changed; another method brings its own defaults along.

        What was given for a setting stays: only what the method before had as its default changes.
        """
        method = changes.get("method", self.estimator.method)
        if method != self.estimator.method:
            plain, settings = Config().flat(), self.flat()
            before, after = (
                getattr(METHOD.entry(name), "defaults", {})
                for name in (self.estimator.method, method)
            )
            for name in {**before, **after}:
                if settings[name] == before.get(name, plain[name]):
                    changes.setdefault(name, after.get(name, plain[name]))
        return super().updated(**changes)
