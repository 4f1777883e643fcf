"""Sampled linearised Laplace in use: predictions, normalised networks, states, errors, and a digits
network.
"""

import math
import os

import pytest
import torch
from exact_posterior import EXACT, Exact, N
from torch import nn

from laplace_marglik import GaussianPrior, MarginalLikelihood, MarglikError, Poisson, SampledLaplace
from laplace_marglik.likelihood import FromLogProb
from laplace_marglik.posterior.sampled import ConjugateGradients, Sgd
from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import build


@pytest.fixture(scope="module")
def fitted():
    exact = Exact()
    return exact, exact.sampled(1200, ConjugateGradients(tolerance=1e-3)).fit(exact.loader)


# -------------------------------------------------------------------------------------- predictions


def test_outputs_vary_as_the_posterior_says(fitted):
    exact, posterior = fitted
    samples = posterior.sample_logits(exact.x)
    expected = torch.einsum("ncp,kp->knc", exact.j, posterior.weight_samples) + exact.f
    torch.testing.assert_close(samples, expected)
    covariance = torch.einsum("ncp,pq,ndq->ncd", exact.j, exact.h.inverse(), exact.j)
    size = covariance.diagonal(dim1=1, dim2=2).sqrt()
    error = (posterior.covariance(exact.x) - covariance) / (size.unsqueeze(1) * size.unsqueeze(2))
    assert error.abs().max() < 0.2
    assert (samples.mean(0) - exact.f).abs().max() < 0.2 * size.max()


def test_predictions_average_or_shrink(fitted):
    exact, posterior = fitted
    samples = posterior.sample_logits(exact.x)
    mc, scaled = posterior.predict(exact.x), posterior.predict(exact.x, kind="probit")
    torch.testing.assert_close(mc, samples.softmax(2).mean(0))
    variance = (samples - exact.f).square().mean(0)
    torch.testing.assert_close(scaled, (exact.f / (1 + math.pi / 8 * variance).sqrt()).softmax(1))
    plain = exact.f.softmax(1).amax(1)
    assert (mc.amax(1) < plain + 0.02).all() and mc.amax(
        1
    ).mean() < plain.mean()  # less sure than the mode
    torch.testing.assert_close(mc, scaled, atol=0.12, rtol=0)


def test_joint_predictions_know_that_inputs_depend_on_each_other(fitted):
    exact, posterior = fitted
    x, y = exact.x[:1].repeat(4, 1), exact.y[:1].repeat(4)
    p = posterior.sample_logits(x[:1]).softmax(2)[:, 0, y[0]]
    assert posterior.joint_log_prob(x, y).item() == pytest.approx(p.pow(4).mean().log().item())
    # four times the same input is not four inputs
    assert posterior.joint_log_prob(x, y) > 4 * p.mean().log()


def test_regression_predicts_the_mean():
    exact = Exact("regression")
    posterior = exact.sampled(4).fit(exact.loader)
    torch.testing.assert_close(posterior.predict(exact.x, "probit"), exact.f)
    torch.testing.assert_close(posterior.predict(exact.x), posterior.sample_logits(exact.x).mean(0))


def quartic(f, y):
    return -(f - y).pow(4).sum(1) - f.square().sum(1)


@pytest.mark.parametrize("likelihood", [Poisson(), FromLogProb(quartic)])
def test_any_likelihood_can_be_sampled(likelihood):
    exact = Exact("regression")
    exact.y = exact.y.abs().round()
    posterior = SampledLaplace(
        exact.model,
        likelihood,
        n_data=N,
        prior=exact.prior,
        samples=2,
        together=2,
        solver=EXACT,
        generator=torch.Generator().manual_seed(0),
    ).fit([(exact.x, exact.y)])
    curvature = likelihood.hessian(exact.f, exact.y)
    h = torch.einsum("ncp,ncd,ndq->pq", exact.j, curvature, exact.j) + torch.diag(
        exact.a().detach()
    )
    z = torch.randn(3, len(exact.w), dtype=torch.float64)
    torch.testing.assert_close(posterior.system([(exact.x, exact.y)]).product(z), z @ h)
    with pytest.raises(MarglikError, match="kind='mc'"):
        posterior.predict(exact.x, "probit")


# ----------------------------------------------------------------------------------- other networks


