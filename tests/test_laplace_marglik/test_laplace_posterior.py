"""The Laplace posterior against closed forms and dense matrices of the naive reference."""

import copy
import math

import pytest
import reference
import torch
from cases import CASES, LIKELIHOOD_CASES, Shift
from marginal_likelihoods import LIKELIHOODS
from small_networks import filled, mlp, randn
from torch import nn

from asdl_marglik import kfac_factors
from laplace_marglik import (
    Categorical,
    FromLogProb,
    Gaussian,
    GaussianPrior,
    LaplacePosterior,
    MarginalLikelihood,
)

STRUCTURES = ["full", "blockdiag", "kfac", "diag", "ntk"]
PRIORS = ["scalar", "layerwise", "diagonal"]
by_name = {case.name: case for case in [*CASES, *LIKELIHOOD_CASES]}


def close(got, want, tolerance=1e-8):
    scale = float(want.abs().max())
    torch.testing.assert_close(got / scale, want / scale, rtol=0, atol=tolerance)


def marglik(model, likelihood, n, structure, *, prior="layerwise", seed=3, mean=None, **options):
    """With random precisions and means of the prior."""
    generator = torch.Generator().manual_seed(seed)
    if mean is None:
        weights = {k: p for k, p in model.named_parameters() if p.requires_grad}
        mean = {
            k: 0.1 * torch.randn(p.shape, generator=generator).to(p) for k, p in weights.items()
        }
    gaussian = GaussianPrior(model, prior, mean=mean)
    with torch.no_grad():
        gaussian.log_precision.normal_(0.5, 0.5, generator=generator)
    options.setdefault("generator", torch.Generator().manual_seed(0))
    return MarginalLikelihood(
        model, likelihood, n_data=n, prior=gaussian, structure=structure, **options
    )


def precisions(ml, names):
    found = ml.prior.precisions()
    return torch.cat([found[n].reshape(-1).expand(ml.weights[n].numel()) for n in names])


def factored(ml, x, y, W, names, plan, augmented=False):
    """Dense KFAC blocks [P, P]: of the reference, and beyond its layers of `kfac_factors`."""
    dense = [name for name in names if name not in plan.kronecker]
    blocks = reference.kfac(ml.model, x, W, names, "expand", augmented, dense)
    own = {} if augmented else kfac_factors(ml.model, x, y, ml.likelihood)
    for name, parts in blocks.items():
        if len(parts) == 1 and name in own:
            A, B = (f if f.dim() == 3 else f[None] for f in own[name])
            pairs = zip(A.expand(len(B), -1, -1), B, strict=True)
            if plan.rules[name] == "matmul":  # the weight is stored [inputs, outputs]
                pairs = [(b, a) for a, b in pairs]
            blocks[name] = (torch.block_diag(*[torch.kron(b, a) for a, b in pairs]),)
    return torch.block_diag(*[torch.kron(*p) if len(p) == 2 else p[0] for p in blocks.values()])


def curvature(ml, x, y, W, names, plan, augmented=False):
    """H [P, P] as the structure has it."""
    model, structure = ml.model, ml.structure
    if structure == "kfac":
        return factored(ml, x, y, W, names, plan, augmented).detach()
    V = reference.rows(reference.jacobian(model, x, names, augmented), W).detach()
    H = V.mT @ V
    if structure == "diag":
        return torch.diag(H.diagonal())
    if structure == "blockdiag":
        blocks = reference.module_blocks(model, names)
        kept = torch.zeros_like(H)
        for b in blocks:
            kept[b[:, None], b] = H[b[:, None], b]
        return kept
    return H


def split(x, y, size=2):
    if isinstance(x, dict):
        return [({k: v[i : i + size] for k, v in x.items()}, y[i : i + size]) for i in (0, 2, 4)]
    return list(zip(x.split(size), y.split(size), strict=True))


def marginal(joint, n, c):
    """Blocks [n, C, C] on the diagonal of [n C, n C]."""
    index = torch.arange(n)
    return joint.reshape(n, c, n, c)[index, :, index]


