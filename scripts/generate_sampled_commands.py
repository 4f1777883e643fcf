"""Commands of the slides' demonstration: CIFAR-100 and a normalised ResNet, by samples.

python scripts/generate_sampled_commands.py > scripts/sampled_commands.sh
"""

from commands import Experiment, Scale, print_commands, runs


def experiments(scale: Scale) -> list[Experiment]:
    """One run, which scores the network, its samples and the probit link side by side."""
    seeds = (0, 1, 2) if scale == "full" else (0,)
    reduced = "" if scale == "full" else "1 seed"
    name = "cifar100-sampled"
    return [Experiment(name, (name,), "slides", seeds, runs([name], scale, ["sampled"]), reduced)]


if __name__ == "__main__":
    print_commands(__doc__, experiments)
