"""Weights that no rule covers: recurrent cells, parametrised and derived weights, models that loop
over their batch.
"""

import pytest
import reference
import torch
from cases import Shift
from torch import nn
from torch.nn.utils import parametrizations

from asdl_marglik import STRUCTURES, CurvatureError
from laplace_marglik import Categorical, GaussianPrior, MarginalLikelihood

N, T, D, C = 4, 3, 4, 3


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = randn(N, T, D, seed=1), torch.tensor([0, 2, 1, 0])


class Sequence(nn.Module):
    """A recurrent network whose last output is scaled and read by a linear head."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(D, 3, batch_first=True)
        self.scale, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, C)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1] * self.scale)


class Cell(nn.Module):
    """A recurrent cell called step by step."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.scale, self.head = kind(D, 3), nn.Parameter(torch.ones(3)), nn.Linear(3, C)

    def forward(self, x):
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head((state[0] if isinstance(state, tuple) else state) * self.scale)


class Parametrised(nn.Module):
    """A layer whose weight is a function of parameters."""

    def __init__(self, parametrisation):
        super().__init__()
        self.layer = parametrisation(nn.Linear(D, 3))
        self.scale, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, C)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)).mean(1) * self.scale)


class Adapted(nn.Module):
    """A low-rank adapter written by hand, W + A B."""

    def __init__(self):
        super().__init__()
        self.base, self.scale, self.head = (
            nn.Linear(D, 3, bias=False),
            nn.Parameter(torch.ones(3)),
            nn.Linear(3, C),
        )
        self.a, self.b = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.ones(1, D))

    def forward(self, x):
        weight = self.base.weight + self.a @ self.b
        return self.head(torch.tanh(nn.functional.linear(x, weight)).mean(1) * self.scale)


class Looped(nn.Module):
    """A model that takes its data one by one."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.head = (
            nn.Linear(D, 3),
            nn.Parameter(torch.ones(3)),
            nn.Linear(3, C),
        )

    def forward(self, x):
        return torch.stack(
            [self.head(torch.tanh(self.layer(x_i)).mean(0) * self.scale) for x_i in x]
        )


MODELS = {
    "gru": lambda: Sequence(nn.GRU),
    "lstm": lambda: Sequence(nn.LSTM),
    "rnn": lambda: Sequence(nn.RNN),
    "gru cell": lambda: Cell(nn.GRUCell),
    "lstm cell": lambda: Cell(nn.LSTMCell),
    "weight norm": lambda: Parametrised(parametrizations.weight_norm),
    "spectral norm": lambda: Parametrised(parametrizations.spectral_norm),
    "orthogonal": lambda: Parametrised(parametrizations.orthogonal),
    "adapter": Adapted,
    "loop": Looped,
}


def built(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3 * torch.randn_like(p)
    return model


def marglik(model, structure, **options):
    hyper = options.get("hyper", ())
    prior = GaussianPrior(model, hyper=hyper)
    with torch.no_grad():
        prior.log_precision.copy_(0.4 * randn(len(prior.log_precision), seed=7))
    return MarginalLikelihood(
        model, Categorical(), n_data=12, prior=prior, structure=structure, **options
    )


@pytest.mark.parametrize("root", ["paper", "fisher", "symmetric", "eigen"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradients_with_fewer_columns_than_outputs(name, structure, root):
    """Augmentation and a hyperparameter inside the network, with seeds that move with the
    outputs.
    """
    model = built(name)
    ml = marglik(model, structure, root=root, augment=Shift(2), hyper=["scale"])
    columns = torch.tensor([2]) if structure == "ntk" else torch.tensor([2, 0])
    total = ml(X, Y, columns).total
    names, plan = list(ml.weights), ml._planned(X)
    assert plan.persample
    want = reference.evidence(
        model,
        ml.augment(X),
        Y,
        reference.Likelihood("categorical"),
        reference.per_weight(model, names, ml.prior.precision.detach()),
        structure=structure,
        n_data=12,
        columns=columns,
        root=root,
        names=names,
        augmented=True,
        dense=[n for n in names if n not in plan.kronecker],
    )
    torch.testing.assert_close(total.detach(), want.total.detach(), rtol=1e-7, atol=1e-9)
    for parameter in (ml.augment.eta, model.scale):
        (gradient,) = torch.autograd.grad(ml(X, Y, columns).total, parameter)
        truth = reference.finite_difference(
            lambda: ml(X, Y, columns).total.detach(), parameter, 1e-5
        )
        torch.testing.assert_close(
            gradient, truth.to(gradient), rtol=1e-5, atol=1e-5 * float(truth.abs().max())
        )


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_weight_norm_has_all_of_its_second_derivative(axis):
    """torch's own operation drops a term: a parameter that it normalises may be a hyperparameter
    all the same.
    """
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(D, 3), dim=axis), nn.Tanh(), nn.Linear(3, C)
    ).double()
    v = model[0].parametrizations.weight.original1
    ml = marglik(model, "ntk", hyper=["0.parametrizations.weight.original1"])
    total = lambda: ml(X[:, 0], Y, torch.tensor([1])).total  # noqa: E731
    (gradient,) = torch.autograd.grad(total(), v)
    truth = reference.finite_difference(lambda: total().detach(), v, 1e-5)
    torch.testing.assert_close(gradient, truth, rtol=1e-6, atol=1e-7)


class Einsums(nn.Module):
    """Nothing but operations without a rule."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(randn(D, 5)), nn.Parameter(randn(5, C, seed=3))

    def forward(self, x):
        return torch.einsum(
            "ni,ij->nj", torch.tanh(torch.einsum("nti,ij->nj", x, self.first)), self.second
        )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_network_of_operations_without_a_rule(structure):
    model = Einsums()
    ml = marglik(model, structure, augment=Shift(2))
    total = ml(X, Y).total
    assert total.isfinite()
    (gradient,) = torch.autograd.grad(total, ml.augment.eta)
    truth = reference.finite_difference(lambda: ml(X, Y).total.detach(), ml.augment.eta, 1e-5)
    torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-6)


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
    ml = marglik(Distances().double(), "ntk", augment=Shift(2))
    torch.autograd.grad(ml(X, Y).total, ml.prior.log_precision)
    with pytest.raises(CurvatureError, match=words):
        ml(X, Y).total.backward()
    tokens = torch.arange(N * 2).reshape(N, 2) % 7
    ml = marglik(Bag().double(), "ntk", hyper=["scale"])
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
