"""Which epochs end with hyperparameter steps, and the optimiser of the weights."""

from __future__ import annotations

import torch
from torch import nn

from ntkmarglik.learn.config import Training


def hyper_epochs(training: Training) -> range:
    """The epochs (counted from 1) that end with a round of hyperparameter steps: `is_due`."""
    every = training.frequency
    first = -(-max(1, training.burnin) // every) * every
    return range(first, training.epochs + 1, every)


def weight_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Adam, or SGD with momentum and a tenth of the rate for scalar parameters (Fixup)."""
    if training.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), training.lr)
    parameters = list(model.parameters())
    scalars = [p for p in parameters if p.numel() == 1]
    others = [p for p in parameters if p.numel() > 1]
    groups = []
    if others:
        groups.append({"params": others, "factor": 1.0})
    if scalars:
        groups.append({"params": scalars, "factor": 0.1})
    return torch.optim.SGD(groups, training.lr, momentum=0.9)
