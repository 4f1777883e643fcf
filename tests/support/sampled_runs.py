"""Flags of runs with posterior samples."""

import shlex

from tiny_runs import TINY

FLAGS = [
    *TINY,
    *shlex.split(
        "--method sampled --samples 2 --solver-passes 3 --solver-tolerance 0.1 --ladder 3 --model "
        "mlp"
    ),
]
