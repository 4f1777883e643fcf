"""Operations whose second derivative torch gets wrong, or does not have."""

import pytest
import reference
import torch
from cases import Shift
from marginal_likelihoods import marglik
from small_networks import randn
from torch import nn
from torch.nn.utils import parametrizations

from asdl_marglik import STRUCTURES, CurvatureError
from laplace_marglik import GaussianPrior, MarginalLikelihood

N, T, D, C = 4, 3, 4, 3
X, Y = randn(N, T, D, seed=1), torch.tensor([0, 2, 1, 0])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_weight_norm_has_all_of_its_second_derivative(axis):
    """torch's own operation drops a term: a parameter that it normalises may be a hyperparameter
    all the same.
    """
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(D, 3), dim=axis), nn.Tanh(), nn.Linear(3, C)
    ).double()
    v = model[0].parametrizations.weight.original1
    ml = marglik(model, n_data=12, hyper=["0.parametrizations.weight.original1"])
    total = lambda: ml(X[:, 0], Y, torch.tensor([1])).total  # noqa: E731
    (gradient,) = torch.autograd.grad(total(), v)
    truth = reference.finite_difference(lambda: total().detach(), v, 1e-5)
    torch.testing.assert_close(gradient, truth, rtol=1e-6, atol=1e-7)


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.centres = nn.Linear(D, 3), nn.Parameter(randn(C, 3))

    def forward(self, x):
        return -torch.cdist(self.layer(x.mean(1)), self.centres)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.scale, self.head = (
            nn.EmbeddingBag(7, 3),
            nn.Parameter(torch.ones(3)),
            nn.Linear(3, C),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.bag(x) * self.scale))


@pytest.mark.filterwarnings("ignore:.*functorch")
def test_a_missing_second_derivative_is_named_and_values_do_not_need_it():
    words = "cannot differentiate twice.*_backward.*prior, noise and temperature only"
    ml = marglik(Distances().double(), n_data=12, augment=Shift(2))
    torch.autograd.grad(ml(X, Y).total, ml.prior.log_precision)
    with pytest.raises(CurvatureError, match=words):
        ml(X, Y).total.backward()
    tokens = torch.arange(N * 2).reshape(N, 2) % 7
    ml = marglik(Bag().double(), n_data=12, hyper=["scale"])
    torch.autograd.grad(ml(tokens, Y).total, ml.prior.log_precision)
    with pytest.raises(CurvatureError, match=words):
        ml(tokens, Y).total.backward()


class Tokens(nn.Module):
    """Images as sequences of pixels: the cotangents of what is before come transposed."""

    def forward(self, x):
        return x.flatten(2).mT


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d, lambda c: nn.InstanceNorm2d(c, affine=True)], ids=["batch", "instance"]
)
def test_normalisation_of_single_data_with_transposed_cotangents(norm, structure):
    """torch misreads them: the same numbers must come whatever the size of a chunk is."""
    model = nn.Sequential(norm(2), Tokens(), nn.Linear(2, 1), nn.Flatten(1)).double().eval()
    x, y = randn(4, 2, 3, 3), randn(4, 9, seed=1)
    found = []
    for chunk in (1, 4):
        prior = GaussianPrior(model, hyper=["0.weight"])
        options = {"structure": structure, "hyper": ["0.weight"], "chunk": chunk}
        ml = MarginalLikelihood(model, "regression", n_data=4, prior=prior, **options)
        total = ml(x, y).total
        found.append([total.detach(), *torch.autograd.grad(total, model[0].weight)])
    truth = reference.finite_difference(lambda: ml(x, y).total.detach(), model[0].weight, 1e-5)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[1][1], truth, rtol=1e-5, atol=1e-5)
