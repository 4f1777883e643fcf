"""Weights that no rule covers: recurrent cells, parametrised and derived weights, models that loop
over their batch.
"""

import pytest
import reference
import torch
from cases import Shift
from marginal_likelihoods import STRUCTURES, assert_reference_value
from marginal_likelihoods import Y as LABELS
from small_networks import randn
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrizations import weight_norm

from laplace_marglik import Categorical, GaussianPrior, MarginalLikelihood

N, T, D, C = 4, 3, 4, 3
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


def unusual():
    torch.manual_seed(0)
    return {
        "prelu": nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)),
        "glu": nn.Sequential(nn.Linear(4, 10), nn.GLU(), nn.Linear(5, 3)),
        "weight_norm": nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
    }


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["prelu", "glu", "weight_norm"])
def test_models_without_a_rule_go_sample_by_sample(name, structure):
    ml = marglik(unusual()[name].double(), structure=structure)
    own = {"prelu": {"1.weight"}, "glu": set()}.get(name)
    persample = {
        line.split()[0] for line in ml.describe(randn(6, 4)).splitlines() if "per-sample" in line
    }
    assert persample == (
        {f"0.parametrizations.weight.original{i}" for i in (0, 1)} if own is None else own
    )
    for n in (6, 3, 1):  # as many data as outputs: shapes cannot tell a wrong batching rule
        assert_reference_value(ml, randn(n, 4), LABELS[:n])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["prelu", "glu", "weight_norm"])
def test_models_without_a_rule_have_gradients(name, structure):
    ml = marglik(unusual()[name].double(), structure=structure, augment=Shift(2))
    total = lambda: ml(randn(6, 4), LABELS, torch.tensor([1])).total  # noqa: E731
    (gradient,) = torch.autograd.grad(total(), ml.augment.eta)
    truth = reference.finite_difference(lambda: total().detach(), ml.augment.eta, 1e-5)
    torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-6)
