"""The conditional marginal likelihood: the posterior of some data predicts the rest.

    log p(D_h | D_c) = log int p(D_h | w) p(w | D_c) dw
                    ~= log 1/S sum_s prod_{i in D_h} p(y_i | x_i, w_s),    w_s ~ p(w | D_c)

It equals log p(D) - log p(D_c): the evidence without what a poor prior costs on the first data
(Lotfi et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asdl_marglik import copied, evaluating, map_inputs, run
from laplace_marglik import checks
from laplace_marglik.batches import pairs
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Likelihood, likelihood_for
from laplace_marglik.variational.gaussian import Posterior


@dataclass(frozen=True)
class ConditionalScore:
    """log p(D_h | D_c) in nats, an estimate from draws of the weights, biased downwards.

    Args:
        total: the estimate, a sum over all held-out data.
        n_data: number of held-out data points.
        standard_error: over draws, to first order, or over splits; None for a single draw.
    """

    total: float
    n_data: int
    standard_error: float | None

    @staticmethod
    def mean(scores: Sequence[ConditionalScore]) -> ConditionalScore:
        """The average over splits of the data into D_c and D_h, with its standard error.

        Args:
            scores: one for each split; the error of a single one stays as it is.
        """
        if not scores:
            raise MarglikError("cannot average zero scores; make at least one split")
        totals = torch.tensor([s.total for s in scores], dtype=torch.float64)
        error = scores[0].standard_error
        if len(scores) > 1:
            error = float(totals.std()) / math.sqrt(len(scores))
        n_data = round(sum(s.n_data for s in scores) / len(scores))
        return ConditionalScore(float(totals.mean()), n_data, error)


@torch.no_grad()
def clml(
    model: nn.Module,
    likelihood: str | Likelihood | Callable[[Tensor, Tensor], Tensor],
    posterior: Posterior,
    loader: Iterable[tuple[Any, Tensor]],
    *,
    samples: int = 20,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> ConditionalScore:
    """The conditional marginal likelihood log p(D_h | D_c) of held-out data D_h.

    Args:
        model: the network.
        likelihood: "classification", "regression", a `Likelihood`, or a function log_prob(f, y).
        posterior: given the other data D_c, as `DiagonalLaplace(...).posterior()` or
            `DataEmphasizedELBO.fixed_posterior()`.
        loader: batches (x, y) of the held-out data, read once.
        samples: number S of draws of the weights.
        temperature: factor of the noise of the draws, w_s = m + temperature * noise.
        generator: source of the draws.
    """
    if samples < 1:
        raise MarglikError(f"samples must be at least 1, got {samples}")
    if not temperature >= 0:
        raise MarglikError(f"temperature must not be negative, got {temperature}")
    likelihood = likelihood_for(likelihood)
    device = next(iter(model.parameters())).device
    generator = generator or torch.Generator(device).manual_seed(torch.initial_seed())
    seeds = torch.randint(2**31, (samples,), generator=generator, device=generator.device).tolist()
    draws = torch.Generator(generator.device)
    sums = torch.zeros(samples, dtype=torch.float64)
    count = 0
    with evaluating(model):
        for x, y in pairs(loader):
            x = map_inputs(lambda t: t.to(device), x)
            y = checks.targets(y).to(device)
            for draw, seed in enumerate(seeds):  # the same weights for every batch
                weights = posterior.sample(draws.manual_seed(seed), temperature)
                f = run(model, copied(x), weights)
                sums[draw] += likelihood.tempered_log_prob(f.double(), y).sum().cpu()
            count += len(y)
    if not count:
        raise MarglikError("the loader is empty; it must yield (x, y) batches of held-out data")
    total = float(sums.logsumexp(0)) - math.log(samples)
    return ConditionalScore(total, count, _standard_error(sums))


def _standard_error(log_values: Tensor) -> float | None:
    """The standard error, to first order, of the log of the mean of exp(log_values) [S]."""
    if len(log_values) == 1:
        return None
    relative = torch.exp(log_values - log_values.max())
    return float(relative.std() / relative.mean()) / math.sqrt(len(log_values))
