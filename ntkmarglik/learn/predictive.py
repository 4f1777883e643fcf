"""Predictions of the posterior beside those of the network itself."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace_marglik import MarginalLikelihood, MarglikError
from ntkmarglik.learn.evaluate import metrics, reliability
from ntkmarglik.runs.loggers import Metrics

# The kernel of all rows of a training set fits into no memory, and a few hundred of its rows leave
# variances far too large (MNIST-1000, test log-likelihood: 200 rows -0.74, 500 rows -0.62, 1,500
# rows -0.51, KFAC -0.51 in a fifteenth of the time).
INSTEAD = {"ntk": "kfac"}
SCORED = 2000  # test inputs at most, each of which takes a backward pass for every output
BATCH = 250


def posterior_scores(
    ml: MarginalLikelihood,
    structure: str,
    train: Iterable[tuple[Any, Tensor]],
    test: Iterable[tuple[Any, Tensor]],
    network: Tensor,
) -> Metrics:
    """Scores of predictions by the probit link, and how reliable they and the network's are.

    A posterior that does not fit into memory costs these numbers only: `probit_note` says why.

    ml: with the learned prior. structure: of the method's curvature, which is the posterior's, too,
    except for kernels (INSTEAD). train: all training data in batches. test: at most SCORED test
    data in batches. network: its own logits of these test data.
    """
    start = time.perf_counter()
    structure = INSTEAD.get(structure, structure)
    try:
        posterior = ml.posterior(train, structure=structure)
        pairs = [(posterior.predict(x), y) for x, y in test]
    except MarglikError as error:
        return {"probit_note": str(error)}
    p, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    p = p.clamp_min(torch.finfo(p.dtype).tiny)
    scores = metrics(p.log(), y)
    return {
        **{f"probit_test_{name}": value for name, value in scores.items()},
        "probit_test_size": len(y),
        "probit_structure": structure,
        "reliability": {
            "network": reliability(network.double().softmax(1), y),
            "posterior": reliability(p, y),
        },
        "seconds_predict": time.perf_counter() - start,
    }
