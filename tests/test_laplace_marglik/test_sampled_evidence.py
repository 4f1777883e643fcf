"""The evidence from samples: the ladder of precisions against exact determinants, and against the
bounds.
"""

import math

import pytest
import torch
from exact_posterior import ROUGH, Exact, N, log_evidence

from laplace_marglik import Gaussian, MarginalLikelihood, MarglikError, Partition
from laplace_marglik.posterior.sampled.ladder import bracket, integral, rungs


def test_the_ladder_brackets_the_log_determinant():
    exact = Exact()
    root = exact.a().detach().rsqrt()
    values = torch.linalg.eigvalsh(root.unsqueeze(1) * exact.m * root)
    values = values.clamp_min(0)
    truth = torch.log1p(values).sum().item()
    widths = []
    for count in (5, 13, 40):
        factors = rungs(values.sum().item(), count)
        gammas = [(values / (values + t)).sum().item() for t in factors]
        low, high = bracket(factors, gammas, values.sum().item())
        assert low <= truth <= high
        assert low <= integral(factors, gammas, values.sum().item()) <= high
        widths.append(high - low)
        left = sum(g * math.log(factors[1]) for g in gammas[:-1])
        assert high <= left + values.sum().item() / factors[-1] + 1e-9  # no wider than Riemann sums
    assert widths[0] > widths[1] > widths[2]
    assert abs(integral(factors, gammas, values.sum().item()) - truth) < 0.02 * truth
    with pytest.raises(MarglikError, match="at least 2"):
        rungs(3.0, 1)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_evidence_is_that_of_the_exact_estimator(kind):
    exact = Exact(kind)
    posterior = exact.sampled(60, ROUGH).fit(exact.loader)
    found = posterior.log_evidence(exact.loader, at="weights")
    ml = MarginalLikelihood(
        exact.model, exact.likelihood, n_data=N, prior=exact.prior, structure="full"
    )
    truth = ml(exact.x, exact.y)
    assert truth.status == "exact" and found.status == "approximation"
    assert found.log_likelihood.item() == pytest.approx(truth.log_likelihood.item())
    assert found.scatter.item() == pytest.approx(truth.scatter.item())
    assert (
        abs(found.total - truth.total).item()
        < 4 * found.standard_error + 0.01 * truth.log_det_ratio.item()
    )
    room = 4 * found.standard_error
    assert found.bracket[0] - room < truth.total.item() < found.bracket[1] + room
    assert found.bracket[0] < found.total.item() < found.bracket[1]
    at_mode = posterior.log_evidence(exact.loader)
    assert at_mode.total > found.total  # the linear model's mode fits its own loss better
    if isinstance(exact.likelihood, Gaussian):
        expected = log_evidence(exact, exact.prior.log_precision).item()
        assert at_mode.total.item() == pytest.approx(expected, abs=4 * at_mode.standard_error + 0.5)


def test_blocks_bound_what_samples_estimate():
    """The bound of a partition lies below the sampled evidence of the same weights and prior."""
    exact = Exact()
    ml = MarginalLikelihood(
        exact.model,
        exact.likelihood,
        n_data=N,
        prior=exact.prior,
        structure="ntk",
        outputs=1,
        root="fisher",
    )
    blocks = [ml(exact.x[b.index], exact.y[b.index], block=b) for b in Partition(N, 3, 10, 1)]
    bound = torch.stack([e.total for e in blocks]).mean().item()
    found = exact.sampled(30, ROUGH).fit(exact.loader).log_evidence(exact.loader, "weights")
    assert bound < found.total.item() - 3 * found.standard_error
