"""Commands of the tables of the data-emphasised ELBO: pretrained networks on images and texts.

python scripts/generate_finetune_commands.py > scripts/finetune_commands.sh

Every learning rate is a line of its own where a method compares fits of different rates only at
their end; the launcher's table takes the rate with the highest score. At small scale lines are
those of compare_finetuning.py, of networks that make_small_checkpoints.py makes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import compare_finetuning
from commands import Printable, Scale, print_commands

from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.plan import PLANS

SEEDS = (0, 1, 2)
# 0: all. Of these the sources state 100, 370, 510 and 4000, and that CIFAR-10 goes up to all
SIZES = {
    "cifar10": (100, 1000, 10_000, 0),
    "flowers102": (510, 0),
    "pets37": (370, 0),
    "ag_news": (400, 4000, 40_000, 0),
}
IMAGES = ("cifar10", "flowers102", "pets37")
NETWORKS = {
    "convnext-tiny": "hub:facebook/convnext-tiny-224",
    "resnet-50": "hub:microsoft/resnet-50",
    "vit-b-16": "hub:google/vit-base-patch16-224-in21k",
}
BERT = "hub:google-bert/bert-base-uncased"
METHODS = compare_finetuning.METHODS
PRIORS = {"l2-sp": METHODS, "l2-zero": ("map-gs", "elbo", "de-elbo")}
# the low-rank prior needs statistics of the pretraining, which no network of the hub has
SMALL_PRIORS = {**PRIORS, "ptyl": ("map-gs", "elbo", "de-elbo")}


@dataclass(frozen=True)
class Finetuning:
    """All searches with one network, without their seeds."""

    name: str
    configs: tuple[FinetuneConfig, ...]
    reduced: str = ""

    def heading(self, scale: Scale, seeds: Sequence[int]) -> list[str]:
        """What it is; at small scale also what is smaller."""
        lines = [f"{self.name}: {len(seeds or SEEDS) * len(self.configs)} runs"]
        return [*lines, f"reduced: {self.reduced}"] if scale == "small" else lines

    def commands(self, root: Path, seeds: Sequence[int], **place: object) -> Iterator[str]:
        """One line per run, seed by seed, so that what is stopped early has whole comparisons."""
        for seed in seeds or SEEDS:
            for config in self.configs:
                task, search = config.task, config.search
                rates = "" if len(search.rates) > 1 else f"-{search.rates[0]:g}"
                name = f"{task.dataset}-{task.n_data or 'all'}-{search.method}-{search.prior}"
                out = root / self.name / f"{name}{rates}-seed{seed}"
                yield config.updated(seed=seed, out=out, resume=True, **place).command()


def searches(base: FinetuneConfig, sizes: Sequence[int]) -> Iterator[FinetuneConfig]:
    """Every size, prior, method and rate; Bayesian optimisation proposes rates itself."""
    for size in sizes:
        for prior, methods in PRIORS.items():
            for method in methods:
                config = base.updated(n_data=size, prior=prior, method=method)
                rates = config.search.rates
                if PLANS[method].candidates == "optimised":
                    yield config
                else:
                    yield from (config.updated(rates=(rate,)) for rate in rates)


def full() -> Iterator[Finetuning]:
    """The published networks: 6,000 steps on images, 12,000 of 32 texts."""
    for name, checkpoint in NETWORKS.items():
        configs: list[FinetuneConfig] = []
        for dataset in IMAGES:
            base = FinetuneConfig().updated(checkpoint=checkpoint, dataset=dataset, augment="crop")
            configs += searches(base, SIZES[dataset])
        yield Finetuning(f"finetune-{name}", tuple(configs))
    base = FinetuneConfig().updated(checkpoint=BERT, dataset="ag_news", steps=12_000, batch_size=32)
    yield Finetuning("finetune-bert", tuple(searches(base, SIZES["ag_news"])))


def small() -> Iterator[Finetuning]:
    """The networks of minutes, all rates in one line."""
    for problem, settings in compare_finetuning.PROBLEMS.items():
        folder = f"checkpoints/{settings['checkpoint']}"
        base = FinetuneConfig().updated(
            **{**compare_finetuning.SMALL, **settings, "checkpoint": folder, "device": "auto"}
        )
        configs = [
            base.updated(n_data=size, prior=prior, method=method)
            for size in compare_finetuning.SIZES[problem]
            for prior, methods in SMALL_PRIORS.items()
            for method in methods
        ]
        reduced = "small networks on half of the classes, two rates and a grid of two decays"
        yield Finetuning(f"finetune-{problem}", tuple(configs), reduced)


def experiments(scale: Scale) -> list[Printable]:
    """Every method, data set, size, prior and rate."""
    return list(full() if scale == "full" else small())


if __name__ == "__main__":
    print_commands(__doc__, experiments)