# ----------------------------------------------------------------- against the naive reference


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_covariances_are_those_of_dense_matrices(case, structure):
    model, x, y = case.make()
    names = reference.weight_names(model)
    J = reference.jacobian(model, x, names).detach()
    f = model(x).detach()
    W = reference.cotangents(reference.Likelihood("categorical"), f)
    for prior in PRIORS:
        ml = marglik(model, "classification", len(y), structure, prior=prior)
        posterior = ml.posterior(split(x, y))
        H = curvature(ml, x, y, W, names, posterior.curvature.plan)
        flat = J.flatten(0, 1)
        want = flat @ torch.linalg.solve(torch.diag(precisions(ml, names)) + H, flat.mT)
        mean, covariance = posterior.functional(x)
        close(mean, f)
        close(covariance, marginal(want, *J.shape[:2]))
        close(posterior.functional(x, joint=True)[1], want)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "mininet", "repeated", "raw", "groupnorm", "segmentation"])
def test_augmented_outputs(name, structure):
    model, x, y = by_name[name].make()
    augment = Shift(3)
    copies = augment(x).detach()
    names = reference.weight_names(model)
    f = reference.outputs(model, copies, True).detach()
    J = reference.jacobian(model, copies, names, True).detach()
    W = reference.cotangents(reference.Likelihood("categorical"), f)
    ml = marglik(model, "classification", len(y), structure, augment=augment)
    posterior = ml.posterior([(x, y)])
    H = curvature(ml, copies, y, W, names, posterior.curvature.plan, True)
    flat = J.flatten(0, 1)
    want = flat @ torch.linalg.solve(torch.diag(precisions(ml, names)) + H, flat.mT)
    mean, covariance = posterior.functional(x)
    close(mean, f)
    close(covariance, marginal(want, *J.shape[:2]))
    close(posterior.functional(x, joint=True)[1], want)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", LIKELIHOOD_CASES, ids=str)
def test_other_likelihoods(case, structure):
    model, x, y = case.make()
    names = reference.weight_names(model)
    sigma = 0.7 if case.likelihood == "gaussian" else 1.0
    W = reference.cotangents(reference.Likelihood(case.likelihood, sigma), model(x).detach())
    J = reference.jacobian(model, x, names).detach().flatten(0, 1)
    ml = marglik(model, LIKELIHOODS[case.likelihood](), len(y), structure)
    posterior = ml.posterior(split(x, y))
    H = curvature(ml, x, y, W, names, posterior.curvature.plan)
    want = J @ torch.linalg.solve(torch.diag(precisions(ml, names)) + H, J.mT)
    close(posterior.functional(x, joint=True)[1], want)


def test_a_custom_likelihood_and_a_temperature():
    """log p / tau with the same function is the same posterior, in every structure."""
    model, x, y = by_name["mlp"].make()

    def log_prob(f, y):
        return f.log_softmax(1).gather(1, y[:, None])[:, 0]

    for structure in STRUCTURES:
        covariances = [
            marglik(model, likelihood, len(y), structure).posterior([(x, y)]).functional(x)[1]
            for likelihood in (Categorical(1.7), FromLogProb(log_prob, 1.7))
        ]
        close(covariances[0], covariances[1])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_is_that_of_the_marginal_likelihood(structure):
    model, x, y = by_name["mininet"].make()
    ml = marglik(model, Categorical(1.3), len(y), structure)
    want = ml.full_batch([(x, y)]).detach()
    got = ml.posterior(split(x, y)).log_evidence
    for part in ("total", "log_likelihood", "scatter", "log_det_ratio"):
        torch.testing.assert_close(getattr(got, part), getattr(want, part), rtol=1e-9, atol=1e-9)
    assert got.status == want.status


@pytest.mark.parametrize("name", ["mlp", "mininet", "vit", "raw", "tied_embedding"])
def test_function_space_with_all_rows_is_weight_space(name):
    model, x, y = by_name[name].make()
    pair = [
        marglik(model, "classification", len(y), s).posterior([(x, y)]) for s in ("full", "ntk")
    ]
    close(*[posterior.functional(x, joint=True)[1] for posterior in pair])


