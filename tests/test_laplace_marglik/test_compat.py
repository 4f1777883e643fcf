"""The familiar interface against laplace-torch 0.3, number by number, in float64."""

import io
import math
import warnings
from collections import Counter

import pytest
import torch
from small_networks import filled, randn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_marglik import Bernoulli, MarglikError
from laplace_marglik.compat import (
    DiagLaplace,
    FullLaplace,
    KronLaplace,
    Laplace,
    marglik_training,
)

laplace = pytest.importorskip("laplace")
pytest.importorskip("curvlinops")
pytestmark = pytest.mark.filterwarnings("ignore")

N, C = 11, 3
STRUCTURES = ["full", "kron", "diag"]
SUBSETS = ["all", "last_layer"]
LIKELIHOODS = ["regression", "classification"]
PRIORS = ["scalar", "layerwise", "diag"]
compared: Counter = Counter()


def network():
    return filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)))


def data(likelihood, batch_size=4):
    x = randn(N, 4, seed=3)
    y = torch.arange(N) % C if likelihood == "classification" else randn(N, C, seed=4)
    return x, y, DataLoader(TensorDataset(x, y), batch_size=batch_size)


def accepted(structure, subset, prior):
    """What laplace-torch takes: a scalar for the last layer, no diagonal prior for kron."""
    if subset == "last_layer" and prior == "layerwise":
        return False
    return not (structure == "kron" and prior == "diag")


def precision(prior, subset):
    n_layers, n_params = (4, 43) if subset == "all" else (2, 18)
    length = {"scalar": 1, "layerwise": n_layers, "diag": n_params}[prior]
    return torch.exp(0.4 * randn(length, seed=8))


def both(structure, subset, likelihood, prior="scalar", **options):
    """laplace-torch's and ours, fitted to the same."""
    x, y, loader = data(likelihood)
    if likelihood == "regression":
        options.setdefault("sigma_noise", 0.7)
    pair = []
    for make in (laplace.Laplace, Laplace):
        la = make(network(), likelihood, subset, structure, prior_precision=1.0, **options)
        la.fit(loader)
        la.prior_precision = precision(prior, subset)
        pair.append(la)
    return *pair, x, y


def same(label, got, want, tolerance=1e-6):
    """Equal up to a part of the largest entry: laplace-torch's own GGN is right to 1e-8 of it."""
    compared[label] += 1
    assert got.shape == want.shape and got.dtype == want.dtype, label
    largest = max(1.0, float(want.detach().abs().max()))
    difference = float((got.detach() - want.detach()).abs().max())
    assert difference <= tolerance * largest, (label, difference, largest)


def within_errors(label, got, want):
    """Means [...] of two sets of samples [k, ...] agree within 4.5 standard errors."""
    compared[label] += 1
    error = ((got.var(0) / len(got)) + (want.var(0) / len(want))).sqrt()
    assert ((got.mean(0) - want.mean(0)).abs() < 4.5 * error + 1e-12).all(), label


GRID = [
    (structure, subset, likelihood, prior)
    for structure in STRUCTURES
    for subset in SUBSETS
    for likelihood in LIKELIHOODS
    for prior in PRIORS
    if accepted(structure, subset, prior)
]


COMPARISONS = {"classification": 19, "regression": 22}  # of each entry of the table


