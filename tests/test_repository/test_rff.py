"""The random-feature demonstration: its closed forms against the library, and what it claims."""

import csv

import pytest
import rff_demo
import torch
from programs import ROOT, run
from rff_demo import (
    Fit,
    Problem,
    emphasised_elbo,
    exact_posterior,
    isotropic_posterior,
    log_evidence,
)
from torch import nn

from laplace_marglik import DataEmphasizedELBO, Gaussian, GaussianPrior

KAPPA = 2.4


@pytest.fixture
def case():
    problem = Problem.drawn(48)
    phi = problem.features(problem.x, torch.tensor(-0.3), torch.tensor(0.2))
    return phi, problem.y, torch.tensor(0.09, dtype=torch.float64)


def test_the_exact_posterior_makes_the_elbo_the_evidence(case):
    phi, y, s2 = case
    want = log_evidence(phi, y, s2)
    torch.testing.assert_close(
        emphasised_elbo(phi, y, s2, exact_posterior(phi, y, s2), 1.0), want, rtol=1e-9, atol=0
    )
    covariance = phi @ phi.mT + s2 * torch.eye(len(y)).double()
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(y)).double(), covariance)
    torch.testing.assert_close(normal.log_prob(y), want)
    assert emphasised_elbo(phi, y, s2, isotropic_posterior(phi, y, s2, 1.0), 1.0) < want


@pytest.mark.parametrize("kappa", [1.0, KAPPA])
def test_the_closed_form_posterior_is_stationary(case, kappa):
    phi, y, s2 = case
    q = isotropic_posterior(phi, y, s2, kappa)
    leaves = [q.mean.detach().requires_grad_(), q.sigma.detach().requires_grad_()]
    value = emphasised_elbo(phi, y, s2, rff_demo.Posterior(leaves[0], sigma=leaves[1]), kappa)
    for gradient in torch.autograd.grad(value, leaves):
        assert gradient.abs().max() < 1e-8


def test_the_library_estimates_the_same_number(case):
    phi, y, s2 = case
    q = isotropic_posterior(phi, y, s2, KAPPA)
    model = nn.Linear(48, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(q.mean)
    elbo = DataEmphasizedELBO(
        model,
        Gaussian(s2.sqrt().item(), learn_sigma=False),
        n_data=20,
        prior=GaussianPrior(model, "scalar", 1.0),
        kappa="auto",
        sigma=q.sigma.item(),
        variance="fixed",
        generator=torch.Generator().manual_seed(0),
    )
    assert elbo.kappa == KAPPA
    found = elbo.evaluate([(phi, y)], samples=500)
    assert (
        abs(found.de_elbo.total - emphasised_elbo(phi, y, s2, q, KAPPA))
        < 4 * found.de_elbo.standard_error
    )
    assert (
        abs(found.elbo.total - emphasised_elbo(phi, y, s2, q, 1.0)) < 4 * found.elbo.standard_error
    )


def test_predictions_interpolate_what_is_known(case):
    problem = Problem.drawn(48)
    zero = torch.tensor(0.0, dtype=torch.float64)
    fit = Fit("evidence", problem, zero, zero, torch.tensor(-4.0, dtype=torch.float64), None)
    mean, deviation = fit.predict(problem.x)
    far = fit.predict(torch.tensor([9.0], dtype=torch.float64))[1]
    assert (mean - problem.y).abs().max() < 0.3 and (deviation < far).all()


def test_the_script_draws_and_the_committed_table_says_what_the_readme_says(tmp_path):
    run(
        "scripts/rff_demo.py",
        "--features",
        64,
        "--steps",
        5,
        "--csv",
        tmp_path / "t.csv",
        "--plot",
        tmp_path / "p.png",
    )
    assert (
        len(list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))) == 5
        and (tmp_path / "p.png").stat().st_size > 5000
    )
    committed = (ROOT / "illustrations/data/rff_elbo.csv").read_text().splitlines()
    rows = {r["objective"]: r for r in csv.DictReader(committed)}
    train = {name: float(row["train_rmse"]) for name, row in rows.items()}
    assert train["elbo"] > 2 * train["evidence"]  # underfits
    assert (
        train["de-elbo, noise 0.1"] < train["elbo"] and train["de-elbo, noise 0.3"] < train["elbo"]
    )
    assert all(float(row["elbo"]) < float(row["log_evidence"]) for row in rows.values())
