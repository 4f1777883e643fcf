"""The conditional marginal likelihood: how well the posterior of some data predicts the rest (Lotfi
et al. 2022).

log p(D_h | D_c) = log int p(D_h | w) p(w | D_c) dw  ~=  log 1/S sum_s prod_{i in D_h} p(y_i | x_i,
w_s)

It equals log p(D) - log p(D_c), without the part of the evidence that a poor prior costs on the
first data.
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
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Likelihood, likelihood_for
from laplace_marglik.variational.gaussian import Posterior


@dataclass(frozen=True)
class ConditionalScore:
    """log p(D_h | D_c) in nats. The estimate is biased downwards by the few draws, and its error is
    of first order.
    """

    total: float
    n_data: int  # held-out data points
    standard_error: float | None

    @staticmethod
    def mean(scores: Sequence[ConditionalScore]) -> ConditionalScore:
        """The average over several splits of the data into D_c and D_h, with the standard error
        over splits.
        """
        if not scores:
            raise MarglikError("cannot average zero scores; make at least one split")
        totals = torch.tensor([s.total for s in scores], dtype=torch.float64)
        error = (
            float(totals.std()) / math.sqrt(len(scores))
            if len(scores) > 1
            else scores[0].standard_error
        )
        return ConditionalScore(
            float(totals.mean()), round(sum(s.n_data for s in scores) / len(scores)), error
        )


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
    """The conditional marginal likelihood of held-out data.

    posterior: of the other data, as `DiagonalLaplace(...).posterior()` or
    `DataEmphasizedELBO.fixed_posterior()`. loader: the held-out data, read once. temperature:
    multiplies the noise of the draws, w_s = m + temperature * noise.
    """
    if samples < 1:
        raise MarglikError(f"samples must be at least 1, got {samples}")
    if not temperature >= 0:
        raise MarglikError(f"temperature must not be negative, got {temperature}")
    likelihood = likelihood_for(likelihood)
    device = next(iter(model.parameters())).device
    generator = generator or torch.Generator(device).manual_seed(torch.initial_seed())
    seeds = torch.randint(2**31, (samples,), generator=generator, device=generator.device).tolist()
    own = torch.Generator(generator.device)
    sums = torch.zeros(samples, dtype=torch.float64)
    count = 0
    scale = likelihood.inverse_temperature.item()
    with evaluating(model):
        for x, y in checks.pairs(loader):
            x, y = map_inputs(lambda t: t.to(device), x), checks.targets(y).to(device)
            for draw, seed in enumerate(seeds):  # the same weights for every batch
                f = run(model, copied(x), posterior.sample(own.manual_seed(seed), temperature))
                sums[draw] += scale * likelihood.log_prob(f.double(), y).sum().cpu()
            count += len(y)
    if not count:
        raise MarglikError("the loader is empty; it must yield (x, y) batches of held-out data")
    relative = torch.exp(sums - sums.max())
    error = float(relative.std() / relative.mean()) / math.sqrt(samples) if samples > 1 else None
    return ConditionalScore(float(sums.logsumexp(0)) - math.log(samples), count, error)