@pytest.mark.parametrize("structure, subset, likelihood, prior", GRID)
def test_the_whole_table(structure, subset, likelihood, prior):
    before = sum(compared.values())
    theirs, ours, x, _ = both(structure, subset, likelihood, prior)
    for name in (
        "log_likelihood",
        "scatter",
        "log_det_ratio",
        "log_det_prior_precision",
        "log_det_posterior_precision",
        "mean",
        "prior_precision_diag",
    ):
        same(name, getattr(ours, name), getattr(theirs, name).detach())
    same("evidence", ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    assert (ours.n_params, ours.n_layers, ours.n_data, ours.n_outputs) == (
        theirs.n_params,
        theirs.n_layers,
        theirs.n_data,
        theirs.n_outputs,
    )
    f, variance = ours._functional(x)
    f_theirs, variance_theirs = theirs._glm_predictive_distribution(x)
    same("mean of outputs", f, f_theirs)
    same("variance of outputs", variance, variance_theirs)
    J = randn(5, C, ours.n_params, seed=9)
    same("functional_variance", ours.functional_variance(J), theirs.functional_variance(J))
    same("functional_covariance", ours.functional_covariance(J), theirs.functional_covariance(J))
    if likelihood == "classification":
        for link in ("probit", "bridge", "bridge_norm"):
            same(link, ours(x, link_approx=link), theirs(x, link_approx=link))
    else:
        for options in ({}, {"joint": True}, {"diagonal_output": True}):
            for got, want in zip(ours(x, **options), theirs(x, **options), strict=True):
                same(f"regression {options}", got, want)
    torch.manual_seed(0)
    for name in ("functional_samples", "predictive_samples"):
        got = getattr(ours, name)(x, n_samples=3000)
        want = getattr(theirs, name)(x, n_samples=3000)
        assert got.shape == want.shape == (3000, N, C)
        within_errors(name, got, want)
        if name == "functional_samples":
            within_errors("squares of samples", got.square(), want.square())
    within_errors("sample", ours.sample(3000), theirs.sample(3000))
    assert sum(compared.values()) - before == COMPARISONS[likelihood]


def test_the_table_is_whole():
    """Every combination that laplace-torch accepts: 533 comparisons in all."""
    assert len(GRID) == 26
    assert sum(COMPARISONS[likelihood] for _, _, likelihood, _ in GRID) == 533


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_network_itself_with_sampled_weights(structure):
    torch.manual_seed(0)
    theirs, ours, x, _ = both(structure, "all", "classification")
    options = {"pred_type": "nn", "link_approx": "mc", "n_samples": 400}
    assert ours(x, **options).shape == (N, C)
    got = ours.predictive_samples(x, pred_type="nn", n_samples=400)
    want = theirs.predictive_samples(x, pred_type="nn", n_samples=400)
    within_errors("nn", got, want)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_convolutions_and_matrices(structure, likelihood):
    model = filled(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, C)))
    x = randn(6, 1, 3, 3, seed=1)
    y = torch.arange(6) % C if likelihood == "classification" else randn(6, C, seed=2)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    pair = [make(model, likelihood, "all", structure) for make in (laplace.Laplace, Laplace)]
    for la in pair:
        la.fit(loader)
    theirs, ours = pair
    same("evidence", ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    same("variance", ours._functional(x)[1], theirs._glm_predictive_distribution(x)[1])
    if structure == "full":
        same("precision", ours.posterior_precision, theirs.posterior_precision)
        same("covariance", ours.posterior_covariance, theirs.posterior_covariance)
    if structure == "diag":
        same("precision", ours.posterior_precision, theirs.posterior_precision)
        same("variance", ours.posterior_variance, theirs.posterior_variance)
        same("scale", ours.posterior_scale, theirs.posterior_scale)


# -------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_of_the_evidence(structure):
    """Of laplace-torch in the prior; in the noise of finite differences, where it is wrong."""
    theirs, ours, *_ = both(structure, "all", "regression", "layerwise")
    leaves = {}
    for name, la in (("theirs", theirs), ("ours", ours)):
        prior = precision("layerwise", "all").log().requires_grad_()
        sigma = torch.tensor([math.log(0.7)], dtype=torch.float64, requires_grad=True)
        la.log_marginal_likelihood(prior.exp(), sigma.exp()).backward()
        leaves[name] = (prior.grad, sigma.grad)
    same("gradient in the prior", leaves["ours"][0], leaves["theirs"][0])
    prior = precision("layerwise", "all")
    values = [
        float(ours.log_marginal_likelihood(prior, 0.7 * math.exp(step))) for step in (1e-5, -1e-5)
    ]
    finite = torch.tensor([(values[0] - values[1]) / 2e-5], dtype=torch.float64)
    torch.testing.assert_close(leaves["ours"][1], finite, rtol=1e-6, atol=1e-6)
    if structure != "kron":  # there laplace-torch leaves out the log-determinant's part
        same("gradient in the noise", leaves["ours"][1], leaves["theirs"][1])


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ntk", "blockdiag"])
def test_backprop_to_inputs(structure):
    _, _, loader = data("regression")
    la = Laplace(network(), "regression", "all", structure, enable_backprop=True)
    la.fit(loader)
    x = randn(2, 4, seed=7).requires_grad_()
    f, variance = la(x)
    (f.sum() + variance.sum()).backward()
    assert x.grad.abs().sum() > 0
    if structure in STRUCTURES:
        theirs = laplace.Laplace(network(), "regression", "all", structure, enable_backprop=True)
        theirs.fit(loader)
        point = x.detach().clone().requires_grad_()
        f, variance = theirs(point)
        (f.sum() + variance.sum()).backward()
        same("gradient in inputs", x.grad, point.grad)
    la.enable_backprop = False
    assert not la(x)[1].requires_grad


# ----------------------------------------------------------------------------------------- tuning


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", PRIORS)
def test_optimize_prior_precision(structure, prior):
    if not accepted(structure, "all", prior):
        pytest.skip("laplace-torch refuses it")
    theirs, ours, *_ = both(structure, "all", "classification")
    for la in (theirs, ours):
        la.optimize_prior_precision(method="marglik", n_steps=20, prior_structure=prior)
    same("tuned", ours.prior_precision, theirs.prior_precision)


def test_gridsearch():
    """With a loss of all predictions; laplace-torch never resets its own running metric."""
    theirs, ours, x, y = both("kron", "all", "classification")
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    options = {"method": "gridsearch", "val_loader": loader, "grid_size": 9}

    def negative_log_likelihood(p, y):
        return nn.functional.nll_loss(p.log(), y)

    ours.optimize_prior_precision(**options)
    theirs.optimize_prior_precision(loss=negative_log_likelihood, **options)
    same("gridsearch", ours.prior_precision, theirs.prior_precision)

    def brier(p, y):
        return (p - nn.functional.one_hot(y, C)).square().sum(1).mean()

    for la in (theirs, ours):
        la.optimize_prior_precision(loss=brier, **options)
    same("gridsearch with a loss", ours.prior_precision, theirs.prior_precision)
    _, regression, x, y = both("kron", "all", "regression")
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    regression.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=5)
    assert len(regression.prior_precision) == 1


