"""Commands of Table 2: prior precisions and invariances of a ResNet-50 on TinyImageNet.

python scripts/generate_tiny_commands.py > scripts/tiny_commands.sh
"""

from commands import Experiment, Scale, print_commands, runs


def experiments(scale: Scale) -> list[Experiment]:
    """Both blocks of the table, and Augerino, whose number the paper takes from elsewhere."""
    prior = runs(["tiny"], scale, ("MAP", "NTK-400-1", "KFAC-400-1"))
    lila = ["tiny-lila"]
    invariance = (
        *runs(lila, scale, ["Augerino"]),
        *runs(lila, scale, ["NTK-70-1"], columns="iid"),
        *runs(lila, scale, ["KFAC-60-1"]),
    )
    return [
        Experiment("tiny", ("tiny",), "Table 2, top", (0, 1, 2), prior),
        Experiment("tiny-lila", ("tiny-lila",), "Table 2, bottom", (0, 1, 2), invariance),
    ]


if __name__ == "__main__":
    print_commands(__doc__, experiments)
