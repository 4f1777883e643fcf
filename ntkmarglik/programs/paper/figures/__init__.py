"""Figures by name: each draws csv files of a folder into a picture."""

from collections.abc import Callable
from pathlib import Path

from ntkmarglik.programs.paper.figures import (
    alternatives,
    bound_slack,
    conditioned,
    finetune,
    methods,
    pareto,
    sampled,
    sampled_noise,
    scaling,
    scheme,
    subsets,
    traces,
)

FIGURES: dict[str, Callable[[Path, Path], None]] = {
    name: draw
    for module in (
        alternatives,
        methods,
        scheme,
        bound_slack,
        conditioned,
        traces,
        pareto,
        subsets,
        scaling,
        sampled,
        sampled_noise,
        finetune,
    )
    for name, draw in module.FIGURES.items()
}
# figures of the paper
NUMBERS = {
    "1": "pareto_lila",
    "2": "partitions",
    "3": "bounds_parametric",
    "4": "bounds_ntk",
    "5": "bounds_doubly",
    "6": "bounds_single",
    "12": "bounds_grouped",
    "7": "subsets",
    "8": "traces_lila",
    "9": "traces_lila_doubly",
    "10": "traces_prior",
    "11": "traces_prior_doubly",
    "13": "pareto_prior",
    "14": "subsets_evidence",
    "15": "subsets",
    "16": "subsets_accuracy",
}
