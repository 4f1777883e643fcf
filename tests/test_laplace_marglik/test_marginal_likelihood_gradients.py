"""Gradients in every hyperparameter, for every structure, against finite differences of our own
value in float64.

The values are checked against the naive reference in test_structure; with exact values, finite
differences of them are the independent truth for gradients, also through layers where torch.func's
second derivatives are wrong.
"""

import pytest
import reference
import torch
from cases import CASES, Shift
from marginal_likelihoods import STRUCTURES, by_name
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
    Poisson,
)


def make(case, structure, *, prior="layerwise", likelihood=None, augment=None, hyper=(), **options):
    model, x, y = case.make()
    model.eval()
    torch.manual_seed(5)
    gaussian_prior = GaussianPrior(model, prior, hyper=hyper)
    with torch.no_grad():
        gaussian_prior.log_precision.normal_(0.3, 0.4)
    ml = MarginalLikelihood(
        model,
        likelihood or Categorical(),
        n_data=3 * len(y),
        prior=gaussian_prior,
        structure=structure,
        augment=augment,
        hyper=hyper,
        **options,
    )
    return ml, x, y


def check(ml, x, y, columns=None, rtol=2e-5):
    """Autograd against central differences, for every hyperparameter; the weights must get
    nothing.
    """

    def total():
        ml.generator.manual_seed(0)
        return ml(x, y, columns).total

    parameters = ml.hyperparameters()
    gradients = torch.autograd.grad(total(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        truth = reference.finite_difference(lambda: total().detach(), parameter, 1e-5)
        scale = float(truth.abs().max()) + 1e-3
        torch.testing.assert_close(gradient, truth.to(gradient), rtol=rtol, atol=rtol * scale)
    assert all(w.grad is None for w in ml.weights.values())


def shift():
    augment = Shift(3).double()
    with torch.no_grad():
        augment.eta.copy_(torch.tensor([0.2, -0.3]))
    return augment


AUGMENTABLE = [case for case in CASES if case.augmentable]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", AUGMENTABLE, ids=str)
def test_augmentation_and_prior(case, structure):
    ml, x, y = make(case, structure, augment=shift())
    check(ml, x, y, torch.tensor([1]))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "mininet", "fixup", "transformer"])
def test_all_outputs(name, structure):
    case = by_name[name]
    ml, x, y = make(case, structure, augment=shift() if case.augmentable else None)
    check(ml, x, y)


@pytest.mark.parametrize("root", ["fisher", "symmetric", "eigen"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_root(structure, root):
    ml, x, y = make(by_name["mininet"], structure, augment=shift(), root=root)
    check(ml, x, y, torch.tensor([0, 2]), rtol=1e-4)


@pytest.mark.parametrize("prior", ["scalar", "diagonal", {"*bias": "biases", "*": "rest"}], ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_prior(structure, prior):
    ml, x, y = make(by_name["repeated"], structure, prior=prior, augment=shift())
    check(ml, x, y, torch.tensor([1]))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_reduce_and_expand(structure):
    ml, x, y = make(by_name["mininet"], structure, augment=shift(), kfac="reduce", blocks="tensor")
    check(ml, x, y, torch.tensor([1]))
    check(ml, x, y)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_observation_noise_and_temperature(structure):
    likelihood = Gaussian(0.6, temperature=1.3, learn_temperature=True)
    ml, x, y = make(by_name["mlp-gaussian"], structure, likelihood=likelihood, augment=shift())
    check(ml, x, y)


@pytest.mark.parametrize("likelihood", [Bernoulli, Poisson, HeteroscedasticGaussian])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_likelihood(structure, likelihood):
    name = {
        Bernoulli: "mlp-bernoulli",
        Poisson: "mlp-poisson",
        HeteroscedasticGaussian: "mlp-heteroscedastic",
    }[likelihood]
    ml, x, y = make(
        by_name[name],
        structure,
        likelihood=likelihood(1.2, learn_temperature=True),
        augment=shift(),
    )
    check(ml, x, y, torch.tensor([1]))


class StudentT(FromLogProb):
    """A likelihood with a shape parameter of its own, known only by its log_prob."""

    def __init__(self):
        super().__init__(
            lambda f, y: (
                -(4 + 1)
                / 2
                * torch.log1p((f - y).square() * torch.exp(-2 * self.log_width) / 4).sum(1)
                - f.shape[1] * self.log_width
            )
        )
        self.log_width = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_of_a_user_defined_likelihood(structure):
    ml, x, y = make(by_name["mlp-gaussian"], structure, likelihood=StudentT(), augment=shift())
    check(ml, x, y)
    check(ml, x, y, torch.tensor([1]))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["fixup", "mlp", "raw"])
def test_hyperparameters_inside_the_network(name, structure):
    case = by_name[name]
    model, _, _ = case.make()
    first = next(n for n, p in model.named_parameters() if p.requires_grad)
    ml, x, y = make(case, structure, hyper=[first])
    check(ml, x, y, torch.tensor([1]))


@pytest.mark.parametrize("outputs", [1, None])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_full_batch_equals_one_shot_with_gradients(structure, outputs):
    ml, x, y = make(by_name["mininet"], structure, augment=shift(), outputs=outputs)
    ml.n_data = len(y)

    def evaluated(evidence):
        return [evidence.total.detach(), *torch.autograd.grad(evidence.total, ml.hyperparameters())]

    streamed = evaluated(ml.full_batch([(x[:2], y[:2]), (x[2:], y[2:])]))
    # which one it drew is not said
    columns = [None] if outputs is None else [torch.tensor([c]) for c in range(3)]
    candidates = [evaluated(ml(x, y, c)) for c in columns]
    one_shot = min(candidates, key=lambda c: abs(c[0] - streamed[0]).item())
    for ours, theirs in zip(streamed, one_shot, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_backward_accumulates_and_repeats(structure):
    ml, x, y = make(by_name["mininet"], structure, augment=shift())
    evidence = ml(x, y, torch.tensor([1]))
    evidence.total.backward(retain_graph=True)
    once = [p.grad.clone() for p in ml.hyperparameters()]
    evidence.total.backward()
    for p, first in zip(ml.hyperparameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * first)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_prior_gradient_alone_needs_no_second_pass(structure, monkeypatch):
    from asdl_marglik.passes.two_passes import Passes

    ml, x, y = make(by_name["mininet"], structure, augment=shift())
    monkeypatch.setattr(Passes, "second", lambda *_: pytest.fail("a second pass ran"))
    torch.autograd.grad(ml(x, y).total, ml.prior.log_precision)


def test_a_step_between_evidence_and_backward_is_refused():
    ml, x, y = make(by_name["mininet"], "ntk", augment=shift())
    evidence = ml(x, y, torch.tensor([1]))
    with torch.no_grad():
        next(iter(ml.weights.values())).add_(0.1)
    with pytest.raises(CurvatureError, match="before any optimiser step"):
        evidence.total.backward()
