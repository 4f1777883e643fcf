"""The evidence of a block in the familiar interface: values, gradients, misuse."""

import pytest
import torch
from small_networks import filled, randn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_marglik import GaussianPrior, MarginalLikelihood, MarglikError
from laplace_marglik.compat import Laplace, marglik_training

N, C = 11, 3
LENGTHS = {"scalar": 1, "layerwise": 4, "diagonal": 43}


def fitted(likelihood="regression", structure="kron", weights="all", **options):
    torch.manual_seed(0)
    model = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)))
    x = randn(N, 4, seed=3)
    y = torch.arange(N) % C if likelihood == "classification" else randn(N, C, seed=4)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    la = Laplace(model, likelihood, weights, structure, **options)
    la.fit(loader)
    return la


@pytest.mark.parametrize("prior", LENGTHS)
@pytest.mark.parametrize("structure", ["kron", "diag", "full", "ntk"])
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_it_is_that_of_the_marginal_likelihood(likelihood, structure, prior):
    options = {"subset": 5, "outputs": 2, "root": "fisher", "prior_mean": 0.1}
    la = fitted(likelihood, structure, **options)
    precision = torch.exp(0.4 * randn(LENGTHS[prior], seed=8))
    found = la.log_marginal_likelihood(precision)
    names = {"kron": "kfac"}
    means = {name: torch.full_like(w, 0.1) for name, w in la.model.named_parameters()}
    ml = MarginalLikelihood(
        la.model,
        likelihood,
        n_data=N,
        prior=GaussianPrior(la.model, prior, mean=means),
        structure=names.get(structure, structure),
        outputs=2,
        root="fisher",
        generator=torch.Generator().manual_seed(la._block.seed),
    )
    ml.prior.log_precision.data.copy_(precision.log())
    expected = ml(la._block.x, la._block.y).total
    assert len(la._block.y) == 5
    torch.testing.assert_close(found, expected.detach().to(found), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_all_data_and_columns_give_the_evidence_of_all_data(weights):
    block, whole = (fitted(weights=weights, **o) for o in ({"subset": N}, {}))
    values = [la.log_marginal_likelihood(torch.tensor(2.0), 0.7) for la in (block, whole)]
    torch.testing.assert_close(*values, rtol=1e-8, atol=1e-8)
    x = randn(3, 4, seed=9)
    for ours, expected in zip(block(x), whole(x), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["kron", "diag", "ntk"])
def test_gradients_in_precision_and_noise(structure, weights):
    la = fitted(structure=structure, weights=weights, subset=5, outputs=2)
    h = torch.tensor([1.3, 0.8], dtype=torch.float64, requires_grad=True)

    def value(h):
        return la.log_marginal_likelihood(h[0], h[1])

    (gradient,) = torch.autograd.grad(value(h), h)
    step = 1e-5
    for i in range(2):
        moved = step * torch.eye(2, dtype=torch.float64)[i]
        difference = value(h.detach() + moved) - value(h.detach() - moved)
        assert float(gradient[i]) == pytest.approx(float(difference) / (2 * step), rel=1e-5)


def test_every_data_point_is_drawn_equally_often():
    counts = torch.zeros(N)
    la = fitted(subset=4)
    x = la._loader.loader.dataset.tensors[0]
    for _ in range(200):
        la.fit(la._loader.loader)
        counts += (la._block.x[:, None] == x[None]).all(2).sum(0)
    share = 4 / N
    assert int(counts.sum()) == 800
    error = (share * (1 - share) * 200) ** 0.5
    assert float((counts - 200 * share).abs().max()) < 4.5 * error


def test_precisions_are_tuned_and_networks_trained_by_it():
    la = fitted("classification", subset=6, outputs=1)
    la.optimize_prior_precision(n_steps=3)
    assert float(la.prior_precision) != 1
    loader = la._loader.loader
    trained, *_, losses = marglik_training(
        la.model, loader, n_epochs=2, n_hypersteps=2, subset=6, outputs=1, root="fisher"
    )
    assert len(losses) == 2 and len(trained._block.y) == 6


def test_a_loader_that_can_be_read_once_serves():
    whole = fitted(weights="last_layer")
    pairs = list(whole._loader.loader)
    once = Laplace(whole.model, "regression", "last_layer", "kron", subset=N)
    once.fit(pair for pair in pairs)
    assert once.n_data == N and len(once._block.y) == N
    values = [la.log_marginal_likelihood() for la in (once, whole)]
    torch.testing.assert_close(*values, rtol=1e-8, atol=1e-8)


def test_misuse():
    with pytest.raises(MarglikError, match="subset must be"):
        fitted(subset=0)
    with pytest.raises(MarglikError, match="subset=12 is more than the 11 data points"):
        fitted(subset=12)
    with pytest.raises(MarglikError, match="root must be one of"):
        fitted(root="square").log_marginal_likelihood()
    with pytest.raises(MarglikError, match="outputs"):
        fitted(outputs=4).log_marginal_likelihood()
    la = fitted(subset=4)
    with torch.no_grad():
        next(la.model.parameters()).add_(1)
    with pytest.raises(MarglikError, match="call fit"):
        la.log_marginal_likelihood()
