"""Predictions of the Laplace posterior, its state, and what it refuses."""

import copy
import io
import math

import pytest
import torch
from cases import CASES, LIKELIHOOD_CASES
from small_networks import mlp, randn
from torch import nn

from asdl_marglik import CurvatureError
from laplace_marglik import (
    Bernoulli,
    Categorical,
    FromLogProb,
    Gaussian,
    GaussianPrior,
    HeteroscedasticGaussian,
    MarginalLikelihood,
    MarglikError,
    Poisson,
)
from laplace_marglik.posterior.link import bridge

by_name = {case.name: case for case in [*CASES, *LIKELIHOOD_CASES]}
X, Y = randn(12, 4), torch.arange(12) % 3
STRUCTURES = ["full", "blockdiag", "kfac", "diag", "ntk"]


def marglik(model=None, likelihood="classification", n=12, structure="kfac", **options):
    model = mlp() if model is None else model
    prior = options.pop("prior", None) or GaussianPrior(model, "layerwise", 2.0)
    return MarginalLikelihood(
        model,
        likelihood,
        n_data=n,
        prior=prior,
        structure=structure,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


@pytest.fixture
def posterior():
    return marglik().posterior([(X, Y)])


def brute_force(posterior, x, k=200_000):
    """Samples [k, n, C] of the outputs, each datum for itself."""
    f, covariance = posterior.functional(x)
    return torch.distributions.MultivariateNormal(f.flatten(1), covariance).sample((k,))


# ------------------------------------------------------------------------------------ predictions


def test_class_probabilities(posterior):
    torch.manual_seed(0)
    f, covariance = posterior.functional(X)
    variance = covariance.diagonal(dim1=1, dim2=2)
    probit = (f / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(posterior.predict(X), probit)
    torch.testing.assert_close(posterior.predict(X, kind="probit"), probit)
    torch.testing.assert_close(posterior.predict(X, kind="mode"), f.softmax(1))
    samples = brute_force(posterior, X, 20_000).softmax(2)
    got = posterior.predict(X, kind="mc", samples=20_000)
    error = samples.std(0) * (2 / 20_000) ** 0.5
    assert ((got - samples.mean(0)).abs() < 4.5 * error).all()
    torch.testing.assert_close(posterior.predict(X, kind="bridge"), bridge(f, covariance))
    for kind in ("probit", "mc", "bridge", "mode"):
        p = posterior.predict(X, kind=kind)
        assert p.shape == (12, 3) and (p > 0).all()
        torch.testing.assert_close(p.sum(1), torch.ones(12).double())


def test_the_bridge_inverts_the_laplace_approximation_of_a_dirichlet():
    """Mean and variance of logits of a Dirichlet (Hobbhahn et al., equations 3 and 4) lead back."""
    alpha = torch.tensor([[2.0, 5.0, 0.7, 3.0]]).double()
    k = alpha.shape[1]
    mean = alpha.log() - alpha.log().mean(1, keepdim=True)
    inverse = 1 / alpha[0]
    covariance = torch.diag(inverse)
    covariance = covariance - (inverse[:, None] + inverse[None, :] - inverse.sum() / k) / k
    # in the space orthogonal to the constant vector; a component along it must not matter
    along = torch.ones(k, k).double()
    got = bridge(mean + 0.0, (covariance + 0.3 * along)[None])
    torch.testing.assert_close(got, alpha / alpha.sum(), rtol=1e-8, atol=1e-8)


def test_log_probabilities_of_classes(posterior):
    p = posterior.predict(X)
    want = p.gather(1, Y[:, None])[:, 0].log()
    torch.testing.assert_close(posterior.log_prob(X, Y), want)
    mode = posterior.log_prob(X, Y, kind="mode")
    torch.testing.assert_close(
        mode, posterior.functional(X)[0].log_softmax(1).gather(1, Y[:, None])[:, 0]
    )


def test_the_joint_log_probability_sees_covariances(posterior):
    """Of copies of one input it is not the sum of the marginals; of one datum it is."""
    one = posterior.joint_log_prob(X[:1], Y[:1], samples=20_000)
    marginal = posterior.log_prob(X[:1], Y[:1], kind="mc", samples=20_000)
    torch.testing.assert_close(one, marginal[0], rtol=0.02, atol=0.02)
    copies, same = X[:1].expand(6, -1), Y[:1].expand(6)
    joint = posterior.joint_log_prob(copies, same, samples=5000)
    samples = brute_force(posterior, X[:1], 50_000)
    want = torch.logsumexp(6 * samples.log_softmax(2)[:, 0, Y[0]], 0) - math.log(50_000)
    torch.testing.assert_close(joint, want, rtol=0.03, atol=0.03)


def test_outputs_at_every_pixel():
    model, x, y = by_name["segmentation"].make()
    posterior = marglik(model, n=4).posterior([(x, y)])
    f, covariance = posterior.functional(x)
    assert f.shape == (4, 3, 2, 3) and covariance.shape == (4, 18, 18)
    for kind in ("probit", "mc", "bridge", "mode"):
        p = posterior.predict(x, kind=kind)
        assert p.shape == f.shape
        torch.testing.assert_close(p.sum(1), torch.ones(4, 2, 3).double())
    pixel = torch.arange(3) * 6 + 4  # classes of the pixel (1, 1)
    block = covariance[:, pixel][:, :, pixel]
    torch.testing.assert_close(
        posterior.predict(x, kind="bridge")[:, :, 1, 1], bridge(f[:, :, 1, 1], block)
    )
    assert posterior.log_prob(x, y).shape == (4,)


def regression(kind, likelihood):
    model, x, y = by_name[f"mlp-{kind}"].make()
    return marglik(model, likelihood, n=5).posterior([(x, y)]), x, y


def test_regression():
    posterior, x, y = regression("gaussian", Gaussian(0.7))
    f, covariance = posterior.functional(x)
    variance = covariance.diagonal(dim1=1, dim2=2) + 0.49
    for kind in (None, "probit", "mc"):
        prediction = posterior.predict(x, kind=kind)
        assert isinstance(prediction, torch.distributions.Normal)
        torch.testing.assert_close(prediction.mean, f)
        torch.testing.assert_close(prediction.variance, variance)
    total = covariance + 0.49 * torch.eye(3).double()
    want = torch.distributions.MultivariateNormal(f, total).log_prob(y)
    torch.testing.assert_close(posterior.log_prob(x, y), want)


def test_heteroscedastic_regression():
    torch.manual_seed(0)
    posterior, x, y = regression("heteroscedastic", HeteroscedasticGaussian())
    prediction = posterior.predict(x)
    mean, log_noise = brute_force(posterior, x).chunk(2, 2)
    targets = mean + (log_noise / 2).exp() * torch.randn_like(mean)
    assert prediction.mean.shape == (5, 2)
    torch.testing.assert_close(prediction.mean, targets.mean(0), rtol=0.03, atol=0.03)
    torch.testing.assert_close(prediction.variance, targets.var(0), rtol=0.1, atol=0.05)
    assert posterior.log_prob(x, y).shape == (5,)


def test_binary_targets_counts_and_custom_likelihoods():
    torch.manual_seed(0)
    posterior, x, y = regression("bernoulli", Bernoulli())
    samples = brute_force(posterior, x, 50_000)
    torch.testing.assert_close(
        posterior.predict(x), samples.sigmoid().mean(0), rtol=0.05, atol=0.02
    )
    torch.testing.assert_close(
        posterior.predict(x, kind="mc", samples=20_000),
        samples.sigmoid().mean(0),
        rtol=0.03,
        atol=0.02,
    )
    each = torch.stack([Bernoulli().log_prob(f, y) for f in samples[:20_000]])
    want = each.logsumexp(0) - math.log(20_000)
    got = posterior.log_prob(x, y, samples=20_000)
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)

    posterior, x, y = regression("poisson", Poisson())
    f, covariance = posterior.functional(x)
    exact = torch.exp(f + covariance.diagonal(dim1=1, dim2=2) / 2)  # mean of a log-normal
    torch.testing.assert_close(posterior.predict(x, samples=100_000), exact, rtol=0.15, atol=0.05)
    with pytest.raises(MarglikError, match="use kind='mc'"):
        posterior.predict(x, kind="probit")

    posterior, x, y = regression("poisson", FromLogProb(lambda f, y: Poisson().log_prob(f, y)))
    torch.testing.assert_close(posterior.functional(x)[1], covariance)
    assert posterior.predict(x).shape == (5, 3)


# ------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("structure", [*STRUCTURES, "inducing"])
def test_a_state_goes_through_a_file(structure):
    options = {"inducing": 5} if structure == "inducing" else {}
    structure = "ntk" if structure == "inducing" else structure
    ml = marglik(likelihood=Categorical(1.3), structure=structure)
    posterior = ml.posterior([(X, Y)], **options)
    file = io.BytesIO()
    torch.save(posterior.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = marglik(copy.deepcopy(ml.model), Categorical(), structure="diag").posterior()
    other.load_state_dict(state)
    for kind in ("probit", "mc", "bridge"):
        torch.testing.assert_close(other.predict(X, kind=kind), posterior.predict(X, kind=kind))
    assert other.log_evidence.total == posterior.log_evidence.total
    assert other.conservative == posterior.conservative
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    samples = [p.sample(3, g) for p, g in zip((posterior, other), generators, strict=True)]
    assert all(torch.equal(samples[0][n], samples[1][n]) for n in samples[0])


def test_states_of_other_things_are_refused(posterior):
    state = posterior.state_dict()
    wide = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(MarglikError, match=r"another model or other weights: they differ in \['0"):
        marglik(wide).posterior().load_state_dict(state)
    moved = mlp()
    with torch.no_grad():
        moved[0].weight.add_(1e-3)
    with pytest.raises(MarglikError, match="other values of the weights"):
        marglik(moved).posterior().load_state_dict(state)
    with pytest.raises(MarglikError, match="Categorical likelihood, got Gaussian"):
        marglik(likelihood="regression").posterior().load_state_dict(state)
    with pytest.raises(MarglikError, match="expected a state from LaplacePosterior"):
        marglik().posterior().load_state_dict({"mean": torch.zeros(3)})
    with pytest.raises(MarglikError, match="another model or other weights"):
        marglik().posterior(weights=["2.*"]).load_state_dict(state)


# ----------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.predict(X),
        lambda p: p.functional(X),
        lambda p: p.sample(2),
        lambda p: p.sample_outputs(X),
        lambda p: p.log_prob(X, Y),
        lambda p: p.joint_log_prob(X, Y),
        lambda p: p.log_evidence,
        lambda p: p.state_dict(),
    ],
)
def test_before_the_fit(use):
    with pytest.raises(MarglikError, match="has not been fitted; call fit"):
        use(marglik().posterior())


