"""Commands of Figures 1, 3-6 and 8-13: bounds on MNIST-1000 over grids and learned with.

python scripts/generate_bound_commands.py > scripts/bound_commands.sh
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import PAPER, Experiment, Printable, Scale, named, print_commands, runs

from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.paper.experiments import described, difference, load_grid

SUBSETS = (10, 20, 50, 100, 250, 500)
SMALL = (
    *("MAP", "ntk-20-1", "ntk-100-1", "ntk-500-1", "ntk-20-C", "ntk-100-C", "blockdiag-100-1"),
    *("kfac-20-1", "kfac-100-1", "kfac-500-1", "blockdiag-20-C", "blockdiag-100-C"),
)
SMALL_GROUPED = ("ntk-100-1", "ntk-20-C")
# all outputs of all data take a minute and a half for one estimate with a kernel or dense blocks,
# and the diagonal of copies ten seconds
SMALL_ALL_DATA = {
    "bound-prior": ("kfac-N-C", "diag-N-C", "ntk-N-1", "blockdiag-N-1"),
    "bound-lila": ("kfac-N-C", "diag-N-1"),
}
VARIANTS = {"code": "grids at networks trained as by the published code, and nothing else"}
AUG_BLOCK = 200  # data points of their gradients of the augmentation at small scale


def paper_runs(names: list[str]) -> Iterator[Config]:
    """Every structure, block size, output mode and grouping; MAP.

    A full Gauss-Newton matrix of a block is the number of its kernel (`ntk`), so `full` comes with
    all data only; with all data there is nothing to group.
    """
    yield from runs(names, "full", ["MAP", "full-N-C"])
    for structure in GridConfig().grid.structures:
        for outputs in ("C", "1"):
            labels = [f"{structure}-{subset}-{outputs}" for subset in SUBSETS]
            yield from runs(names, "full", labels)
            yield from runs(names, "full", labels, partition="class")
            yield from runs(names, "full", [f"{structure}-N-{outputs}"])


def small_runs(names: list[str]) -> Iterator[Config]:
    """Some of them: those that two cores can afford.

    Runs with all data take gradients of the augmentation from blocks; their times are those of the
    whole gradient.
    """
    blocks = AUG_BLOCK if names == ["bound-lila"] else 0
    yield from runs(names, "small", SMALL)
    yield from runs(names, "small", SMALL_ALL_DATA[names[0]], aug_block=blocks)
    yield from runs(names, "small", SMALL_GROUPED, partition="class")


def estimators(names: list[str], scale: Scale) -> Iterator[Config]:
    """The estimators of a scale with the settings of some files."""
    return paper_runs(names) if scale == "full" else small_runs(names)


# at small scale: the choices that are not multiplied with each other, one command each
SMALL_GRIDS: dict[str, list[dict[str, Any]]] = {
    "bound-grid-prior": [
        {"structures": ("ntk",), "roots": ("paper", "fisher", "eigen")},
        {"structures": ("blockdiag", "kfac"), "roots": ("paper", "fisher")},
        {"structures": ("diag",), "subsets": (0,), "outputs": ("all",)},
    ],
    "bound-grid-rotation": [
        {
            "structures": ("ntk",),
            "subsets": (10, 20, 50, 100, 250, 0),
            "roots": ("paper", "fisher"),
        },
        {"structures": ("kfac", "diag"), "subsets": (0,), "outputs": ("all",)},
        {
            "structures": ("kfac",),
            "subsets": (10, 100),
            "outputs": ("all",),
            "partitions": ("random",),
        },
        {
            "structures": ("blockdiag",),
            "subsets": (10, 50, 100),
            "outputs": ("all",),
            "partitions": ("random",),
            "blocks": 4,
        },
    ],
}


@dataclass(frozen=True)
class Grid:
    """A grid of bounds at one network; several commands fill one csv."""

    name: str
    files: tuple[str, ...]  # of its settings
    what: str
    configs: tuple[GridConfig, ...]

    def heading(self, scale: Scale, seeds: Sequence[int]) -> list[str]:
        """What it is; at small scale also what is smaller than in the paper."""
        lines = [f"{self.name} ({self.what}): one network, {self.configs[0].grid.points} values"]
        if scale == "small":
            settings = described(
                difference(load_grid(*self.files), load_grid(*self.files, scale="small"))
            )
            lines.append(f"reduced: {settings}; fewer block sizes, roots or structures")
        return lines

    def commands(self, root: Path, seeds: Sequence[int], **place: object) -> Iterator[str]:
        """A line for each part, to be run in this order; the network has its own seed."""
        for config in self.configs:
            where = {
                "out": root / self.name,
                "device": place["device"],
                "data_root": place["data_root"],
            }
            yield config.updated(**where).command()


def grid(name: str, what: str, scale: Scale, variant: str) -> Grid:
    """The grid of some figures."""
    files = (name,) if variant == PAPER else (name, f"bound-grid-{variant}")
    parts = SMALL_GRIDS[name] if scale == "small" else [{}]
    configs = tuple(load_grid(*files, scale=scale).updated(**part) for part in parts)
    return Grid(named(name, variant), files, what, configs)


def experiments(scale: Scale, variant: str = PAPER) -> list[Printable]:
    """Grids of bounds; prior precisions learned with every bound; the same with invariances."""
    grids = [
        grid(name, "Figures 3-6, 12", scale, variant)
        for name in ("bound-grid-prior", "bound-grid-rotation")
    ]
    if variant != PAPER:  # the others are the same
        return list(grids)
    reduced = "fewer block sizes and structures" if scale == "small" else ""
    return [
        *grids,
        *(
            Experiment(name, (name,), figures, (0, 1, 2), tuple(estimators([name], scale)), reduced)
            for name, figures in (
                ("bound-prior", "Figures 10, 11, 13"),
                ("bound-lila", "Figures 1, 8, 9"),
            )
        ),
    ]


if __name__ == "__main__":
    print_commands(__doc__, experiments, VARIANTS)
