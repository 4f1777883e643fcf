"""Curvature from gradients of log-likelihoods, at the targets or at drawn ones: values against the
naive oracle, gradients against finite differences, draws, blocks, posteriors, and what is refused.
"""

import bisect
import itertools

import pytest
import reference
import torch
from cases import Shift
from kinds_of_targets import CASES as CATEGORICAL_CASES
from marginal_likelihoods import LIKELIHOODS, STRUCTURES, by_name, close, expected, marglik, setup
from small_networks import mlp, randn
from torch import nn

from laplace_marglik import (
    Bernoulli,
    Categorical,
    EvidenceLearner,
    FromLogProb,
    Gaussian,
    GaussianPrior,
    HeteroscedasticGaussian,
    InducingPartition,
    MarginalLikelihood,
    MarglikError,
    Partition,
    Poisson,
)
from laplace_marglik.compat import Laplace
from laplace_marglik.evidence.gradient_rows import DRAWS

X, Y = randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
ROOTS = [{"root": "empirical"}, {"root": "sampled", "samples": 2}]
every_structure = pytest.mark.parametrize("structure", STRUCTURES)
every_root = pytest.mark.parametrize("options", ROOTS, ids=lambda o: o["root"])


def shift():
    augment = Shift(3).double()
    with torch.no_grad():
        augment.eta.copy_(torch.tensor([0.2, -0.3]))
    return augment


# ------------------------------------------------------------------------------- values


def normal_of(u):
    return torch.distributions.Normal(0.0, 1.0).icdf(u)


def count_of(rate, u):
    """The least k with P(count <= k) >= u, one probability after the other."""
    term = total = torch.exp(-rate)
    k = 0
    while total < u:
        k += 1
        term = term * rate / k
        total = total + term
    return k


def drawn_targets(kind, f, u):
    """Targets of each datum from its random numbers u [n, D], one number at a time."""
    f = f.detach()
    if kind == "categorical":
        p = f.softmax(1).flatten(2) if f.dim() > 2 else f.softmax(1).unsqueeze(2)
        y = torch.zeros(len(f), p.shape[2], dtype=torch.long)
        for i, t in itertools.product(range(len(f)), range(p.shape[2])):
            y[i, t] = bisect.bisect_right(p[i, :, t].cumsum(0).tolist(), u[i, t].item())
        return y.reshape(len(f), *f.shape[2:])
    if kind == "gaussian":
        return f + 0.7 * normal_of(u).reshape(f.shape)
    if kind == "bernoulli":
        return (u.reshape(f.shape) < f.sigmoid()).to(f)
    if kind == "poisson":
        pairs = zip(f.exp().flatten(), u.flatten(), strict=True)
        return torch.tensor([count_of(*pair) for pair in pairs]).to(f).reshape(f.shape)
    mean, log_variance = f.chunk(2, 1)
    return mean + torch.exp(log_variance / 2) * normal_of(u)


def targets_of(ml, case, x, y):
    """The sets of targets whose gradients are the rows, as the generator will draw them."""
    if ml.root == "empirical":
        return [y]
    f = reference.outputs(ml.model, x if ml.augment is None else ml.augment(x), bool(ml.augment))
    now = ml.generator.get_state()
    seed = int(torch.randint(2**31, (), generator=ml.generator))
    ml.generator.set_state(now)
    draws = torch.Generator().manual_seed(seed + DRAWS)
    size = (len(y), ml.samples, ml.likelihood.n_uniforms(f.shape[1:]))
    u = torch.rand(size, generator=draws, dtype=torch.float64)
    return [drawn_targets(case.likelihood, f, u[:, r]) for r in range(ml.samples)]


NAMES = ["mlp", "fixup", "segmentation", "raw"]
NAMES += [name for name in by_name if name.startswith("mlp-")]


@every_root
@every_structure
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_dense_gradients(name, structure, options):
    case = by_name[name]
    ml, x, y = setup(case, structure, augment=shift(), **options)
    targets = targets_of(ml, case, x, y)
    want = expected(ml, case, x, y, targets, root="gradients")
    found = ml(x, y)
    for part in ("log_likelihood", "scatter", "log_det_ratio", "total"):
        close(getattr(found, part), getattr(want, part), rtol=1e-8)
    assert found.status == "approximation"
    assert found.n_blocks == ml.n_data / len(y)


@every_root
def test_reduced_kfac_and_blocks_by_tensor(options):
    case = by_name["mininet"]
    for structure, kwargs in (("kfac", {"kfac": "reduce"}), ("blockdiag", {"blocks": "tensor"})):
        ml, x, y = setup(case, structure, augment=shift(), **options, **kwargs)
        want = expected(
            ml,
            case,
            x,
            y,
            targets_of(ml, case, x, y),
            sharing=kwargs.get("kfac", "expand"),
            blocks=kwargs.get("blocks", "module"),
            root="gradients",
        )
        close(ml(x, y).total, want.total, rtol=1e-8)