# -------------------------------------------------------------------------------- closed forms


def linear_regression(n=30, d=4, c=2, sigma=0.6, precision=1.7):
    """Data, weights at the mode, and the exact posterior N(w, S) of Bayesian linear regression."""
    x, y = randn(n, d), randn(n, c, seed=1)
    S = torch.linalg.inv(precision * torch.eye(d).double() + x.mT @ x / sigma**2)
    model = nn.Linear(d, c, bias=False).double()
    with torch.no_grad():
        model.weight.copy_((S @ x.mT @ y / sigma**2).mT)
    ml = MarginalLikelihood(
        model,
        Gaussian(sigma),
        n_data=n,
        prior=GaussianPrior(model, "scalar", precision),
        structure="full",
    )
    return ml, x, y, S


@pytest.mark.parametrize("structure", ["full", "blockdiag", "kfac", "ntk"])
def test_bayesian_linear_regression(structure):
    ml, x, y, S = linear_regression()
    ml.structure = structure
    sigma = 0.6
    posterior = ml.posterior([(x, y)])
    test, targets = randn(7, 4, seed=2), randn(7, 2, seed=3)
    K = test @ S @ test.mT
    mean, covariance = posterior.functional(test)
    tight = {"rtol": 1e-10, "atol": 1e-10}
    eye = torch.eye(2).double()
    torch.testing.assert_close(mean, test @ ml.model.weight.detach().mT, **tight)
    torch.testing.assert_close(covariance, K.diagonal()[:, None, None] * eye, **tight)
    _, joint = posterior.functional(test, joint=True)
    torch.testing.assert_close(joint, torch.kron(K, eye), **tight)
    prediction = posterior.predict(test)
    variance = K.diagonal()[:, None].expand(-1, 2) + sigma**2
    torch.testing.assert_close(prediction.mean, mean, **tight)
    torch.testing.assert_close(prediction.stddev, variance.sqrt(), **tight)
    density = torch.distributions.MultivariateNormal(
        mean.flatten(), torch.kron(K, eye) + sigma**2 * torch.eye(14).double()
    )
    want = density.log_prob(targets.flatten())
    torch.testing.assert_close(posterior.joint_log_prob(test, targets), want, **tight)
    each = torch.distributions.Normal(mean, variance.sqrt()).log_prob(targets).sum(1)
    torch.testing.assert_close(posterior.log_prob(test, targets), each, **tight)
    mode = posterior.predict(test, kind="mode")
    torch.testing.assert_close(mode.stddev, torch.full_like(mean, sigma), **tight)
    exact = reference.linear_regression_evidence(
        x, y[:, 0], sigma, torch.zeros(4).double(), torch.full((4,), 1.7).double()
    ) + reference.linear_regression_evidence(
        x, y[:, 1], sigma, torch.zeros(4).double(), torch.full((4,), 1.7).double()
    )
    torch.testing.assert_close(posterior.log_evidence.total, exact, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", ["layerwise", "diagonal"])
def test_samples_have_the_covariance(structure, prior):
    model, x, y = by_name["mlp"].make()
    ml = marglik(model, "classification", len(y), structure, prior=prior)
    posterior = ml.posterior([(x, y)])
    k = 4000
    samples = posterior.sample(k)
    assert {n: tuple(s.shape) for n, s in samples.items()} == {
        n: (k, *w.shape) for n, w in ml.weights.items()
    }
    z = torch.cat([(s - posterior.mean[n]).flatten(1) for n, s in samples.items()], 1)
    J = reference.jacobian(model, x, list(samples)).detach().flatten(0, 1)
    want = posterior.functional(x, joint=True)[1]
    pushed = z @ J.mT
    products = pushed.unsqueeze(1) * pushed.unsqueeze(2)
    error = products.std(0) / math.sqrt(k)
    assert ((products.mean(0) - want).abs() < 4.5 * error).all()
    outputs = posterior.sample_outputs(x, 50)
    again = posterior.sample_outputs(x[:2], 50)
    close(outputs[:, :2], again)  # the same functions
    close(outputs.mean(0), posterior.functional(x)[0], 2.0)


def test_kronecker_samples_of_every_kind_of_weight():
    """Thin bases (more features than data), channel groups, biases, matrices on the right."""

    class Right(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8))

        def forward(self, x):
            return x @ self.weight

    model = nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3), Right(), nn.Tanh()
    )
    model = filled(nn.Sequential(*model, nn.Linear(8, 3)))
    x, y = randn(5, 2, 3, 3), torch.arange(5) % 3
    posterior = marglik(model, "classification", 5, "kfac").posterior([(x, y)])
    inputs, _ = posterior._covariances[2].sides  # of the 16 features of 5 data
    assert inputs.basis.shape == (1, 16, 5)
    k = 20_000
    samples = posterior.sample(k)
    for covariance in posterior._covariances:
        (name,) = covariance.shapes
        z = (samples[name] - posterior.mean[name]).flatten(1)
        jacobian = reference.jacobian(model, x, [name]).detach().flatten(0, 1)
        chunk = next(posterior._chunks(x, posterior._covariances))
        want = covariance.of_all_outputs([chunk]).diagonal()
        got = (z @ jacobian.mT).square()
        assert ((got.mean(0) - want).abs() < 4.5 * got.std(0) / k**0.5 + 1e-12).all(), name


