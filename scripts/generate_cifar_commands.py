"""Commands of Table 1, top: prior precisions of a Wide ResNet on CIFAR-10 and CIFAR-100.

python scripts/generate_cifar_commands.py > scripts/cifar_commands.sh
"""

from commands import Experiment, Scale, print_commands, runs

from ntkmarglik.programs.classify.config import Config

PAPER = ("MAP", "NTK-500-1", "KFAC-500-1", "KFAC-500-C", "KFAC-N-1", "KFAC-N-C")
REDUCED = (
    "3 seeds, no iid or grouped variants, of CIFAR-100 1000 images and 10 of the 100 outputs in "
    "KFAC-500-10"
)


def paper_runs(dataset: str) -> list[Config]:
    """The table's estimators, also with outputs drawn per data point and with grouped data."""
    grouped = ("NTK-500-1", "KFAC-500-1", "KFAC-500-C")
    return [
        *runs(["cifar"], "full", PAPER, dataset=dataset),
        *runs(
            ["cifar"],
            "full",
            ("NTK-500-1", "KFAC-500-1", "KFAC-N-1"),
            dataset=dataset,
            columns="iid",
        ),
        *runs(["cifar"], "full", grouped, dataset=dataset, partition="class"),
    ]


def small_runs(dataset: str) -> list[Config]:
    """The table's estimators; a hundred outputs are ten times the cost of ten."""
    if dataset == "cifar10":
        return list(runs(["cifar"], "small", PAPER, dataset=dataset))
    labels = ["KFAC-500-10" if label == "KFAC-500-C" else label for label in PAPER]
    return list(runs(["cifar"], "small", labels, dataset=dataset, n_data=1000, prior_precision=0.5))


def experiments(scale: Scale) -> list[Experiment]:
    """The estimators of the table on both data sets."""
    made = paper_runs if scale == "full" else small_runs
    configs = [config for dataset in ("cifar10", "cifar100") for config in made(dataset)]
    seeds, reduced = ((0, 1, 2, 3, 4), "") if scale == "full" else ((0, 1, 2), REDUCED)
    return [Experiment("cifar", ("cifar",), "Table 1, top", seeds, tuple(configs), reduced)]


if __name__ == "__main__":
    print_commands(__doc__, experiments)
