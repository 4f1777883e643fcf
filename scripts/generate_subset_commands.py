"""Commands of Figures 7 and 14-16: invariances from subsets of transformed CIFAR-10.

python scripts/generate_subset_commands.py > scripts/subset_commands.sh
"""

from commands import PAPER, Experiment, Scale, named, print_commands, runs

DATASETS = {
    "full": ("cifar10", "cifar10_r180", "cifar10_translated", "cifar10_scaled"),
    "small": ("cifar10", "cifar10_r180"),
}
SIZES = {"full": (1000, 5000, 10000, 20000, 0), "small": (500, 2000)}


VARIANTS = {
    "sgd": "weights trained by SGD with momentum instead of Adam",
    "labels": "blocks of data grouped by their label",
}


def experiments(scale: Scale, variant: str = PAPER) -> list[Experiment]:
    """KFAC of all data with few steps against stochastic estimators with many."""
    files = ["cifar-subsets", *([] if variant == PAPER else [f"cifar-subsets-{variant}"])]
    configs = []
    for dataset in DATASETS[scale]:
        for size in SIZES[scale]:
            settings = {"dataset": dataset, "n_data": size}
            configs += runs(files, scale, ("NTK-400-1", "KFAC-400-1"), **settings)
            # all data are one block: nothing to group
            configs += runs(
                [*files, "cifar-subsets-full"],
                scale,
                ["KFAC-N-C"],
                partition="random",
                **settings,
            )
    seeds, reduced = (
        ((0, 1, 2), "")
        if scale == "full"
        else ((0,), "subsets of 500 and 2000, two variants, 1 seed")
    )
    name = named("cifar-subsets", variant)
    return [Experiment(name, tuple(files), "Figures 7, 14-16", seeds, tuple(configs), reduced)]


if __name__ == "__main__":
    print_commands(__doc__, experiments, VARIANTS)