def test_samples_of_outputs_under_augmentation():
    model, x, y = by_name["mlp"].make()
    posterior = marglik(model, "classification", 5, "kfac", augment=Shift(2)).posterior([(x, y)])
    k = 4000
    outputs = posterior.sample_outputs(x, k, torch.Generator().manual_seed(1))
    f, covariance = posterior.functional(x)
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert ((outputs.mean(0) - f).abs() < 4.5 * (variance / k).sqrt()).all()
    error = (outputs - f).square().std(0) / k**0.5
    assert (((outputs - f).square().mean(0) - variance).abs() < 4.5 * error).all()


# --------------------------------------------------------------------------------- inducing rows


def test_inducing_rows_are_conservative_and_become_exact():
    model, x, y = by_name["mlp"].make()
    ml = marglik(model, "classification", len(y), "ntk")
    exact = ml.posterior([(x, y)]).functional(x)[1]
    before = None
    for count in (1, 4, 10):
        posterior = ml.posterior(split(x, y), inducing=count)
        assert posterior.conservative and posterior.log_evidence.status == "approximation"
        covariance = posterior.functional(x)[1]
        excess = torch.linalg.eigvalsh(covariance - exact)
        assert excess.min() > -1e-10
        total = float(covariance.diagonal(dim1=1, dim2=2).sum())
        assert before is None or total <= before + 1e-9
        before = total
    close(covariance, exact)  # n (C - 1) = 10 rows are all there are


# ------------------------------------------------------------------------- parts of the weights


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_part_of_the_weights_is_the_network_with_the_rest_frozen(structure):
    model, x, y = by_name["mlp"].make()
    ml = marglik(model, "classification", len(y), structure, mean=0.0, prior="scalar")
    got = ml.posterior([(x, y)], weights=["2.*"])
    assert set(got.mean) == {"2.weight", "2.bias"}
    frozen = copy.deepcopy(model)
    frozen[0].requires_grad_(False)
    other = marglik(frozen, "classification", len(y), structure, mean=0.0, prior="scalar")
    want = other.posterior([(x, y)])
    close(got.functional(x)[1], want.functional(x)[1])
    torch.testing.assert_close(got.log_evidence.total, want.log_evidence.total)
    assert set(got.sample(2)) == {"2.weight", "2.bias"}