@pytest.mark.parametrize(
    "x, message",
    [
        (X.float(), r"\[n, 4\] of torch.float64, .* got \[n, 4\] of torch.float32"),
        (X[0], r"got \[n\] of torch.float64"),
        (X[:, :3], "does not run on these inputs"),
        (X[:0], "at least one of them"),
        ({"x": X}, r"got x \[n, 4\]"),
        (X.numpy(), "inputs must be a tensor"),
    ],
)
def test_other_inputs(posterior, x, message):
    with pytest.raises(CurvatureError, match=message):
        posterior.predict(x)


def test_bad_arguments(posterior):
    with pytest.raises(
        MarglikError, match="kind must be one of probit, mc, bridge, mode, got 'la'"
    ):
        posterior.predict(X, kind="la")
    with pytest.raises(MarglikError, match="number of samples must be a whole number"):
        posterior.sample(0)
    with pytest.raises(MarglikError, match="structure must be one of"):
        marglik().posterior([(X, Y)], structure="lowrank")
    with pytest.raises(MarglikError, match=r"'head.\*' of weights= fits no weight"):
        marglik().posterior([(X, Y)], weights=["head.*"])
    with pytest.raises(MarglikError, match="weights=\\[\\] leaves no weights"):
        marglik().posterior([(X, Y)], weights=[])
    with pytest.raises(MarglikError, match="inducing rows are for structure='ntk'"):
        marglik().posterior([(X, Y)], inducing=3)
    with pytest.raises(MarglikError, match="inducing must be a whole number"):
        marglik().posterior([(X, Y)], structure="ntk", inducing=0)
    regression, x, y = globals()["regression"]("gaussian", Gaussian())
    with pytest.raises(MarglikError, match="bridge is for class probabilities"):
        regression.predict(x, kind="bridge")
    with pytest.raises(MarglikError, match="do not match outputs"):
        regression.log_prob(x, y[:, :2])


