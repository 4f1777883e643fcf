"""The ELBO and the data-emphasised ELBO: identities, closed forms, the collapse that kappa
prevents, and mistakes.
"""

import math

import pytest
import torch
from small_networks import GROUPS, X, Y, mlp, randn
from torch import nn
from torch.distributions import MultivariateNormal
from variational_objectives import low_rank, objective

from laplace_marglik import (
    Categorical,
    Gaussian,
    GaussianPrior,
    HeteroscedasticGaussian,
    LowRankCovariance,
    MarginalLikelihood,
    MarglikError,
)
from ntkmarglik.problem.data import load

# ---------------------------------------------------------------------------------------- objective


def drawn(elbo, sign=1.0):
    """The weights of the next draw, by the same generator."""
    state = elbo.generator.get_state()
    noise = [
        torch.randn(w.shape, generator=elbo.generator, dtype=w.dtype) for w in elbo.weights.values()
    ]
    elbo.generator.set_state(state)
    sigma = elbo.sigma.item()
    return {
        n: w + sign * sigma * xi for (n, w), xi in zip(elbo.weights.items(), noise, strict=True)
    }


@pytest.mark.parametrize("kappa, value", [(1, 1.0), ("auto", 43 / 12), (7.5, 7.5)])
@pytest.mark.parametrize("antithetic", [False, True])
def test_the_loss_is_minus_the_objective_per_emphasised_datum(kappa, value, antithetic):
    elbo = objective(kappa=kappa, sigma=0.3, antithetic=antithetic)
    draws = [drawn(elbo, sign) for sign in ((1.0, -1.0) if antithetic else (1.0,))]
    outputs = [torch.func.functional_call(elbo.model, w, (X,)) for w in draws]
    log_likelihood = -sum(
        nn.functional.cross_entropy(f, Y, reduction="sum") for f in outputs
    ) / len(outputs)
    j = value * log_likelihood - elbo.kl()
    assert elbo.kappa == value
    torch.testing.assert_close(elbo(X, Y), -j / (value * 12))


@pytest.mark.parametrize("posterior", ["scalar", "group", "diagonal"])
def test_gradients_are_those_of_finite_differences(posterior):
    elbo = objective(sigma=0.3, posterior=posterior, kappa="auto")
    state = elbo.generator.get_state()

    def loss(*_):
        elbo.generator.set_state(state)
        return elbo(X, Y)

    assert elbo.parameters() == [elbo.width.raw_sigma]
    assert torch.autograd.gradcheck(loss, [*elbo.parameters(), *elbo.weights.values()], atol=1e-6)


def test_the_mean_loss_of_batches_is_the_loss_of_all_and_evaluation_ignores_the_split():
    elbo, state = objective(sigma=0.2), torch.Generator().manual_seed(1).get_state()
    losses = []
    for batch in (slice(None), slice(0, 6), slice(6, 12)):
        elbo.generator.set_state(state)
        losses.append(elbo(X[batch], Y[batch]).item())
    assert losses[0] == pytest.approx((losses[1] + losses[2]) / 2)
    found = []
    for order in (
        torch.arange(12).split(12),
        torch.arange(12).split(5),
        torch.arange(11, -1, -1).split(4),
    ):
        elbo.generator.set_state(state)
        found.append(elbo.evaluate(((X[i], Y[i]) for i in order), samples=3))
    for other in found[1:]:
        assert other.elbo.total.item() == pytest.approx(found[0].elbo.total.item())
        assert other.de_elbo.standard_error == pytest.approx(found[0].de_elbo.standard_error)
    assert found[0].de_elbo.standard_error == pytest.approx(
        elbo.kappa * found[0].elbo.standard_error
    )


