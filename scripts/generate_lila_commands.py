"""Commands of Table 1, bottom: invariances of a Wide ResNet on CIFAR-10 and CIFAR-100.

python scripts/generate_lila_commands.py > scripts/lila_commands.sh
"""

from commands import Experiment, Scale, print_commands, runs

# all data: (estimator, gradients of the augmentation in an epoch, data points of each)
ALL_DATA = (("KFAC-N-1", 45, 120), ("KFAC-N-C", 140, 40))
SHARE = 10  # at small scale this part of the gradients: the data are fewer by more than that


def experiments(scale: Scale) -> list[Experiment]:
    """Stochastic estimators, and those of all data with their own rates and gradients by blocks."""
    configs = []
    for dataset in ("cifar10", "cifar100"):
        configs += runs(["cifar-lila"], scale, ("NTK-150-1", "KFAC-150-1"), dataset=dataset)
        for label, steps, size in ALL_DATA:
            if scale == "small" and (dataset, label) == ("cifar100", "KFAC-N-C"):
                continue  # hours; the paper could not run it either
            steps = steps if scale == "full" else -(-steps // SHARE)
            settings = {"dataset": dataset, "aug_steps": steps, "aug_block": size}
            configs += runs(["cifar-lila", "cifar-lila-full"], scale, [label], **settings)
    reduced = (
        "" if scale == "full" else f"1/{SHARE} of the steps of KFAC-N, KFAC-N-C on CIFAR-10 only"
    )
    return [
        Experiment(
            "cifar-lila", ("cifar-lila",), "Table 1, bottom", (0, 1, 2), tuple(configs), reduced
        )
    ]


if __name__ == "__main__":
    print_commands(__doc__, experiments)
