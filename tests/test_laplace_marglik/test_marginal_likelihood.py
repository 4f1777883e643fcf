"""How the library is used: cached evaluations, the training loss, single precision, and unusual
models and blocks.
"""

import copy

import pytest
import reference
import torch
from cases import Shift
from marginal_likelihoods import STRUCTURES, assert_reference_value, by_name, close
from small_networks import randn
from torch import nn

from laplace_marglik import Categorical, Gaussian, GaussianPrior, MarginalLikelihood

Y = torch.tensor([0, 1, 2, 0, 1, 2])
every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def marglik(
    model, likelihood="classification", n_data=6, *, prior="layerwise", hyper=(), **options
):
    gaussian = GaussianPrior(model, prior, hyper=hyper)
    with torch.no_grad():
        gaussian.log_precision.copy_(0.4 * randn(len(gaussian.log_precision), seed=7))
    return MarginalLikelihood(
        model, likelihood, n_data=n_data, prior=gaussian, hyper=hyper, **options
    )


def mlp(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


# ------------------------------------------------------------------------------------------- cached


def moved(ml):
    """Other values of everything that a cached block follows."""
    with torch.no_grad():
        for i, p in enumerate(ml.prior.parameters()):
            p += 0.5 * randn(*p.shape, seed=i)
        for p in ml.likelihood.parameters():
            p += 0.3


@every_structure
@pytest.mark.parametrize("prior", [{"*bias": "biases", "*": "others"}, "diagonal"], ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "paper", "fisher"])
def test_cached_block_follows_prior_noise_and_temperature(structure, prior, kind):
    model, x = mlp(), randn(6, 4)
    likelihood, y, options = (
        Categorical(1.2, learn_temperature=True),
        Y,
        {"root": kind, "outputs": 2},
    )
    if kind == "gaussian":
        likelihood, y, options = (
            Gaussian(0.7, temperature=1.2, learn_temperature=True),
            randn(6, 3),
            {},
        )
    ml = marglik(
        model, likelihood, 12, prior=prior, structure=structure, augment=Shift(2), **options
    )
    columns = torch.tensor([2, 0]) if options else None
    cached = ml.cached(x, y, columns)
    followed = [p for p in ml.hyperparameters() if p is not ml.augment.eta]
    calls = []
    for _ in range(2):
        moved(ml)
        handle = model.register_forward_hook(lambda *_: calls.append(1))
        again = cached()
        gradients = torch.autograd.grad(again.total, followed)
        handle.remove()
        fresh = ml(x, y, columns)
        for part in ("total", "log_likelihood", "scatter", "log_det_ratio"):
            close(getattr(again, part), getattr(fresh, part))
        assert (again.n_blocks, again.status) == (fresh.n_blocks, fresh.status)
        for ours, theirs in zip(gradients, torch.autograd.grad(fresh.total, followed), strict=True):
            close(ours, theirs)
    assert not calls  # the network was not run again


@every_structure
def test_cached_full_batch_follows_too(structure):
    ml, x = (
        marglik(mlp(), Categorical(1.2, learn_temperature=True), structure=structure),
        randn(6, 4),
    )
    cached = ml.cached_full_batch([(x[:4], Y[:4]), (x[4:], Y[4:])])
    moved(ml)
    values = [
        [e.total, *torch.autograd.grad(e.total, ml.hyperparameters())] for e in (cached(), ml(x, Y))
    ]
    for ours, theirs in zip(*values, strict=True):
        close(ours, theirs)


# ------------------------------------------------------------------------- loss and hyperparameters


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diagonal"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_map_loss_is_the_negative_log_posterior_per_datum(kind, prior):
    model, x = mlp(), randn(6, 4)
    y, likelihood = (
        (Y, Categorical(1.3))
        if kind == "classification"
        else (randn(6, 3), Gaussian(0.6, temperature=1.3))
    )
    augment = Shift(3)
    ml = marglik(model, likelihood, 20, prior=prior, augment=augment)
    loss = ml.map_loss(x, y)

    f = model(augment(x).detach().flatten(0, 1)).unflatten(0, (6, 3)).mean(1)
    log_p = reference.log_prob(
        reference.Likelihood("categorical" if kind == "classification" else "gaussian", 0.6), f, y
    )
    penalty = sum(
        (ml.prior.precisions()[n] * w.flatten().square()).sum() for n, w in model.named_parameters()
    )
    by_hand = -log_p / 6 / 1.3 + penalty / (2 * 20)
    close(loss, by_hand)
    weights = list(model.parameters())
    pairs = zip(
        torch.autograd.grad(loss, weights, retain_graph=True),
        torch.autograd.grad(by_hand, weights),
        strict=True,
    )
    for ours, theirs in pairs:
        close(ours, theirs)


