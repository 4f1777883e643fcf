"""Commands of Table 1, bottom: invariances of a Wide ResNet on CIFAR-10 and CIFAR-100.

python scripts/generate_lila_commands.py > scripts/lila_commands.sh
"""

from commands import PAPER, Experiment, Scale, named, print_commands, runs

# all data: (estimator, blocks for gradients of the augmentation in an epoch, data points of each)
ALL_DATA = (("KFAC-N-1", 45, 120), ("KFAC-N-C", 140, 40))
SHARE = 10  # at small scale this part of the blocks: the data are fewer by more than that
VARIANTS = {"steps": "KFAC-N: a step of the augmentation on each block, not one on their sum"}


def of_all_data(blocks: int, size: int, scale: Scale, variant: str) -> dict[str, object]:
    """Steps of the augmentation in a round.

    At small scale a step on each block: rounds are few, and several steps in each stand for those
    of the rounds that are left out.
    """
    blocks = blocks if scale == "full" else -(-blocks // SHARE)
    if scale == "small" or variant == "steps":
        return {"aug_block": size, "aug_steps": blocks}
    return {"aug_block": size, "aug_blocks": blocks}


def experiments(scale: Scale, variant: str = PAPER) -> list[Experiment]:
    """Stochastic estimators, and those of all data with their own rates and gradients by blocks."""
    configs = []
    for dataset in ("cifar10", "cifar100"):
        configs += runs(["cifar-lila"], scale, ("NTK-150-1", "KFAC-150-1"), dataset=dataset)
        for label, blocks, size in ALL_DATA:
            if scale == "small" and (dataset, label) == ("cifar100", "KFAC-N-C"):
                continue  # hours; the paper could not run it either
            settings = of_all_data(blocks, size, scale, variant)
            files = ["cifar-lila", "cifar-lila-full"]
            configs += runs(files, scale, [label], dataset=dataset, **settings)
    reduced = (
        ""
        if scale == "full"
        else f"1/{SHARE} of the blocks of KFAC-N and a step on each, KFAC-N-C on CIFAR-10 only"
    )
    name = named("cifar-lila", variant)
    return [
        Experiment(name, ("cifar-lila",), "Table 1, bottom", (0, 1, 2), tuple(configs), reduced)
    ]


if __name__ == "__main__":
    print_commands(__doc__, experiments, VARIANTS)
