"""Commands of Figures 1, 8-11 and 13: priors and invariances learned with every bound on MNIST-1000.

python scripts/generate_bound_commands.py > scripts/bound_commands.sh
"""

from collections.abc import Iterator

from commands import Experiment, Scale, print_commands, runs

from ntkmarglik.config import Config

STRUCTURES = ("ntk", "blockdiag", "kfac", "diag")
SUBSETS = (10, 20, 50, 100, 250, 500)
SMALL = (
    *("MAP", "ntk-20-1", "ntk-100-1", "ntk-500-1", "ntk-20-C", "ntk-100-C", "blockdiag-100-1"),
    *("kfac-20-1", "kfac-100-1", "kfac-500-1"),
)
SMALL_GROUPED = ("ntk-100-1", "ntk-20-C")
SMALL_ALL_DATA = {"bound-prior": ("blockdiag-N-C", "kfac-N-C"), "bound-lila": ()}


def paper_runs(names: list[str]) -> Iterator[Config]:
    """Every structure, block size, output mode and grouping; MAP.

    A full Gauss-Newton matrix of a block is the number of its kernel (`ntk`), so `full` comes with all data only; with
    all data there is nothing to group.
    """
    yield from runs(names, "full", ["MAP", "full-N-C"])
    for structure in STRUCTURES:
        for outputs in ("C", "1"):
            labels = [f"{structure}-{subset}-{outputs}" for subset in SUBSETS]
            yield from runs(names, "full", labels)
            yield from runs(names, "full", labels, partition="class")
            yield from runs(names, "full", [f"{structure}-N-{outputs}"])


def small_runs(names: list[str]) -> Iterator[Config]:
    """Some of them: those that two cores can afford."""
    yield from runs(names, "small", [*SMALL, *SMALL_ALL_DATA[names[0]]])
    yield from runs(names, "small", SMALL_GROUPED, partition="class")


def estimators(names: list[str], scale: Scale) -> Iterator[Config]:
    """The estimators of a scale with the settings of some files."""
    return paper_runs(names) if scale == "full" else small_runs(names)


def experiments(scale: Scale) -> list[Experiment]:
    """Prior precisions alone, and with invariances."""
    reduced = "fewer block sizes and structures" if scale == "small" else ""
    return [
        Experiment(name, (name,), figures, (0, 1, 2), tuple(estimators([name], scale)), reduced)
        for name, figures in (("bound-prior", "Figures 10, 11, 13"), ("bound-lila", "Figures 1, 8, 9"))
    ]


if __name__ == "__main__":
    print_commands(__doc__, experiments)
