"""What the command generators share: their options, and lines printed from the real settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ntkmarglik.config import Config
from ntkmarglik.experiments import Scale, described, difference, estimator, label_of, load

__all__ = ["Experiment", "Scale", "print_commands", "runs"]


@dataclass(frozen=True)
class Experiment:
    """The runs of one experiment of the paper, without their seeds."""

    name: str
    files: tuple[str, ...]  # of its settings
    what: str  # table or figure
    seeds: tuple[int, ...]
    configs: tuple[Config, ...]
    reduced: str = ""  # what is smaller than in the paper, besides settings

    def with_seeds(self, root: Path, seeds: tuple[int, ...] = ()) -> Iterable[Config]:
        """One configuration per run, seed by seed, so that what is stopped early has whole comparisons."""
        for seed in seeds or self.seeds:
            for config in self.configs:
                name = f"{config.problem.dataset}-{config.problem.n_data or 'all'}-{label_of(config)}-seed{seed}"
                out = root / self.name / name.replace(" ", "-")
                yield config.updated(seed=seed, out=out, resume=True)


def runs(names: Iterable[str], scale: Scale, labels: Iterable[str], **settings: object) -> tuple[Config, ...]:
    """The experiment's configuration for every estimator, in the words of the paper, with some settings changed."""
    base = load(*names, scale=scale)
    return tuple(base.updated(**{**estimator(label), **settings}) for label in labels)


def print_commands(description: str | None, experiments: Callable[[Scale], list[Experiment]]) -> None:
    """The command line of a generator: print every run as a command of the runner."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="the paper's size, or two CPU cores")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--wandb", action="store_true", help="mirror the runs to wandb")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the paper's number of seeds")
    given = parser.parse_args()
    seeds, root = tuple(given.seeds or ()), Path("runs") if given.scale == "full" else Path("runs/small")
    for experiment in experiments(given.scale):
        count = len(seeds or experiment.seeds) * len(experiment.configs)
        print(f"# {experiment.name} ({experiment.what}): {count} runs")
        if given.scale == "small":
            print(f"# reduced: {'; '.join(filter(None, (_reduction(experiment), experiment.reduced)))}")
        for config in experiment.with_seeds(root, seeds):
            print(config.updated(device=given.device, wandb=given.wandb, data_root=given.data_root).command())


def _reduction(experiment: Experiment) -> str:
    """The settings in which the small experiment differs from the paper's, whatever the estimator."""
    return described(difference(load(*experiment.files), load(*experiment.files, scale="small")))