@pytest.mark.parametrize(
    "likelihood, structure, prior",
    [
        ("classification", "kron", "layerwise"),
        ("classification", "full", "scalar"),
        ("regression", "diag", "diag"),
        ("regression", "full", "layerwise"),
    ],
)
def test_marglik_training(likelihood, structure, prior):
    x = randn(N, 4, seed=3)
    y = torch.arange(N) % 2 if likelihood == "classification" else randn(N, 1, seed=4)
    outputs = 2 if likelihood == "classification" else 1
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    results = []
    for train, options in (
        (laplace.marglik_training, {"backend": laplace.curvature.CurvlinopsGGN}),
        (marglik_training, {}),
    ):
        model = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)))
        results.append(
            train(
                model,
                loader,
                likelihood,
                structure,
                n_epochs=6,
                n_hypersteps=3,
                n_epochs_burnin=2,
                marglik_frequency=2,
                prior_structure=prior,
                optimizer_kwargs={"lr": 1e-2},
                **options,
            )
        )
    (theirs, _, margliks, losses), (ours, model, own_margliks, own_losses) = results
    assert len(own_margliks) == len(margliks) == 9
    same("margliks", torch.tensor(own_margliks), torch.tensor(margliks), 1e-5)
    same("losses", torch.tensor(own_losses), torch.tensor(losses), 1e-5)
    same("prior", ours.prior_precision, theirs.prior_precision.detach())
    same(
        "noise",
        ours.sigma_noise.reshape(()),
        torch.as_tensor(theirs.sigma_noise).reshape(()).double(),
    )
    assert ours.model is model and model.training


# ------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ntk", "blockdiag"])
@pytest.mark.parametrize("subset", SUBSETS)
def test_a_state_goes_through_a_file(structure, subset):
    x, _, loader = data("regression")
    la = Laplace(network(), "regression", subset, structure, sigma_noise=0.7)
    la.fit(loader)
    la.optimize_prior_precision(n_steps=3)
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    other = Laplace(network(), "regression", subset, structure)
    other.load_state_dict(torch.load(file, weights_only=True))
    same("restored evidence", other.log_marginal_likelihood(), la.log_marginal_likelihood(), 1e-12)
    same("restored variance", other(x)[1], la(x)[1], 1e-12)
    other.optimize_prior_precision(n_steps=2)  # and can be tuned on
    kind = {"full": "diag"}.get(structure, "full")
    with pytest.raises(MarglikError, match="use the same hessian_structure"):
        Laplace(network(), "regression", subset, kind).load_state_dict(la.state_dict())
    moved = network()
    with torch.no_grad():
        moved[2].weight.add_(1.0)
    with pytest.raises(MarglikError, match="fitted around other weights"):
        Laplace(moved, "regression", subset, structure).load_state_dict(la.state_dict())


# ---------------------------------------------------------------------------- ours, and what is not


def test_structures_of_this_library():
    x, _, loader = data("classification")
    exact = FullLaplace(network(), "classification")
    kernel = Laplace(network(), "classification", "all", "ntk")
    few = Laplace(network(), "classification", "all", "ntk", inducing=5)
    blocks = Laplace(network(), "classification", "all", "blockdiag")
    for la in (exact, kernel, few, blocks):
        la.fit(loader)
        la.prior_precision = precision("layerwise", "all")
    same("ntk is full", kernel._functional(x)[1], exact._functional(x)[1], 1e-8)
    same("ntk is full", kernel.log_det_ratio, exact.log_det_ratio, 1e-8)
    excess = few._functional(x)[1] - exact._functional(x)[1]
    assert torch.linalg.eigvalsh(excess).min() > -1e-9
    assert blocks.log_det_ratio > exact.log_det_ratio  # Fischer
    head = Laplace(network(), "classification", ["2.*"], "full")
    last = Laplace(network(), "classification", "last_layer", "full")
    for la in (head, last):
        la.fit(loader)
    same("patterns", head(x), last(x), 1e-12)


