"""The conditional marginal likelihood, and the diagonal Laplace posterior it is measured with."""

import math

import pytest
import torch
from small_networks import GROUPS, X, Y, mlp, randn
from torch import nn
from torch.distributions import MultivariateNormal

from laplace_marglik import (
    ConditionalScore,
    DataEmphasizedELBO,
    DiagonalLaplace,
    FixedPosterior,
    Gaussian,
    GaussianPrior,
    LowRankCovariance,
    MarginalLikelihood,
    MarglikError,
    clml,
)

NOISE, PRECISION = 0.5, 2.0


def generator():
    return torch.Generator().manual_seed(3)


def log_evidence(phi, y):
    covariance = phi @ phi.mT / PRECISION + NOISE**2 * torch.eye(len(y)).double()
    return MultivariateNormal(torch.zeros(len(y)).double(), covariance).log_prob(y.flatten())


class Exact:
    """The full-covariance posterior of a linear regression."""

    def __init__(self, phi, y):
        precision = PRECISION * torch.eye(phi.shape[1]).double() + phi.mT @ phi / NOISE**2
        self.root = torch.linalg.cholesky(precision.inverse())
        self.mean = precision.inverse() @ phi.mT @ y.flatten() / NOISE**2

    def sample(self, generator, scale=1.0):
        xi = torch.randn(len(self.mean), generator=generator, dtype=torch.float64)
        return {"weight": (self.mean + scale * self.root @ xi).unsqueeze(0)}


def test_for_linear_regression_it_is_the_difference_of_two_evidences():
    phi = randn(20, 3)
    y = phi @ randn(3, 1, seed=1) + NOISE * randn(20, 1, seed=2)
    exact = log_evidence(phi, y) - log_evidence(phi[:16], y[:16])
    model, likelihood = nn.Linear(3, 1, bias=False).double(), Gaussian(NOISE)
    held_out = [(phi[16:18], y[16:18]), (phi[18:], y[18:])]
    posterior = Exact(phi[:16], y[:16])
    score = clml(model, likelihood, posterior, held_out, samples=1500, generator=generator())
    assert abs(score.total - exact) < 4 * score.standard_error < 0.4 and score.n_data == 4
    point = clml(model, likelihood, posterior, held_out, temperature=0.0)
    f = phi[16:] @ posterior.mean.unsqueeze(1)
    assert point.total == pytest.approx(likelihood.log_prob(f, y[16:]).sum().item())
    assert point.standard_error == 0


def test_with_one_weight_the_diagonal_posterior_is_exact():
    phi = randn(20, 1)
    y = 0.7 * phi + NOISE * randn(20, 1, seed=2)
    model = nn.Linear(1, 1, bias=False).double()
    exact = Exact(phi[:16], y[:16])
    with torch.no_grad():
        model.weight.fill_(exact.mean.item())
    prior = GaussianPrior(model, "scalar", PRECISION)
    laplace = DiagonalLaplace(model, Gaussian(NOISE), prior, [(phi[:16], y[:16])], curvature="ggn")
    torch.testing.assert_close(laplace.evidence().total, log_evidence(phi[:16], y[:16]))
    posterior = laplace.posterior()
    torch.testing.assert_close(posterior.deviation["weight"], exact.root)
    score = clml(
        model, Gaussian(NOISE), posterior, [(phi[16:], y[16:])], samples=1500, generator=generator()
    )
    assert (
        abs(score.total - (log_evidence(phi, y) - log_evidence(phi[:16], y[:16])))
        < 4 * score.standard_error
    )


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diagonal"])
def test_the_diagonal_evidence_is_that_of_the_engine_and_its_gradient_too(structure):
    model = mlp()
    prior = GaussianPrior(model, structure, 0.7)
    laplace = DiagonalLaplace(
        model, "classification", prior, [(X[:5], Y[:5]), (X[5:], Y[5:])], curvature="ggn"
    )
    engine = MarginalLikelihood(model, "classification", n_data=12, prior=prior, structure="diag")(
        X, Y
    )
    torch.testing.assert_close(laplace.evidence().total, engine.total)
    gradients = [
        torch.autograd.grad(e.total, prior.log_precision)[0] for e in (laplace.evidence(), engine)
    ]
    torch.testing.assert_close(*gradients)


def test_the_empirical_fisher_is_the_sum_of_squared_gradients():
    model = mlp()
    laplace = DiagonalLaplace(model, "classification", GaussianPrior(model), [(X, Y)])
    want = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(X, Y, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        for total, gradient in zip(
            want, torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            total += gradient.square()
    torch.testing.assert_close(list(laplace.curvature.values()), want)
    assert laplace.log_likelihood.item() == pytest.approx(
        -nn.functional.cross_entropy(model(X), Y, reduction="sum").item()
    )


def test_the_posterior_of_an_elbo_is_scored_and_nothing_else_moves():
    model = mlp()
    elbo = DataEmphasizedELBO(
        model, "classification", n_data=12, prior=GaussianPrior(model), sigma=0.1
    )
    before, weights = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    whole = clml(
        model, "classification", elbo.fixed_posterior(), [(X, Y)], samples=5, generator=generator()
    )
    split = clml(
        model,
        "classification",
        elbo.fixed_posterior(),
        [(X[:5], Y[:5]), (X[5:], Y[5:])],
        samples=5,
        generator=generator(),
    )
    assert whole.total == pytest.approx(split.total) and whole.total < 0
    assert torch.equal(torch.get_rng_state(), before) and all(
        map(torch.equal, weights, model.parameters())
    )


def test_splits_are_averaged():
    scores = [ConditionalScore(-3.0, 4, 0.1), ConditionalScore(-5.0, 4, 0.1)]
    mean = ConditionalScore.mean(scores)
    assert (mean.total, mean.n_data, mean.standard_error) == (
        -4.0,
        4,
        pytest.approx(math.sqrt(2) / math.sqrt(2)),
    )
    assert ConditionalScore.mean(scores[:1]) == scores[0]


def fixed():
    return FixedPosterior({"weight": torch.zeros(3, 4)}, {"weight": torch.ones(3, 4)})


def covariance_prior(model):
    own = {
        name: torch.ones_like(w) for name, w in model.named_parameters() if name.startswith("0.")
    }
    return GaussianPrior(model, groups=GROUPS, covariance={"0.*": LowRankCovariance(own)})


MISTAKES = {
    "samples": (
        lambda: clml(mlp(), "classification", fixed(), [(X, Y)], samples=0),
        "samples.*at least 1",
    ),
    "temperature": (
        lambda: clml(mlp(), "classification", fixed(), [], temperature=-1),
        "temperature.*-1",
    ),
    "empty loader": (lambda: clml(mlp(), "classification", fixed(), []), "loader is empty"),
    "names": (lambda: FixedPosterior({"a": X}, {"b": X}), "'a'.*'b'"),
    "no scores": (lambda: ConditionalScore.mean([]), "at least one split"),
    "curvature": (
        lambda: DiagonalLaplace(
            m := mlp(), "classification", GaussianPrior(m), [(X, Y)], curvature="kfac"
        ),
        "empirical or ggn.*'kfac'",
    ),
    "no data": (
        lambda: DiagonalLaplace(m := mlp(), "classification", GaussianPrior(m), []),
        "loader is empty",
    ),
    "covariance": (
        lambda: DiagonalLaplace(m := mlp(), "classification", covariance_prior(m), [(X, Y)]),
        "independent weights",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    call, words = MISTAKES[mistake]
    with pytest.raises(MarglikError, match=words):
        call()