def test_normalised_networks_without_their_scales():
    data = load("digits", "data", n_data=16)
    model = build("resnet_norm", data.input_shape, data.n_classes, depth=10, width=2)
    prior = GaussianPrior(model, "scalar", precision=10.0)
    posterior = SampledLaplace(
        model,
        "classification",
        n_data=16,
        prior=prior,
        samples=2,
        exclude=["*norm*"],
        scaling="g-prior",
        solver=ConjugateGradients(tolerance=0.1, max_iterations=100),
        generator=torch.Generator().manual_seed(0),
    )
    loader = [(data.x_train, data.y_train)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    posterior.fit(loader).update_prior(loader)
    included = [p for name, p in model.named_parameters() if "norm" not in name]
    assert (
        posterior.layout.size
        == sum(p.numel() for p in included)
        < sum(p.numel() for p in model.parameters())
    )
    assert posterior.predict(data.x_test[:7]).sum(1).allclose(torch.ones(7), atol=1e-5)
    assert prior.precision.item() != 10.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_groups_of_excluded_weights_keep_their_precision():
    exact = Exact()
    posterior = exact.sampled(2, ConjugateGradients(tolerance=1e-2), exclude=["2.*"]).fit(
        exact.loader
    )
    posterior.update_prior(exact.loader)
    assert exact.prior.precision[2:].tolist() == pytest.approx([0.7, 0.7])
    assert (exact.prior.precision[:2] - 0.7).abs().min() > 1e-3
    assert posterior.weight_samples.shape == (2, 25)


def test_it_is_left_as_it_was_and_repeats_itself():
    exact = Exact()
    exact.model.train()
    first, second = (exact.sampled(3, seed=5).fit(exact.loader).weight_samples for _ in range(2))
    other = exact.sampled(3, seed=6).fit(exact.loader).weight_samples
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert exact.model.training and all(
        p.requires_grad and p.grad is None for p in exact.model.parameters()
    )


def test_a_stored_state_continues_with_the_same_numbers():
    exact = Exact()
    rough = ConjugateGradients(tolerance=1e-2)
    posterior = exact.sampled(3, rough, scaling="g-prior").fit(exact.loader)
    state = {
        name: v.clone() if isinstance(v, torch.Tensor) else v
        for name, v in posterior.state_dict().items()
    }
    with torch.no_grad():
        exact.model[0].weight += 0.01
    other = exact.sampled(3, rough, seed=99, scaling="g-prior")
    other.load_state_dict(state)
    posterior.refit(exact.loader), other.refit(exact.loader)
    assert torch.equal(posterior.weight_samples, other.weight_samples) and torch.equal(
        posterior.mode, other.mode
    )
    with pytest.raises(MarglikError, match="expected 2 samples"):
        exact.sampled(2).load_state_dict(state)


# ------------------------------------------------------------------------------------------- errors


def test_what_cannot_work_is_refused():
    exact = Exact()
    for options, message in (
        ({"samples": 0}, "samples must be a whole number of at least 1"),
        ({"solver": "newton"}, "'cg', 'sgd'"),
        ({"scaling": "unit"}, "none or g-prior"),
        ({"exclude": ["norm*"]}, "fits no weight"),
        ({"exclude": ["*"]}, "leaves no weights"),
    ):
        with pytest.raises(MarglikError, match=message):
            exact.sampled(**{"samples": 2, "together": 1, **options})
    for settings in (
        {"steps": 0},
        {"steps": 2.5},
        {"tolerance": 0.0},
        {"momentum": 1.0},
        {"averaging": 1.0},
        {"decay": 2.0},
        {"noise_in": "both"},
        {"clip": -1},
        {"rate": math.nan},
    ):
        with pytest.raises(MarglikError, match=next(iter(settings))):
            Sgd(**settings)
    posterior = exact.sampled(2, ConjugateGradients(tolerance=1e-2))
    with pytest.raises(MarglikError, match="call fit"):
        posterior.predict(exact.x)
    with pytest.raises(MarglikError, match="call fit"):
        posterior.effective_dimension()
    with pytest.raises(MarglikError, match="15 data points, but n_data=30"):
        posterior.fit(exact.loader[:1])
    with pytest.raises(MarglikError, match="read only once"):
        posterior.fit(iter(exact.loader))
    with pytest.raises(MarglikError, match="40 rows"):
        exact.sampled(2, ConjugateGradients(rows=40)).fit(exact.loader)
    posterior.fit(exact.loader)
    for call in (
        lambda: posterior.predict(exact.x, "exact"),
        lambda: posterior.effective_dimension("output"),
    ):
        with pytest.raises(MarglikError, match="must be"):
            call()
    with torch.no_grad():
        exact.model[0].weight += 1
    with pytest.raises(MarglikError, match="call refit"):
        posterior.predict(exact.x)
    with pytest.raises(MarglikError, match="smaller one"):
        exact.sampled(2, Sgd(rate=100.0, clip=math.inf)).fit(exact.loader)


# ------------------------------------------------------------------------------------------- digits


@pytest.mark.slow
def test_digits_network():
    """P = 4218, N = 400: samples against the dense kernel of all rows."""
    data = load("digits", "data", n_data=400)
    model = build("cnn", data.input_shape, data.n_classes)
    prior = GaussianPrior(model, "scalar", precision=1.0)
    ml = MarginalLikelihood(model, "classification", n_data=400, prior=prior, structure="full")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        optimizer.zero_grad()
        ml.map_loss(data.x_train, data.y_train).backward()
        optimizer.step()
    loader = list(zip(data.x_train.split(100), data.y_train.split(100), strict=True))
    posterior = SampledLaplace(
        model,
        "classification",
        n_data=400,
        prior=prior,
        samples=8,
        generator=torch.Generator().manual_seed(0),
    ).fit(loader)
    assert max(posterior.diagnostics()["residuals"]) < 2e-3
    truth = ml(data.x_train, data.y_train)
    (slope,) = torch.autograd.grad(truth.log_det_ratio, prior.log_precision)  # - gamma
    found = posterior.effective_dimension()
    assert abs(found.total + slope.item()) < 4 * found.standard_error
    evidence = posterior.log_evidence(loader, at="weights")
    assert (
        abs(evidence.total - truth.total).item()
        < 4 * evidence.standard_error + 0.02 * truth.log_det_ratio.item()
    )
    room = 3 * evidence.standard_error
    assert evidence.bracket[0] - room < truth.total.item() < evidence.bracket[1] + room
    averaged = SampledLaplace(
        model,
        "classification",
        n_data=400,
        prior=prior,
        samples=8,
        curvature="averaged",
        generator=torch.Generator().manual_seed(0),
    ).fit(loader)
    laplace, better = (
        p.predict(data.x_test).gather(1, data.y_test.unsqueeze(1)).log().mean()
        for p in (posterior, averaged)
    )
    with torch.no_grad():
        network = -nn.functional.cross_entropy(model(data.x_test), data.y_test)
    # averaged curvature mends more than half of what samples lose
    assert better > (laplace + network) / 2


REAL = [
    pytest.mark.data,
    pytest.mark.skipif(
        "NTKMARGLIK_DATA" not in os.environ, reason="set NTKMARGLIK_DATA to the data root"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset, n_data, precision",
    [("digits", 200, 1.0), pytest.param("mnist", 500, 5.0, marks=REAL)],
)
def test_both_solvers_learn_the_same_from_real_data(dataset, n_data, precision):
    """At their default settings, with the same noise: to half the standard error."""
    data = load(dataset, os.environ.get("NTKMARGLIK_DATA", "data"), n_data=n_data)
    model = build("cnn", data.input_shape, data.n_classes)
    prior = GaussianPrior(model, "scalar", precision)
    ml = MarginalLikelihood(model, "classification", n_data=n_data, prior=prior)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(40):
        for index in torch.randperm(n_data).split(128):
            optimizer.zero_grad()
            ml.map_loss(data.x_train[index], data.y_train[index]).backward()
            optimizer.step()
    loader = list(zip(data.x_train.split(128), data.y_train.split(128), strict=True))
    found = {}
    for solver in (ConjugateGradients(tolerance=0.01), Sgd()):
        posterior = SampledLaplace(
            model,
            "classification",
            n_data=n_data,
            prior=prior,
            samples=4,
            solver=solver,
            together=4,
            generator=torch.Generator().manual_seed(1),
        ).fit(loader)
        gamma, error = posterior.diagnostics()["effective_dimension"]
        squares = posterior.mode.square().sum().item()
        found[type(solver)] = gamma, gamma / squares, error
    (gamma, learned, error), (by_steps, also, _) = found.values()
    assert abs(by_steps - gamma) < 0.5 * error
    assert abs(also / learned - 1) < 0.5 * error / gamma
