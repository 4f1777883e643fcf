"""How good predictions are: accuracy, log-likelihood and calibration."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

BINS = 15
BATCH = 1000


def metrics(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, mean log-likelihood and expected calibration error of logits [n, C] for labels y [n]."""
    log_p = logits.double().log_softmax(1)
    return {
        "accuracy": (log_p.argmax(1) == y).double().mean().item(),
        "log_likelihood": log_p.gather(1, y.unsqueeze(1)).mean().item(),
        "ece": calibration_error(log_p.exp(), y),
    }


def calibration_error(p: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: mean over data of |confidence - accuracy| within bins of equal confidence width."""
    if not p.isfinite().all():
        return math.nan
    confidence, prediction = p.max(1)
    correct = (prediction == y).double()
    index = (confidence * bins).long().clamp_max(bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=p.device).index_add_(0, index, correct - confidence)
    return (gaps.abs().sum() / len(y)).item()


def evaluate(outputs: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, batch: int = BATCH) -> dict[str, float]:
    """Metrics of a network's outputs, computed in batches without a graph."""
    with torch.no_grad():
        logits = torch.cat([outputs(part) for part in x.split(batch)])
    return metrics(logits, y)