def test_many_samples_give_the_ggn():
    exact = marglik(structure="full", root="eigen")(X, Y).log_det_ratio
    few, many = (
        marglik(structure="full", root="sampled", samples=r)(X, Y).log_det_ratio for r in (1, 3000)
    )
    assert abs(many - exact) < 0.02 * exact
    assert few != many


def test_draws_come_from_the_generator():
    values = [
        marglik(root="sampled", generator=torch.Generator().manual_seed(s))(X, Y).total
        for s in (3, 3, 4)
    ]
    assert values[0] == values[1] != values[2]


# ------------------------------------------------------------------------------- likelihoods


@pytest.mark.parametrize("case", CATEGORICAL_CASES)
def test_slopes_of_classes_are_derivatives_of_log_probabilities(case):
    likelihood, f, y = CATEGORICAL_CASES[case]
    f = f.clone().requires_grad_()
    (want,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
    close(likelihood.slope(f, y), want)


@pytest.mark.parametrize("kind", [k for k in LIKELIHOODS if k != "categorical"])
def test_slopes_are_derivatives_of_log_probabilities(kind):
    likelihood = LIKELIHOODS[kind]()
    f = randn(5, 4).requires_grad_()
    y = randn(5, 2 if kind == "heteroscedastic" else 4, seed=2).abs().round()
    (want,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
    factor = likelihood.slope_scale().sqrt() * likelihood.inverse_temperature.sqrt()
    close(factor * likelihood.slope(f, y), want)


EVERY = [
    *((f"categorical {name}", *case) for name, case in CATEGORICAL_CASES.items()),
    ("gaussian", Gaussian(0.7), randn(4, 3), randn(4, 3)),
    ("bernoulli", Bernoulli(), randn(4, 3), torch.ones(4, 3)),
    ("poisson", Poisson(), 2 * randn(4, 3), torch.ones(4, 3)),
    ("heteroscedastic", HeteroscedasticGaussian(), randn(4, 4), randn(4, 2)),
]


@pytest.mark.parametrize("name, likelihood, f, y", EVERY, ids=[case[0] for case in EVERY])
def test_products_of_drawn_slopes_are_the_curvature_on_average(name, likelihood, f, y):
    draws = 10_000
    generator = torch.Generator().manual_seed(0)
    size = (draws, likelihood.n_uniforms(f.shape[1:]))
    f, y = f[:1], y[:1]
    u = torch.rand(size, generator=generator, dtype=torch.float64)
    many = f.expand(draws, *f.shape[1:]), y.expand(draws, *y.shape[1:])
    slopes = likelihood.drawn_slope(*many, u).flatten(1)
    products = slopes.unsqueeze(2) * slopes.unsqueeze(1)
    error = products.std(0) / draws**0.5
    (want,) = likelihood.hessian(f, y)
    assert ((products.mean(0) - want).abs() <= 5 * error + 1e-9).all()


def test_counts_are_drawn_from_their_distribution():
    likelihood = Poisson()
    for rate in (0.01, 3.0, 5000.0):
        f = torch.full((2000, 1), rate).double().log()
        u = torch.linspace(0, 1, 2002, dtype=torch.float64)[1:-1, None]
        counts = (likelihood.drawn_slope(f, f, u) + rate).round()
        cdf = torch.special.gammaincc(counts + 1, torch.full_like(counts, rate))
        below = torch.special.gammaincc(counts.clamp_min(1), torch.full_like(counts, rate))
        assert (cdf >= u).all() and ((below < u) | (counts == 0)).all()


# ------------------------------------------------------------------------------- gradients


def gradient_problem(name, structure, *, likelihood=None, hyper=(), augment=None, **options):
    model, x, y = by_name[name].make()
    prior = GaussianPrior(model, "layerwise", hyper=hyper)
    with torch.no_grad():
        prior.log_precision.copy_(0.3 + 0.4 * randn(len(prior.log_precision), seed=5))
    likelihood = likelihood or Categorical(1.3, learn_temperature=True)
    ml = MarginalLikelihood(
        model,
        likelihood,
        n_data=3 * len(y),
        prior=prior,
        structure=structure,
        hyper=hyper,
        augment=augment,
        **options,
    )
    return ml, x, y


def check(ml, x, y, rtol=5e-5):
    """Autograd against central differences with the same draws, for every hyperparameter."""

    def total():
        ml.generator.manual_seed(0)
        return ml(x, y).total

    parameters = ml.hyperparameters()
    gradients = torch.autograd.grad(total(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        truth = reference.finite_difference(lambda: total().detach(), parameter, 1e-5)
        scale = float(truth.abs().max()) + 1e-3
        torch.testing.assert_close(gradient, truth.to(gradient), rtol=rtol, atol=rtol * scale)


@every_root
@every_structure
def test_gradients_in_prior_temperature_and_augmentation(structure, options):
    check(*gradient_problem("mininet", structure, augment=shift(), **options))


@every_root
@every_structure
def test_gradients_in_noise_and_hyperparameters_of_the_network(structure, options):
    likelihood = Gaussian(0.6, temperature=1.3, learn_temperature=True)
    first = "2.bias"
    check(
        *gradient_problem(
            "mlp-gaussian", structure, likelihood=likelihood, hyper=[first], **options
        )
    )


@every_root
@pytest.mark.parametrize("likelihood", [Bernoulli, Poisson, HeteroscedasticGaussian])
def test_gradients_of_every_likelihood(likelihood, options):
    names = {Bernoulli: "bernoulli", Poisson: "poisson", HeteroscedasticGaussian: "heteroscedastic"}
    made = likelihood(1.2, learn_temperature=True)
    name = f"mlp-{names[likelihood]}"
    check(*gradient_problem(name, "full", likelihood=made, augment=shift(), **options))


class StudentT(FromLogProb):
    """A likelihood with a shape parameter of its own, known only by its log_prob."""

    def __init__(self):
        super().__init__(self._log_prob)
        self.log_width = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def _log_prob(self, f, y):
        squares = (f - y).square() * torch.exp(-2 * self.log_width)
        return -2.5 * torch.log1p(squares / 4).sum(1) - f.shape[1] * self.log_width


def test_gradients_in_a_parameter_of_a_users_likelihood():
    ml, x, y = gradient_problem(
        "mlp-gaussian", "ntk", likelihood=StudentT(), augment=shift(), root="empirical"
    )
    check(ml, x, y)
    with pytest.raises(MarglikError, match="follows prior, noise and temperature only"):
        ml.cached(x, y)


class OwnScale(Gaussian):
    """A subclass that says nothing of slopes: its noise is then part of them."""

    slope = FromLogProb.slope
    slope_scale = FromLogProb.slope_scale
    slope_scale_parameters = ("log_temperature",)


def test_noise_inside_slopes_or_beside_them_is_the_same():
    results = []
    for likelihood in (Gaussian(0.6), OwnScale(0.6)):
        ml, x, y = gradient_problem("mlp-gaussian", "full", likelihood=likelihood, root="empirical")
        total = ml(x, y).total
        results.append([total, *torch.autograd.grad(total, ml.hyperparameters())])
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


# ------------------------------------------------------------------------------- cached, all data


@every_root
@every_structure
def test_a_cached_block_follows_prior_noise_and_temperature(structure, options):
    likelihood = Gaussian(0.7, temperature=1.2, learn_temperature=True)
    ml = marglik(mlp(), likelihood, 12, structure=structure, **options)
    y = randn(6, 3)
    state = ml.generator.get_state()
    cached = ml.cached(X, y)
    with torch.no_grad():
        for parameter in ml.hyperparameters():
            parameter += 0.3
    ml.generator.set_state(state)
    fresh, again = ml(X, y).total, cached().total
    close(again, fresh)
    pairs = [torch.autograd.grad(total, ml.hyperparameters()) for total in (again, fresh)]
    for ours, theirs in zip(*pairs, strict=True):
        close(ours, theirs)


@every_root
@every_structure
def test_all_data_in_batches_are_one_block(structure, options):
    ml = marglik(structure=structure, augment=shift(), **options)
    values = []
    for sizes in ([6], [4, 2]):
        ml.generator.manual_seed(7)
        loader = list(zip(X.split(sizes), Y.split(sizes), strict=True))
        total = ml.full_batch(loader).total
        values.append([total, *torch.autograd.grad(total, ml.hyperparameters())])
    for ours, theirs in zip(*values, strict=True):
        close(ours, theirs)
    if options["root"] == "empirical":
        close(values[0][0], ml(X, Y).total)


# --------------------------------------------------------------------- blocks of rows and data


@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag"])
@every_root
def test_conditioned_blocks_of_all_rows_are_exact_and_smaller_ones_bound_them(structure, options):
    ml = marglik(structure=structure, **options)
    samples = options.get("samples", 1)

    def value(rows, seed=0):
        partition = InducingPartition(
            6, 3, rows, 0.5, n_columns=samples, generator=torch.Generator().manual_seed(seed)
        )
        block = partition.sample()
        evidence = ml(X[block.index], Y[block.index], block=block)
        assert evidence.status == "approximation"
        partition.update(block, evidence)
        return evidence.log_det_ratio.detach()

    everything = value(6 * samples)
    close(value(6 * samples, seed=1), everything)  # a row has the same draw in every block
    if options["root"] == "empirical":
        close(everything, ml(X, Y).log_det_ratio)
    part = torch.stack([value(4 * samples, seed) for seed in range(40)])
    assert part.mean() + 3 * part.std() / 40**0.5 >= everything


def test_averages_of_conditioned_blocks_have_no_interval_of_the_evidence():
    learner = EvidenceLearner(marglik(root="empirical"), (X, Y), rows=4)
    evidence = learner.measure(6)
    assert evidence.interval is None and evidence.status == "approximation"


@every_root
@pytest.mark.parametrize("inducing", [0, 0.5])
def test_a_learner_takes_steps(options, inducing):
    ml = marglik(augment=shift(), **options)
    learner = EvidenceLearner(ml, (X, Y), rows=4, inducing=inducing, steps=2)
    before = ml.prior.log_precision.detach().clone()
    assert learner.round() is not None
    assert (ml.prior.log_precision != before).all()
    other = marglik(augment=shift(), **options)
    other.load_state_dict(ml.state_dict())
    close(other(X, Y).total, ml(X, Y).total)


def test_blocks_of_data_bound_all_data():
    """Theorems 1 and 2 hold for this curvature: blocks of data or of weights never lower log|A|."""
    ml = marglik(root="empirical")
    blocks = Partition(6, 3, 2)
    parts = [ml(X[b.index], Y[b.index], block=b).log_det_ratio for b in blocks]
    whole = ml(X, Y).log_det_ratio
    assert torch.stack(parts).mean() >= whole
    assert marglik(root="empirical", structure="blockdiag")(X, Y).log_det_ratio >= whole
    assert marglik(root="empirical", structure="diag")(X, Y).log_det_ratio >= whole


# ------------------------------------------------------------------------------- posteriors


def test_the_posterior_has_the_empirical_curvature():
    for structure in ("full", "ntk"):
        ml = marglik(mlp(), Gaussian(0.7, temperature=1.2), structure=structure, root="empirical")
        y = randn(6, 3)
        posterior = ml.posterior([(X, y)])
        names = list(ml.weights)
        J = reference.jacobian(ml.model, X, names).detach()
        f = ml.model(X)
        W = reference.slopes(reference.Likelihood("gaussian", 0.7, 1.2), f, [y]).detach()
        V = reference.rows(J, W)
        delta = reference.per_weight(ml.model, names, ml.prior.precision.detach())
        covariance = J @ torch.linalg.inv(torch.diag(delta) + V.mT @ V) @ J.mT
        close(posterior.functional(X)[1], covariance, rtol=1e-7)
        close(posterior.log_evidence.total, ml(X, y).total, rtol=1e-8)
        assert posterior.log_evidence.status == "approximation"
        again = marglik(mlp(), Gaussian(0.7, temperature=1.2), root="empirical").posterior()
        again.load_state_dict(posterior.state_dict())
        close(again.functional(X)[1], covariance, rtol=1e-7)


@every_structure
def test_posteriors_of_drawn_targets(structure):
    ml = marglik(structure=structure, root="sampled", samples=3)
    posterior = ml.posterior([(X[:4], Y[:4]), (X[4:], Y[4:])])
    assert posterior.predict(X).shape == (6, 3)
    assert posterior.log_evidence.status == "approximation"


@every_root
def test_the_interface_of_laplace_torch(options):
    la = Laplace(mlp().float(), "classification", "all", "full", subset=4, root=options["root"])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X.float(), Y), batch_size=3)
    la.fit(loader)
    assert la.log_marginal_likelihood().isfinite()


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "options, words",
    [
        ({"root": "empirical", "outputs": 2}, "no outputs to choose"),
        ({"root": "sampled", "columns": "iid"}, "no outputs to choose"),
        ({"root": "empirical", "samples": 2}, "draws of the targets for root='sampled'"),
        ({"root": "sampled", "samples": 0}, "samples must be a whole number"),
        ({"root": "emprical"}, "root must be one of"),
        ({"root": "sampled", "likelihood": StudentT()}, "StudentT does not say how"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(MarglikError, match=words):
        marglik(**{"likelihood": "classification", **options})


@every_root
def test_columns_are_refused(options):
    ml = marglik(**options)
    with pytest.raises(MarglikError, match="leave out columns="):
        ml(X, Y, torch.tensor([0]))
    block = Partition(6, 3, 4, 1).sample()
    with pytest.raises(MarglikError, match="outputs=None"):
        ml(X[block.index], Y[block.index], block=block)
    block = InducingPartition(6, 3, 4).sample()
    with pytest.raises(MarglikError, match="n_columns="):
        ml(X[block.index], Y[block.index], block=block)
    assert ml(X, Y).total.isfinite()