def test_other_likelihoods_augmentation_and_modes():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, C)).double().train()
    x = randn(N, 4)
    y = (randn(N, C, seed=2) > 0).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    la = KronLaplace(
        model, Bernoulli(), augment=lambda x: torch.stack([x, x + 0.1], 1), prior_precision=2.0
    )
    la.fit(loader)
    assert la(x).shape == (N, C) and la.log_marginal_likelihood().isfinite()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda m: Laplace(m, "classification", "all", "lowrank"), "hessian_structure='ntk'"),
        (lambda m: Laplace(m, "classification", "all", "gp"), "inducing= rows"),
        (
            lambda m: Laplace(m, "classification", "all", "gp", functional_approximation="nystrom"),
            "ELLA and VaLLA are not offered",
        ),
        (lambda m: Laplace(m, "reward_modeling"), "reward modelling is not offered"),
        (lambda m: Laplace(m, "classification", "subnetwork", "full"), "name whole tensors"),
        (lambda m: Laplace(m, "classification", "first", "full"), "'all', 'last_layer'"),
        (lambda m: Laplace(m, "classification", "all", "dense"), "must be one of full"),
        (lambda m: DiagLaplace(m, "classification", sigma_noise=0.5), "regression"),
        (lambda m: DiagLaplace(m, "classification", prior_precision=-1.0), "must be positive"),
        (lambda m: DiagLaplace(m, "classification", prior_precision=torch.ones(3)), "got 3"),
        (lambda m: DiagLaplace(m, "classification", prior_mean=torch.ones(3)), "prior_mean"),
        (lambda m: DiagLaplace(m, "regression", sigma_noise=torch.ones(2)), "Heteroscedastic"),
        (lambda m: KronLaplace(m, "classification", damping=True), "damping is not offered"),
        (lambda m: KronLaplace(m, "classification", prior_prec=2.0), "unknown argument"),
        (lambda m: KronLaplace(m, "classification")(torch.zeros(1, 4)), "has not been fitted"),
        (lambda m: KronLaplace(m, "classification").log_marginal_likelihood(), "not been fitted"),
        (lambda m: Laplace(m, "classification").mean, "not known before fit"),
    ],
)
def test_refused(make, message):
    with pytest.raises(MarglikError, match=message):
        make(network())


def test_single_precision_and_batches_that_are_mappings():
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network().float()

        def forward(self, batch):
            return self.net(batch["input_ids"])

    x, y, loader = data("classification")
    batches = [{"input_ids": a.float(), "labels": b} for a, b in loader]
    keyed = Laplace(Keyed(), "classification", "all", "kron")
    keyed.fit(batches)
    want = Laplace(network(), "classification", "all", "kron")
    want.fit(loader)
    for precision in (1.0, 1e-7, 1e4):  # the second needs sums in float64
        keyed.prior_precision = want.prior_precision = precision
        got = keyed({"input_ids": x.float()})
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want(x), rtol=1e-3, atol=1e-4)
        evidence = keyed.log_marginal_likelihood().double()
        torch.testing.assert_close(evidence, want.log_marginal_likelihood(), rtol=1e-3, atol=1e-3)
    with pytest.raises(MarglikError, match="does not run on these inputs"):
        keyed({"labels": y})


def test_bad_calls():
    x, _, loader = data("classification")
    la = KronLaplace(network(), "classification")
    la.fit(loader)
    with pytest.raises(MarglikError, match="pred_type must be glm or nn"):
        la(x, pred_type="gp")
    with pytest.raises(MarglikError, match="link_approx must be probit or mc"):
        la(x, link_approx="softmax")
    with pytest.raises(MarglikError, match="needs link_approx='mc'"):
        la(x, pred_type="nn")
    with pytest.raises(MarglikError, match="only be changed for regression"):
        la.log_marginal_likelihood(sigma_noise=torch.tensor(0.5))
    with pytest.raises(MarglikError, match="needs val_loader"):
        la.optimize_prior_precision(method="gridsearch")
    with pytest.raises(MarglikError, match="method must be marglik or gridsearch"):
        la.optimize_prior_precision(method="CV")
    with pytest.raises(MarglikError, match="override=False"):
        la.fit(loader, override=False)
    with pytest.raises(MarglikError, match=r"expected Jacobians \[n, C, 43\]"):
        la.functional_variance(torch.zeros(2, C, 5).double())


def test_a_backend_is_accepted_with_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        KronLaplace(network(), "classification", backend=object)
    assert [str(w.message).split(" are ")[0] for w in caught] == ["backend and its arguments"]
