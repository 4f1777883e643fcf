"""When steps are taken, by which optimiser, and how large they are."""

from __future__ import annotations

import math

import torch
from torch import nn

from ntkmarglik.learn.config import Training


def cosine(step: int, total: int, first: float, last: float) -> float:
    """Learning rate of step 0 ... total - 1, falling from `first` to `last` along half a cosine."""
    progress = min(1.0, step / max(1, total - 1))
    falling = 1 + math.cos(math.pi * progress)  # from 2 to 0
    return last + (first - last) * falling / 2


def hyper_epochs(training: Training) -> list[int]:
    """The epochs (counted from 1) that end with a round of hyperparameter steps."""
    first = max(1, training.burnin)
    epochs = range(first, training.epochs + 1)
    return [epoch for epoch in epochs if epoch % training.frequency == 0]


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


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group its learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