# ------------------------------------------------------------------------------------- hygiene


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float32_networks_with_float64_algebra(structure):
    model, x, y = by_name["mininet"].make()
    double = marglik(model, "classification", len(y), structure).posterior([(x, y)])
    mean, covariance = double.functional(x)
    model = copy.deepcopy(model).float()
    single = marglik(model, "classification", len(y), structure).posterior([(x.float(), y)])
    f, got = single.functional(x.float())
    assert f.dtype == got.dtype == torch.float64
    close(f, mean, 1e-5)
    close(got, covariance, 1e-4)
    assert single.sample(1)["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("structure", STRUCTURES)
def test_chunks_make_no_difference(structure):
    model, x, y = by_name["mininet"].make()
    pair = [
        marglik(model, "classification", len(y), structure, chunk=chunk).posterior([(x, y)])
        for chunk in (None, 2)
    ]
    close(*[posterior.functional(x)[1] for posterior in pair], 1e-12)
    close(*[posterior.functional(x, joint=True)[1] for posterior in pair], 1e-12)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)).double()
    model.train()
    x, y = randn(6, 4), torch.arange(6) % 3
    state = torch.get_rng_state()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    posterior = marglik(model, "classification", 6, "kfac", mean=0.0).posterior([(x, y)])
    f, covariance = posterior.functional(x)
    posterior.predict(x, kind="mc")
    posterior.sample_outputs(x, 3)
    posterior.joint_log_prob(x, y)
    assert all(module.training for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not f.requires_grad and not covariance.requires_grad


def test_it_is_of_the_hyperparameters_at_the_time_of_the_fit():
    model, x, y = by_name["mlp-gaussian"].make()
    ml = marglik(model, Gaussian(0.7), len(y), "kfac")
    posterior = ml.posterior([(x, y)])
    before = posterior.predict(x)
    with torch.no_grad():
        ml.likelihood.log_sigma.add_(1.0)
        ml.prior.log_precision.add_(1.0)
    after = posterior.predict(x)
    torch.testing.assert_close(before.stddev, after.stddev)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictions_can_be_differentiated_in_inputs(structure):
    model, x, y = by_name["mlp"].make()
    posterior = marglik(model, "classification", len(y), structure).posterior([(x, y)])
    point = x[:2].clone().requires_grad_()

    def value():
        f, covariance = posterior.functional(point)
        return (f.sum() + covariance.pow(2).sum()).detach()

    f, covariance = posterior.functional(point)
    (got,) = torch.autograd.grad(f.sum() + covariance.pow(2).sum(), point)
    want = reference.finite_difference(value, point)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_loader_in_any_order_that_is_read_once():
    model, x, y = by_name["mlp"].make()
    ml = marglik(model, "classification", len(y), "kfac")
    want = ml.posterior([(x, y)]).functional(x)[1]
    order = torch.tensor([3, 1, 4, 0, 2])
    got = ml.posterior(iter(split(x[order], y[order])))
    assert isinstance(got, LaplacePosterior)
    close(got.functional(x)[1], want)


def test_mixed_priors_and_frozen_parameters():
    model, x, y = by_name["frozen"].make()
    groups = {"0.*": "body", "4.*": "head"}
    ml = marglik(model, "classification", len(y), "full", prior=groups)
    posterior = ml.posterior([(x, y)])
    names = reference.weight_names(model)
    assert list(posterior.mean) == names
    W = reference.cotangents(reference.Likelihood("categorical"), model(x).detach())
    J = reference.jacobian(model, x, names).detach().flatten(0, 1)
    V = reference.rows(J.reshape(5, 3, -1), W)
    want = J @ torch.linalg.solve(torch.diag(precisions(ml, names)) + V.mT @ V, J.mT)
    close(posterior.functional(x, joint=True)[1], want)


def test_mlp_of_support_is_what_the_docs_use():
    posterior = marglik(mlp(), "classification", 6, "kfac").posterior(
        [(randn(6, 4), torch.arange(6) % 3)]
    )
    p = posterior.predict(randn(3, 4, seed=5))
    torch.testing.assert_close(p.sum(1), torch.ones(3).double())
