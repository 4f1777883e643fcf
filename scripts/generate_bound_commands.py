"""Commands of Figures 1, 8-11 and 13: priors and invariances learned with every bound on MNIST-1000.

python scripts/generate_bound_commands.py > scripts/bound_commands.sh
"""

from collections.abc import Iterator

from commands import Experiment, Scale, print_commands, runs

from ntkmarglik.config import Config

STRUCTURES = ("ntk", "blockdiag", "kfac", "diag")
SUBSETS = {"full": (10, 20, 50, 100, 250, 500), "small": (20, 100)}
SUBSETS_OF_ONE_OUTPUT = {"full": SUBSETS["full"], "small": (20, 100, 500)}


def estimators(names: list[str], scale: Scale) -> Iterator[Config]:
    """Every structure, block size, output mode and grouping; MAP.

    A full Gauss-Newton matrix of a block is the number of its kernel (`ntk`), so `full` comes with all data only; with
    all data there is nothing to group.
    """
    yield from runs(names, scale, ["MAP", "full-N-C"])
    for structure in STRUCTURES if scale == "full" else STRUCTURES[:3]:
        for outputs, subsets in (("C", SUBSETS[scale]), ("1", SUBSETS_OF_ONE_OUTPUT[scale])):
            labels = [f"{structure}-{subset}-{outputs}" for subset in subsets]
            yield from runs(names, scale, labels)
            if scale == "full" or structure == "ntk":
                yield from runs(names, scale, labels, partition="class")
    all_data = [f"{structure}-N-C" for structure in STRUCTURES[1:]]
    yield from runs(names, scale, [*all_data, *(["ntk-N-C"] if scale == "full" else [])])
    yield from runs(names, scale, [f"{structure}-N-1" for structure in (STRUCTURES if scale == "full" else ["ntk"])])


def experiments(scale: Scale) -> list[Experiment]:
    """Prior precisions alone, and with invariances; the grids of `bound_grid.py` belong here when it can print them."""
    reduced = "S of 20 and 100 (500 for one output), grouped data for ntk only" if scale == "small" else ""
    return [
        Experiment(name, (name,), figures, (0, 1, 2), tuple(estimators([name], scale)), reduced)
        for name, figures in (("bound-prior", "Figures 10, 11, 13"), ("bound-lila", "Figures 1, 8, 9"))
    ]


if __name__ == "__main__":
    print_commands(__doc__, experiments)