def test_more_bad_arguments(posterior):
    with pytest.raises(MarglikError, match="samples must be a whole number"):
        posterior.predict(X, kind="mc", samples=0)
    with pytest.raises(MarglikError, match="expected 12 targets, one for each input"):
        posterior.log_prob(X, Y[:3])
    posterior.setting.model.model[0].requires_grad_(False)
    with pytest.raises(MarglikError, match="frozen after the fit"):
        posterior.predict(X)


@pytest.mark.parametrize("structure", ["full", "kfac", "ntk"])
def test_a_network_that_is_sure(structure):
    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(500)
    posterior = marglik(model, structure=structure).posterior([(X, Y)])
    for kind in ("probit", "mc", "bridge"):
        p = posterior.predict(10 * X, kind=kind)
        torch.testing.assert_close(p.sum(1), torch.ones(12).double())
    assert posterior.log_prob(10 * X, Y).isfinite().all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_operation_without_forward_mode():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.body(x)[0][:, -1])

    torch.manual_seed(0)
    x = randn(12, 6, 4).float()
    posterior = marglik(Sequence()).posterior([(x, Y)])
    f, covariance = posterior.functional(x)
    outputs = posterior.sample_outputs(x, 2000)
    error = (outputs - f).square().std(0) / 2000**0.5
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert (((outputs - f).square().mean(0) - variance).abs() < 4.5 * error).all()


