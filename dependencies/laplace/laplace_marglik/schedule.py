"""When rounds of hyperparameter steps come, and how large the steps are."""

from __future__ import annotations

import math

import torch


def is_due(epoch: int, burn_in: int, every: int) -> bool:
    """Whether an epoch ends with a round of hyperparameter steps.

    Args:
        epoch: counted from 1.
        burn_in: epochs before the first round.
        every: epochs from one round to the next.
    """
    return epoch >= max(1, burn_in) and epoch % every == 0


def cosine(step: int, total: int, first: float, last: float) -> float:
    """Learning rate that falls from `first` to `last` along half a cosine.

    Args:
        step: from 0 to total - 1.
        total: number of steps.
        first: rate of the first step.
        last: rate of the last step.
    """
    progress = min(1.0, step / max(1, total - 1))
    falling = 1 + math.cos(math.pi * progress)  # from 2 to 0
    return last + (first - last) * falling / 2


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group its learning rate, times the group's own "factor" if it has one.

    Args:
        optimizer: whose rate.
        rate: of a group without a factor.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
