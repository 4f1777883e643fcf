"""Commands of Table 1, top: prior precisions of a Wide ResNet on CIFAR-10 and CIFAR-100.

python scripts/generate_cifar_commands.py > scripts/cifar_commands.sh
"""

from commands import Experiment, Scale, print_commands, runs

PAPER = ("MAP", "NTK-500-1", "KFAC-500-1", "KFAC-500-C", "KFAC-N-1", "KFAC-N-C")


def experiments(scale: Scale) -> list[Experiment]:
    """The estimators of the table; at full scale also with outputs drawn per data point, and with grouped data."""
    configs = []
    for dataset in ("cifar10", "cifar100"):
        configs += runs(["cifar"], scale, PAPER, dataset=dataset)
        if scale == "full":
            configs += runs(["cifar"], scale, ("NTK-500-1", "KFAC-500-1", "KFAC-N-1"), dataset=dataset, columns="iid")
            grouped = ("NTK-500-1", "KFAC-500-1", "KFAC-500-C")
            configs += runs(["cifar"], scale, grouped, dataset=dataset, partition="class")
    seeds, reduced = ((0, 1, 2, 3, 4), "") if scale == "full" else ((0, 1, 2), "3 seeds, no iid or grouped variants")
    return [Experiment("cifar", ("cifar",), "Table 1, top", seeds, tuple(configs), reduced)]


if __name__ == "__main__":
    print_commands(__doc__, experiments)