def test_data_that_do_not_fit():
    with pytest.raises(MarglikError, match="gave 7 data points in all, but n_data=12"):
        marglik().posterior([(X[:7], Y[:7])])
    with pytest.raises(MarglikError, match="gave 24 data points in all, but n_data=12"):
        marglik().posterior([(X, Y), (X, Y)])
    with pytest.raises(MarglikError, match="the loader is empty"):
        marglik().posterior([])
    with pytest.raises(MarglikError, match="pair \\(inputs, targets\\)"):
        marglik().posterior([X])
    with pytest.raises(MarglikError, match="as many inputs as targets"):
        marglik().posterior([(X, Y[:3])])
    bad = X.clone()
    bad[3, 1] = torch.nan
    with pytest.raises(CurvatureError, match="input 3 contains NaN"):
        marglik().posterior([(bad, Y)])
    with pytest.raises(CurvatureError, match="input 3 contains NaN"):
        marglik().posterior([(X, Y)]).predict(bad)


def test_weights_that_moved_after_the_fit(posterior):
    with torch.no_grad():
        posterior.setting.model.model[0].weight.mul_(1.1)
    with pytest.raises(MarglikError, match="changed since the posterior was fitted"):
        posterior.predict(X)


def test_memory_is_refused_before_it_is_taken():
    ml = marglik(memory_budget=200_000, structure="diag")
    posterior = ml.posterior([(X, Y)])
    with pytest.raises(
        MarglikError, match=r"joint covariance of 400 inputs .* at most [0-9]+ inputs"
    ):
        posterior.functional(randn(400, 4), joint=True)
    assert posterior.functional(randn(400, 4))[1].shape == (400, 3, 3)
    with pytest.raises(MarglikError, match="structure='ntk' with inducing"):
        marglik(memory_budget=2_000, structure="full").posterior([(X, Y)])


def test_inference_mode():
    with torch.inference_mode(), pytest.raises(MarglikError, match="inference_mode"):
        marglik().posterior([(X, Y)])
