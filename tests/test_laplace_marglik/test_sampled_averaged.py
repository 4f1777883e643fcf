"""Curvature averaged over samples: against matrices, and where the Laplace approximation does not
fit its own data.
"""

import pytest
import torch
from exact_posterior import ROUGH, Exact
from torch import nn

from laplace_marglik import GaussianPrior, MarglikError, SampledLaplace
from laplace_marglik.posterior.sampled import ConjugateGradients
from ntkmarglik.learn.evaluate import joint_log_likelihood

K = 60


def averaged_curvature(exact, deviations):
    """J^T mean_j Lambda(f + d_j) J of deviations d [m, n, C] as a matrix, temperature 0.8."""
    p = (exact.f + deviations).softmax(2)
    mean = torch.diag_embed(p.mean(0)) - torch.einsum("mnc,mnd->ncd", p, p) / len(p)
    return torch.einsum("ncp,ncd,ndq->pq", exact.j, mean / 0.8, exact.j)


@pytest.fixture(scope="module")
def fitted():
    exact = Exact(precision=0.05)
    return exact, exact.sampled(K, ConjugateGradients(1e-3), curvature="averaged").fit(exact.loader)


def test_products_and_noise_have_the_mean_curvature(fitted):
    exact, posterior = fitted
    system, z = posterior.system(exact.loader), torch.randn(3, len(exact.w), dtype=torch.float64)
    m = averaged_curvature(exact, torch.cat(list(system.deviations.values()), 1))
    torch.testing.assert_close(system.curvature(z), z @ m)
    u = system.data_noise(exact.w[:1])
    scale = m.diagonal().sqrt()
    assert ((u.mT @ u / K - m) / (scale.unsqueeze(0) * scale.unsqueeze(1))).abs().max() < 6 / K**0.5
    for noise_in, target in (("prior", u), ("data", torch.zeros_like(u))):
        parts = [
            system.gradient(z, batch, range(3), target[:3], noise_in) for batch in system.batches()
        ]
        expected = z @ (m + torch.diag(exact.a().detach())) - u[:3]
        torch.testing.assert_close(torch.stack(parts).mean(0), expected)


def test_samples_are_a_fixed_point(fitted):
    """Their own covariance is the inverse of A + J^T E[Lambda] J, the expectation over
    themselves.
    """
    exact, posterior = fitted
    z = posterior.weight_samples
    own = averaged_curvature(exact, torch.einsum("ncp,kp->knc", exact.j, z)) + torch.diag(
        exact.a().detach()
    )
    white = z @ torch.linalg.cholesky(own)
    assert white.square().mean().item() == pytest.approx(1, abs=0.08)
    laplace = exact.sampled(K, ROUGH).fit(exact.loader)
    other = laplace.weight_samples @ torch.linalg.cholesky(own)
    # an undecided network: the curvature is largest at its outputs
    assert other.square().mean().item() < 0.92


def test_the_evidence_is_a_higher_bound_than_that_of_the_laplace_posterior(fitted):
    """E_q log p - KL(q || prior), by matrices, of the Gaussian of the samples and of the Laplace
    approximation.
    """
    exact, posterior = fitted
    found = posterior.log_evidence(exact.loader, at="weights", rungs_=13)
    m = averaged_curvature(
        exact, torch.cat(list(posterior.system(exact.loader).deviations.values()), 1)
    )
    a, values = exact.a().detach(), []
    for h in (m + torch.diag(a), exact.h):
        root = torch.linalg.cholesky(h)
        noise = torch.randn(
            len(a), 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        outputs = exact.f + torch.einsum(
            "ncp,pk->knc", exact.j, torch.linalg.solve_triangular(root.mT, noise, upper=True)
        )
        expected = (
            sum(exact.likelihood.log_prob(f, exact.y).sum() for f in outputs) / len(outputs) / 0.8
        )
        trace, log_det = (
            (h.inverse().diagonal() * a).sum() - len(a),
            2 * root.diagonal().log().sum() - a.log().sum(),
        )
        values.append((expected - 0.5 * ((a * exact.w**2).sum() + trace + log_det)).item())
    assert (
        abs(found.total.item() - values[0])
        < 4 * found.standard_error + 0.02 * found.log_det_ratio.item()
    )
    assert values[0] > values[1]


def test_a_gaussian_likelihood_has_nothing_to_average():
    exact = Exact("regression")
    averaged = exact.sampled(4, ROUGH, curvature="averaged").fit(exact.loader)
    torch.testing.assert_close(
        averaged.system(exact.loader).product(exact.w[None]), exact.w[None] @ exact.h
    )
    with pytest.raises(MarglikError, match="outputs or averaged"):
        exact.sampled(2, curvature="mean")


def test_samples_of_a_saturated_network_fit_its_data_only_with_averaged_curvature():
    """Separable data, trained until p is nearly 0 or 1: a Laplace sample contradicts the training
    labels.
    """
    torch.manual_seed(0)
    x = torch.randn(60, 5)
    y = (x @ torch.randn(5, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(500):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    correct = {}
    for curvature in ("outputs", "averaged"):
        posterior = SampledLaplace(
            model,
            "classification",
            n_data=60,
            prior=GaussianPrior(model, "scalar", 0.3),
            samples=16,
            together=16,
            curvature=curvature,
            solver=ConjugateGradients(0.01, 300),
            generator=torch.Generator().manual_seed(0),
        ).fit([(x, y)])
        correct[curvature] = (posterior.sample_logits(x).argmax(2) == y).double().mean().item()
    assert (model(x).argmax(1) == y).all()
    assert correct["outputs"] < 0.75 and correct["averaged"] > 0.9


def test_joint_predictions_reward_samples_that_agree_with_themselves():
    generator = torch.Generator().manual_seed(0)
    one_mind = torch.tensor(
        [[0.9, 0.9], [0.1, 0.1]]
    ).log()  # both samples: the same about both inputs
    torn = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    joint = [joint_log_likelihood(log_p, generator) for log_p in (one_mind, torn)]
    assert joint[0] == pytest.approx(
        torch.tensor([0.9**10, 0.1**10]).mean().log().item() / 10, rel=1e-4
    )
    assert joint[0] > joint[1]
    network = torch.tensor([[0.5, 0.5]]).log()
    assert joint_log_likelihood(network, generator) == pytest.approx(-0.6931, rel=1e-3)
