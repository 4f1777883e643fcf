"""The diagonal of the curvature from factors of rows, where no row is made."""

from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES
from small_networks import randn
from torch import nn

import asdl_marglik.curvature.cover
from asdl_marglik import ggn_diagonal
from laplace_marglik import Categorical, GaussianPrior, MarginalLikelihood


@pytest.fixture(autouse=True)
def _no_kept_rows(monkeypatch):
    monkeypatch.setattr(asdl_marglik.curvature.cover, "KEPT_ROWS", 0)


def marglik(model, n, **options):
    prior = GaussianPrior(model, "layerwise", hyper=options.get("hyper", ()))
    return MarginalLikelihood(
        model, "classification", n_data=n, prior=prior, structure="diag", **options
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_squares_of_rows_from_squares_of_factors(case):
    model, x, y = case.make()
    curvature = marglik(model, len(y)).posterior([(x, y)]).curvature
    want = ggn_diagonal(model, x, y, Categorical())
    for part, (h,) in zip(curvature.parts, curvature.statistics, strict=True):
        expected = want[part.names[0]].detach().flatten()
        torch.testing.assert_close(h, expected, rtol=1e-9, atol=1e-12)
    n_factored = sum(part.factored for part in curvature.parts)
    assert (n_factored > 0) == (case.name != "segmentation")


class Scaled(nn.Module):
    """A hyperparameter before, between and behind linear maps, one of them from the right."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.right = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        h = torch.tanh(self.scale * self.first(x * self.scale))
        return torch.tanh(self.second(h)) @ self.right


@pytest.mark.parametrize("options", [{}, {"outputs": 1, "root": "fisher"}, {"outputs": 2}])
def test_gradients_through_factors(options):
    torch.manual_seed(0)
    model = Scaled().double()
    x, y = randn(7, 4), torch.arange(7) % 3
    columns = torch.arange(options["outputs"]) if options else None
    ml = marglik(model, 7, hyper=["scale"], **options)
    evidence = ml(x, y, columns)
    (got,) = torch.autograd.grad(evidence.total, model.scale)
    want = reference.finite_difference(lambda: ml(x, y, columns).total, model.scale)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    ml._fast = replace(ml._fast, factored_rows=False)
    torch.testing.assert_close(ml(x, y, columns).total, evidence.total, rtol=1e-12, atol=1e-12)


def test_memory_does_not_hold_rows():
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3))
    x = torch.randn(300, 64)
    ml = marglik(model, 300)
    assert ml.memory(x) < 300 * 3 * 4 * 33_000  # rows of the first layer alone would take 120 MB
