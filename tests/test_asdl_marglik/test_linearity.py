"""The piecewise-linear shortcut is decided by the graph of every pass, not by numbers of the first
data points.
"""

import pytest
import reference
import torch
from cases import Shift
from small_networks import randn
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from asdl_marglik import STRUCTURES
from asdl_marglik.watch.linearity import piecewise_linear
from laplace_marglik import GaussianPrior, MarginalLikelihood


class Gated(nn.Module):
    """Two linear maps of the data, put together by `gate`."""

    def __init__(self, gate):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.gate = gate

    def forward(self, x):
        return self.head(self.gate(self.left(x), self.right(x)))


SQUASHED = {
    "relu6": lambda a, b: a * F.relu6(b),
    "hardtanh": lambda a, b: a * F.hardtanh(b),
    "relu": lambda a, b: a * F.relu(b),
    "clamped quotient": lambda a, b: a / (2 + F.hardtanh(b)),
    "where": lambda a, b: torch.where(b > 0, a * b, a),
    "matrix product": lambda a, b: (a.unsqueeze(2) @ F.hardtanh(b).unsqueeze(1)).sum(2),
    "mask": lambda a, b: a * (b > 0),
    "maximum": lambda a, b: F.relu(a - b) + b,
}
LINEAR = {"mask", "maximum"}


@pytest.mark.parametrize("order", ["saturated first", "saturated last"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", SQUASHED)
def test_gates_saturated_on_the_first_data_points(name, structure, order):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Gated(SQUASHED[name]).double()
    x, y = randn(6, 4, seed=2), torch.tensor([0, 1, 2, 0, 1, 2])
    x[:2] *= 30  # far beyond the kinks
    x = x if order == "saturated first" else x.flip(0)
    prior = GaussianPrior(model)
    options = {"structure": structure, "augment": Shift(2), "chunk": 4}
    ml = MarginalLikelihood(model, "classification", n_data=6, prior=prior, **options)
    total = lambda: ml(x, y, torch.tensor([1])).total  # noqa: E731
    (gradient,) = torch.autograd.grad(total(), ml.augment.eta)
    truth = reference.finite_difference(lambda: total().detach(), ml.augment.eta, 1e-6)
    torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))
    assert ml._planned(x).piecewise_linear == (name in LINEAR)


class Branched(nn.Module):
    """Linear for negative data and quadratic for positive ones, the weights being used alike."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.first(x)
        return self.head(h * h if float(x.detach()[0, 0]) > 0 else h)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_data_that_take_another_path_than_the_first_ones(structure):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Branched().double()
    x, y = randn(6, 4, seed=2), torch.tensor([0, 1, 2, 0, 1, 2])
    x[:, 0] = torch.tensor([-2.0, -3, 2, 3, -1, 1])
    prior = GaussianPrior(model)
    ml = MarginalLikelihood(
        model,
        "classification",
        n_data=6,
        prior=prior,
        structure=structure,
        augment=Shift(2),
        chunk=2,
    )
    total = lambda: ml(x, y, torch.tensor([1])).total  # noqa: E731
    (gradient,) = torch.autograd.grad(total(), ml.augment.eta)
    truth = reference.finite_difference(lambda: total().detach(), ml.augment.eta, 1e-6)
    torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-6)


W = randn(4, 4, seed=5).requires_grad_()
MEAN, VARIANCE = randn(4, seed=7), randn(4, seed=8).exp()
CONVOLUTION = randn(1, 1, 3, seed=6).requires_grad_()
GRAPHS = {
    "a network of matrix products and rectifiers": (lambda x: F.relu(x @ W) @ W, True),
    "a product with a weight": (lambda x: x * W[0], True),
    "a quotient by a weight": (lambda x: x / W[0], True),
    "a product of a function of weights": (lambda x: x @ torch.exp(W), True),
    "a convolution": (lambda x: F.conv1d(x.unsqueeze(1), CONVOLUTION), True),
    "batch normalisation by fixed statistics": (
        lambda x: F.batch_norm(x, W[1].detach(), W[2].detach().square(), W[0]),
        True,
    ),
    "batch normalisation by its own": (
        lambda x: F.batch_norm(x, None, None, W[0], training=True),
        False,
    ),
    "a square": (lambda x: x * x, False),
    "a quotient by the input": (lambda x: 1 / x, False),
    "a product of two maps": (lambda x: (x @ W) * F.relu(x), False),
    "a matrix product of two maps": (lambda x: x.unsqueeze(2) @ (x @ W).unsqueeze(1), False),
    "a sine": (lambda x: torch.sin(x @ W), False),
    "a sine of weights alone": (lambda x: x @ torch.sin(W), True),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_the_graph_says(name):
    function, linear = GRAPHS[name]
    x = randn(3, 4).float().double().requires_grad_()
    assert piecewise_linear(function(x), [get_gradient_edge(x).node]) == linear


def test_the_other_factor_of_a_weighted_operation_counts():
    """The cotangent of an operation with weights is what multiplies it, also where no input goes
    into it.
    """
    x = randn(3, 4).requires_grad_()
    token = W[0].expand(3, 4)
    product = token * x
    source = get_gradient_edge(x).node
    assert piecewise_linear(product, [source])
    assert not piecewise_linear(product, [source, get_gradient_edge(token).node])