@pytest.mark.parametrize(
    "likelihood", [Categorical(1.3, learn_temperature=True), Gaussian(0.6, learn_temperature=True)]
)
def test_map_loss_never_reaches_a_hyperparameter(likelihood):
    y = Y if isinstance(likelihood, Categorical) else randn(6, 3)
    ml = marglik(mlp(), likelihood, hyper=["0.bias"], augment=Shift(2))
    gradients = torch.autograd.grad(
        ml.map_loss(randn(6, 4), y), ml.hyperparameters(), allow_unused=True
    )
    assert len(gradients) >= 4 and all(g is None for g in gradients)
    assert all(p.requires_grad for p in ml.hyperparameters())


@every_structure
def test_gradients_in_some_hyperparameters_are_those_in_all(structure):
    ml = marglik(mlp(), Gaussian(0.6), structure=structure, hyper=["0.bias"], augment=Shift(2))
    x, y = randn(6, 4), randn(6, 3)
    everything = ml.hyperparameters()
    together = torch.autograd.grad(ml(x, y).total, everything)
    assert len(together) == 4
    for parameter, gradient in zip(everything, together, strict=True):
        close(torch.autograd.grad(ml(x, y).total, parameter)[0], gradient)
        for other in everything:  # and when the others are not to be learned
            other.requires_grad_(other is parameter)
        close(torch.autograd.grad(ml(x, y).total, parameter)[0], gradient)
        for other in everything:
            other.requires_grad_(True)


# --------------------------------------------------------------------------------- single precision


@every_structure
@pytest.mark.parametrize("name", ["mininet", "fixup"])
def test_single_precision(name, structure):
    model, x, y = by_name[name].make()
    single = copy.deepcopy(model).float()
    double = copy.deepcopy(single).double()  # the same weights
    x = x.float()
    results = []
    for net, inputs in ((single, x), (double, x.double())):
        ml = marglik(net, n_data=24, structure=structure, augment=Shift(3))
        total = ml(inputs, y).total
        results.append([total.detach(), *torch.autograd.grad(total, ml.hyperparameters())])
    (value, *gradients), (want, *wanted) = results
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, want, rtol=1e-5, atol=0)
    for gradient, truth in zip(gradients, wanted, strict=True):
        assert float((gradient - truth).abs().max()) < 1e-4 * float(truth.abs().max())


# ------------------------------------------------------------------------ unusual models and blocks


@every_structure
@pytest.mark.parametrize("name", ["mlp", "mininet", "transformer", "raw"])
def test_a_block_of_one(name, structure):
    model, x, y = by_name[name].make()
    if structure == "kfac" and name == "transformer":
        pytest.skip("the reference has no Kronecker form of attention")
    assert_reference_value(marglik(model, n_data=9, structure=structure), x[:1], y[:1])


@every_structure
def test_a_single_class_has_no_curvature(structure):
    ml = marglik(mlp(1), Categorical(learn_temperature=True), structure=structure, augment=Shift(2))
    evidence = ml(randn(6, 4), torch.zeros(6).long())
    assert evidence.log_det_ratio == 0 and evidence.log_likelihood == 0
    assert all(
        g.isfinite().all() for g in torch.autograd.grad(evidence.total, ml.hyperparameters())
    )


@every_structure
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_inputs(structure, value):
    assert_reference_value(
        marglik(mlp(), structure=structure), torch.full((6, 4), value).double(), Y
    )


@every_structure
def test_outputs_without_an_output_axis(structure):
    """A regression whose network returns [n] instead of [n, 1]."""
    model = mlp(1)
    squeezed = nn.Sequential(*model, nn.Flatten(0))
    x, y = randn(6, 4), randn(6)
    values = [
        marglik(net, "regression", structure=structure)(x, y).total for net in (model, squeezed)
    ]
    close(*values)
