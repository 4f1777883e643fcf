"""Bound grids that take a second."""

import shlex
from pathlib import Path

from ntkmarglik.programs.grid.config import parse

ROOT = Path(__file__).parents[2]
TINY = shlex.split(
    "--dataset digits --n-data 40 --model mlp --width 8 --epochs 2 --batch-size 20 --burnin 1 "
    "--frequency 1 --prior-steps 1 --aug-steps 1 --train-subset 10 --train-outputs 1 "
    "--aug-samples 2 --points 4 --subsets 10 20 0"
)
FEW = [
    *TINY,
    *shlex.split(
        "--points 2 --structures ntk diag --subsets 20 0 --roots fisher --partitions random"
    ),
]


def tiny(hyperparameter, *more):
    return parse([*TINY, "--hyperparameter", hyperparameter, *more])
