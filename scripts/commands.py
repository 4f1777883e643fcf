"""What the command generators share: their options, and lines printed from the real settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.paper.experiments import (
    Scale,
    described,
    difference,
    estimator,
    label_of,
    load,
)

__all__ = ["PAPER", "Experiment", "Printable", "Scale", "named", "print_commands", "runs"]

PAPER = "paper"  # what its text says, where that and its code differ


class Printable(Protocol):
    """What a generator prints: a heading, and commands for some seeds and the place they run in."""

    def heading(self, scale: Scale, seeds: Sequence[int]) -> list[str]: ...

    def commands(self, root: Path, seeds: Sequence[int], **place: object) -> Iterator[str]: ...


@dataclass(frozen=True)
class Experiment:
    """The runs of one experiment of the paper."""

    name: str
    files: tuple[str, ...]  # of its settings
    what: str  # table or figure
    seeds: tuple[int, ...]
    configs: tuple[Config, ...]  # without their seeds
    reduced: str = ""  # what is smaller than in the paper, besides settings

    def heading(self, scale: Scale, seeds: Sequence[int]) -> list[str]:
        """What it is; at small scale also what is smaller than in the paper."""
        lines = [f"{self.name} ({self.what}): {len(seeds or self.seeds) * len(self.configs)} runs"]
        if scale == "small":
            settings = described(difference(load(*self.files), load(*self.files, scale="small")))
            lines.append(f"reduced: {'; '.join(filter(None, (settings, self.reduced)))}")
        return lines

    def commands(self, root: Path, seeds: Sequence[int], **place: object) -> Iterator[str]:
        """One line per run, seed by seed, so that what is stopped early has whole comparisons."""
        for seed in seeds or self.seeds:
            for config in self.configs:
                data = f"{config.problem.dataset}-{config.problem.n_data or 'all'}"
                name = f"{data}-{label_of(config)}-seed{seed}"
                out = root / self.name / name.replace(" ", "-")
                yield config.updated(seed=seed, out=out, resume=True, **place).command()


def runs(
    files: Iterable[str], scale: Scale, labels: Iterable[str], **settings: object
) -> tuple[Config, ...]:
    """The configuration of every estimator, named as in the paper, with some settings changed."""
    base = load(*files, scale=scale)
    return tuple(base.updated(**{**estimator(label), **settings}) for label in labels)


def named(experiment: str, variant: str) -> str:
    """The name of a variant of an experiment, and of the folder of its runs."""
    return experiment if variant == PAPER else f"{experiment}-{variant}"


def print_commands(
    description: str | None,
    experiments: Callable[..., Sequence[Printable]],
    variants: Mapping[str, str] | None = None,
) -> None:
    """The command line of a generator.

    Args:
        description: of the program.
        experiments: gives what is printed for a scale, and for a variant if there are any.
        variants: names of other readings of the paper, and what they change.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale",
        choices=("full", "small"),
        default="full",
        help="the paper's size, or two CPU cores",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--wandb", action="store_true", help="mirror the runs to wandb")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[], help="instead of the paper's seeds"
    )
    if variants:
        parser.add_argument(
            "--variant",
            choices=(PAPER, *variants),
            default=PAPER,
            help="; ".join(f"{name}: {what}" for name, what in variants.items()),
        )
    given = parser.parse_args()
    chosen = (given.scale, given.variant) if variants else (given.scale,)
    code = exit_code(lambda: print(*_lines(given, experiments(*chosen)), sep="\n"))
    if code:
        sys.exit(code)


def _lines(given: argparse.Namespace, experiments: Sequence[Printable]) -> Iterator[str]:
    root = Path("runs") if given.scale == "full" else Path("runs/small")
    place = {"device": given.device, "wandb": given.wandb, "data_root": given.data_root}
    for experiment in experiments:
        yield from (f"# {line}" for line in experiment.heading(given.scale, given.seeds))
        yield from experiment.commands(root, given.seeds, **place)
