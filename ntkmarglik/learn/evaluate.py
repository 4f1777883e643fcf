"""How good predictions are: accuracy, log-likelihood and calibration."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laplace_marglik import Ranks
from ntkmarglik.learn.distributed import in_turn

BINS = 15
BATCH = 1000
PAIRS = 10_000  # of inputs in joint predictions
REPEATS = 10  # inputs drawn from each pair


def metrics(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, mean log-likelihood and expected calibration error of logits [n, C] for labels y
    [n].
    """
    log_p = logits.double().log_softmax(1)
    correct = log_p.argmax(1) == y
    log_likelihoods = log_p.gather(1, y.unsqueeze(1))
    return {
        "accuracy": correct.double().mean().item(),
        "log_likelihood": log_likelihoods.mean().item(),
        "ece": calibration_error(log_p.exp(), y),
    }


def joint_log_likelihood(log_p: Tensor, generator: torch.Generator, pairs: int = PAIRS) -> float:
    """Mean log-likelihood per input of REPEATS inputs together, each drawn from one of two, over
    random pairs.

    log_p [k, n]: log-likelihood of each label under each of k samples; log 1/k sum_j prod_i p_j(y_i
    | x_i) rewards samples that agree with themselves about inputs that depend on each other (dyadic
    sampling, Osband et al. 2022).
    """
    k, n = log_p.shape
    first, second = torch.randint(n, (2, pairs), generator=generator).to(log_p.device)
    draws_first = torch.rand(pairs, REPEATS, generator=generator) < 0.5
    times = draws_first.sum(1).to(log_p.device)
    together = times * log_p[:, first] + (REPEATS - times) * log_p[:, second]
    joint = torch.logsumexp(together, 0) - math.log(k)
    return (joint / REPEATS).mean().item()


def calibration_error(p: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: mean over data of |confidence - accuracy| within bins of equal
    confidence width.
    """
    if not p.isfinite().all():
        return math.nan
    _, confidence, correct = _binned(p, y, bins)
    return ((correct - confidence).abs().sum() / len(y)).item()


def reliability(p: Tensor, y: Tensor, bins: int = BINS) -> list[list[float]]:
    """Mean confidence, accuracy and share of the data, of every bin that has any."""
    if not p.isfinite().all():
        return []
    count, confidence, correct = _binned(p, y, bins)
    used = count > 0
    rows = [confidence[used] / count[used], correct[used] / count[used], count[used] / len(y)]
    return torch.stack(rows, 1).tolist()


def _binned(p: Tensor, y: Tensor, bins: int) -> Tensor:
    """Number of data, sums of their confidence and of right answers [3, bins], by confidence."""
    confidence, prediction = p.max(1)
    correct = (prediction == y).double()
    index = (confidence * bins).long().clamp_max(bins - 1)
    sums = torch.zeros(3, bins, dtype=torch.float64, device=p.device)
    values = torch.stack([torch.ones_like(correct), confidence.double(), correct])
    return sums.index_add_(1, index, values)


def evaluate(
    outputs: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    batch: int = BATCH,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Metrics of a network's outputs, computed in batches without a graph; ranks take batches in
    turn.
    """
    with torch.no_grad():
        logits = in_turn(outputs, x.split(batch), ranks)
    return metrics(logits, y)