def test_bounds_of_a_classifier_are_ordered():
    """J_kappa <= ELBO <= log p(y), the last by quadrature over two weights."""
    model = nn.Linear(1, 2, bias=False).double()
    x, y = randn(7, 1), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    prior = GaussianPrior(model, "scalar", 1.0)
    elbo = objective(model, n_data=7, prior=prior, variance="fixed", sigma=0.5, kappa=3.0)
    optimizer = torch.optim.Adam([*model.parameters(), *elbo.parameters()], lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        elbo(x, y).backward()
        optimizer.step()
    grid = torch.linspace(-7, 7, 281, dtype=torch.float64)
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    f = torch.stack([a.unsqueeze(2) * x.flatten(), b.unsqueeze(2) * x.flatten()], -1)
    log_joint = (
        f.log_softmax(-1)[..., torch.arange(7), y].sum(-1)
        - (a**2 + b**2) / 2
        - math.log(2 * math.pi)
    )
    log_p = (log_joint.flatten().logsumexp(0) + 2 * math.log(14 / 280)).item()
    found = elbo.evaluate([(x, y)], samples=400)
    assert found.de_elbo.total < found.elbo.total < log_p + 4 * found.elbo.standard_error
    assert log_p - found.elbo.total < 2  # and not far below
    assert (found.elbo.status, found.de_elbo.status, found.kappa) == ("bound", "bound", 3.0)


def test_the_exact_posterior_has_the_evidence_of_linear_regression():
    """Orthogonal features: the exact posterior is independent, and its ELBO the evidence."""
    phi = torch.linalg.qr(randn(9, 4)).Q * torch.tensor([1.0, 2.0, 0.5, 1.5]).double()
    y, noise, precision = randn(9, 1, seed=5), 0.3, 2.0
    covariance = phi @ phi.mT / precision + noise**2 * torch.eye(9).double()
    log_p = MultivariateNormal(torch.zeros(9).double(), covariance).log_prob(y.flatten())
    model = nn.Linear(4, 1, bias=False).double()
    s = 1 / (precision + phi.square().sum(0) / noise**2)
    with torch.no_grad():
        model.weight.copy_(s * (phi.mT @ y).flatten() / noise**2)
    prior = GaussianPrior(model, "scalar", precision)
    options = {
        "n_data": 9,
        "prior": prior,
        "variance": "fixed",
        "posterior": "diagonal",
        "kappa": 1,
    }
    elbo = objective(model, Gaussian(noise, learn_sigma=False), **options)
    elbo.width.raw_sigma.data.copy_(torch.log(torch.expm1(s.sqrt())))
    found = elbo.evaluate([(phi, y)], samples=4000).elbo
    assert abs(found.total - log_p) < 4 * found.standard_error < 0.2
    expected = -0.5 * (y - phi @ model.weight.mT).square().sum() / noise**2 - 4.5 * math.log(
        2 * math.pi * noise**2
    )
    expected = expected - 0.5 * (s * phi.square().sum(0)).sum() / noise**2 - elbo.kl()
    torch.testing.assert_close(expected, log_p)  # the expectation in closed form


@pytest.fixture(scope="module")
def features():
    """400 random ReLU features of 100 digits, and of the test digits."""
    data = load("digits", "data", n_data=100)
    w = torch.randn(64, 400, generator=torch.Generator().manual_seed(0)) / 8
    b = torch.rand(400, generator=torch.Generator().manual_seed(1)) - 0.5
    x, x_test = ((x.flatten(1) @ w + b).relu() / 20**0.5 for x in (data.x_train, data.x_test))
    return x, data.y_train, x_test, data.y_test


@pytest.mark.parametrize("kappa, steps", [(1, 800), ("auto", 400)])
def test_with_more_weights_than_data_the_elbo_collapses_and_the_emphasised_one_does_not(
    features, kappa, steps
):
    x, y, x_test, y_test = features
    model = nn.Linear(400, 10, bias=False)
    nn.init.zeros_(model.weight)
    elbo = objective(
        model, n_data=100, prior=GaussianPrior(model, "scalar"), kappa=kappa, sigma=0.01
    )
    optimizer = torch.optim.Adam([*model.parameters(), *elbo.parameters()], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        elbo(x, y).backward()
        optimizer.step()
    accuracy = (elbo.predict(x_test).argmax(1) == y_test).float().mean()
    if kappa == 1:
        assert accuracy < 0.3 and elbo.kl() < 5
    else:
        assert elbo.kappa == 40 and accuracy > 0.8 and elbo.kl() > 500


# ------------------------------------------------------------------------------------ use in a loop


def test_predictions_by_the_mean_and_by_draws():
    elbo = objective(sigma=0.5)
    torch.testing.assert_close(elbo.predict(X), elbo.model(X).softmax(1).detach())
    drawn = elbo.predict(X, samples=5)
    assert not torch.equal(drawn, elbo.predict(X)) and torch.allclose(
        drawn.sum(1), torch.ones(12).double()
    )
    elbo.width.raw_sigma.data.fill_(-40)
    torch.testing.assert_close(elbo.predict(X, samples=2), elbo.predict(X))


def test_draws_are_seeded_resumed_and_leave_the_global_generator_and_the_model_alone():
    elbo, before = objective(generator=None), torch.get_rng_state()
    weights = [p.detach().clone() for p in elbo.model.parameters()]
    first = elbo(X, Y)
    state = elbo.state_dict()
    second = elbo(X, Y)
    elbo.evaluate([(X, Y)])
    elbo.predict(X, samples=2)
    assert torch.equal(torch.get_rng_state(), before) and first != second
    assert all(map(torch.equal, weights, elbo.model.parameters())) and elbo.model.training
    other = objective(sigma=3.0)
    other.load_state_dict(state)
    assert other(X, Y) == second


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.eta = nn.Parameter(torch.tensor(0.5).double())

    def forward(self, x):
        return torch.stack([x, x + self.eta], 1)


def test_augmentations_and_parameters_in_the_network_are_learned_by_the_loss():
    model, augment = mlp(), Doubled()
    elbo = objective(
        model,
        prior=GaussianPrior(model, hyper=["0.bias"]),
        augment=augment,
        hyper=["0.bias"],
        sigma=1e-6,
    )
    assert (
        elbo.parameters() == [elbo.width.raw_sigma, augment.eta, model[0].bias]
        and elbo.n_weights == 38
    )
    f = (model(X) + model(X + augment.eta)) / 2
    want = nn.functional.cross_entropy(f, Y) + elbo.kl() / (elbo.kappa * 12)
    loss = elbo(X, Y)
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-4)
    loss.backward()
    assert augment.eta.grad != 0 and model[0].bias.grad.abs().sum() > 0
    torch.testing.assert_close(elbo.outputs_of(X), f)


def test_batch_statistics_follow_training_and_not_evaluation():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    elbo = objective(model)
    elbo(X, Y)
    assert int(model[1].num_batches_tracked) == 1
    elbo.evaluate([(X, Y)])
    assert int(model[1].num_batches_tracked) == 1 and model.training


def test_groups_by_pattern_serve_every_estimator():
    model = mlp()
    prior = GaussianPrior(model, groups=GROUPS, precision=0.5)
    assert prior.group_names == list(GROUPS) and prior.precision.tolist() == pytest.approx(
        [0.5, 3.0]
    )
    same = GaussianPrior(model, {"0.*": "a", "2.*": "b"}, {"a": 0.5, "b": 3.0})
    totals = [
        MarginalLikelihood(model, "classification", n_data=12, prior=p)(X, Y).total
        for p in (prior, same)
    ]
    torch.testing.assert_close(*totals)
    other = GaussianPrior(model, groups=GROUPS)
    other.load_state_dict(prior.state_dict())
    assert torch.equal(other.precision, prior.precision)


# ----------------------------------------------------------------------------------------- mistakes


def with_covariance(covariance):
    model = mlp()
    return GaussianPrior(model, groups=GROUPS, covariance={"0.*": covariance})


def groups(**options):
    return GaussianPrior(mlp(), **options)


ONE = {"w": torch.ones(2)}
MISTAKES = {
    "learned noise": (
        lambda: objective(likelihood="regression"),
        "kappa = 3.58.*learn_sigma=False.*force",
    ),
    "outputs of variances": (
        lambda: objective(likelihood=HeteroscedasticGaussian(), kappa=2),
        "ill-posed",
    ),
    "temperature": (
        lambda: objective(likelihood=Categorical(1.0, learn_temperature=True)),
        "learned temperature",
    ),
    "kappa": (lambda: objective(kappa="D/N"), "positive number or 'auto'.*'D/N'"),
    "negative kappa": (lambda: objective(kappa=-1), "positive number.*-1"),
    "nan kappa": (lambda: objective(kappa=float("nan")), "positive number.*nan"),
    "posterior": (lambda: objective(posterior="full"), "scalar, group or diagonal.*'full'"),
    "sigma": (lambda: objective(sigma=0), "sigma must be positive.*0"),
    "variance": (lambda: objective(variance="learned"), "optimal or fixed.*'learned'"),
    "n_data": (lambda: objective(n_data=0), "n_data.*at least 1.*0"),
    "other prior": (
        lambda: objective(prior=GaussianPrior(nn.Linear(4, 3))),
        "no group for '0.weight'",
    ),
    "lengths": (lambda: objective()(X[:5], Y), r"as many inputs as targets.*\[5\].*12"),
    "nothing": (lambda: objective()(X[:0], Y[:0]), "at least one datum"),
    "short loader": (lambda: objective().evaluate([(X[:5], Y[:5])]), "5 data points.*n_data=12"),
    "samples": (lambda: objective().evaluate([(X, Y)], samples=0), "samples.*at least 1"),
    "no pattern": (
        lambda: groups(groups={"0.*": 1.0}),
        "exactly one pattern.*'2.weight' fits none",
    ),
    "two patterns": (
        lambda: groups(groups={"0.*": 1.0, "*": 2.0}),
        r"'0.weight' fits \['0.\*', '\*'\]",
    ),
    "idle pattern": (
        lambda: groups(groups={"*": 1.0, "head.*": None}),
        "'head.*' of groups fits no weight",
    ),
    "groups and structure": (
        lambda: groups(structure="scalar", groups=GROUPS),
        "either groups or a structure",
    ),
    "groups and precisions": (
        lambda: groups(precision={"0.*": 1.0}, groups=GROUPS),
        "must be a number",
    ),
    "bad precision": (lambda: groups(groups={"*": -1.0}), "must be positive"),
    "covariance of others": (
        lambda: with_covariance(LowRankCovariance(ONE)),
        r"group '0.\*'.*'0.weight'.*'w'",
    ),
    "covariance in curvature": (
        lambda: MarginalLikelihood(
            m := mlp(),
            "classification",
            n_data=12,
            prior=GaussianPrior(m, groups=GROUPS, covariance={"0.*": low_rank(m, "0.")}),
        ),
        "independent weights",
    ),
    "diagonal": (lambda: LowRankCovariance({"w": torch.zeros(2)}), "positive and finite.*'w'"),
    "no diagonal": (lambda: LowRankCovariance({}), "at least one weight"),
    "factor of others": (
        lambda: LowRankCovariance(ONE, {"v": torch.ones(2, 1)}),
        "same weights.*'v'.*'w'",
    ),
    "factor shape": (
        lambda: LowRankCovariance(ONE, {"w": torch.ones(3, 1)}),
        r"factor of 'w'.*\(2, 'K'\).*\(3, 1\)",
    ),
    "few deviations": (lambda: LowRankCovariance.swag(ONE, {"w": torch.ones(2, 1)}), "K >= 2"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    call, words = MISTAKES[mistake]
    with pytest.raises(MarglikError, match=words):
        call()


def test_a_learned_noise_is_allowed_with_kappa_one_or_by_force():
    assert objective(likelihood="regression", kappa=1).kappa == 1
    forced = objective(likelihood="regression", force=True)
    assert forced.likelihood.log_sigma in set(forced.parameters()) and forced.kappa == 43 / 12
    assert forced.evaluate([(X, randn(12, 3))]).de_elbo.status == "approximation"
