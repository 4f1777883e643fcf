"""The rows of one weight, as they are or as factors: the same Gram matrix and cotangents."""

from dataclasses import replace

import pytest
import torch
from small_estimators import NONE, assert_same, estimator, evaluated, large
from torch import nn

from asdl_marglik import ALL
from asdl_marglik.curvature.kernel.row_storage import SharedFactors
from asdl_marglik.linalg import gram_of
from laplace_marglik import GaussianPrior, MarginalLikelihood, MarglikError
from ntkmarglik.problem.augment import AffineAugmentation


@pytest.mark.parametrize("block", [2**20, 100], ids=["at once", "one datum at a time"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_shared_factors_of_several_cotangents_and_positions(activation, block, monkeypatch):
    """Piecewise linear networks need the cotangents of inputs, smooth ones those of output
    cotangents too.
    """
    monkeypatch.setattr("asdl_marglik.curvature.kernel.row_storage.BLOCK", block)
    used: list[str] = []
    gram = SharedFactors.gram
    monkeypatch.setattr(
        SharedFactors,
        "gram",
        lambda self, *given, **options: used.append(self.name) or gram(self, *given, **options),
    )
    found = []
    for fast in (ALL, replace(ALL, shared_factors=False)):
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(1, 12, 3, stride=3),
            activation(),
            nn.Conv2d(12, 16, 3, padding=1),
            activation(),
        ]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10)).double()
        ml = MarginalLikelihood(
            model,
            "classification",
            n_data=90,
            prior=GaussianPrior(model),
            augment=AffineAugmentation(1, init=0.3).double(),
            generator=torch.Generator().manual_seed(1),
            chunk=4,
        )
        ml._fast = fast
        found.append(evaluated(ml, torch.float64))
    assert used == ["2.weight"]
    assert_same(*found, 1e-9)


def test_kernels_of_many_rows_are_mirrored_unless_switched_off(monkeypatch):
    mirrored: list[int] = []
    monkeypatch.setattr(
        "asdl_marglik.curvature.kernel.row_storage.gram_of",
        lambda rows: mirrored.append(len(rows)) or gram_of(rows),
    )
    monkeypatch.setattr("asdl_marglik.linalg.MANY_ROWS", 4)
    found = []
    for fast in (replace(NONE, mirrored_kernels=True), NONE):
        ml = estimator("ntk", "expand", torch.float64)
        ml._fast = fast
        found.append(evaluated(ml, torch.float64))
    assert mirrored == [36] * len(list(ml.model.parameters()))
    assert_same(*found, 1e-9)


@pytest.mark.parametrize("outputs", [1, None])
@pytest.mark.parametrize("prior", ["layerwise", "diagonal"])
def test_rows_in_half_precision(outputs, prior):
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8)
    found = []
    for row_dtype in (None, torch.float16):
        ml = large(augment=AffineAugmentation(2, init=0.1), row_dtype=row_dtype)
        ml.outputs, ml.prior = outputs, GaussianPrior(ml.model, prior)
        total = ml(x, y).total
        found.append([total.detach(), *torch.autograd.grad(total, ml.hyperparameters())])
    assert not torch.equal(found[0][0], found[1][0])  # it is used
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    for half, full in zip(found[1][1:], found[0][1:], strict=True):
        assert (half - full).norm() <= 1e-3 * full.norm()


def test_other_row_dtypes_are_refused():
    with pytest.raises(MarglikError, match=r"row_dtype must be torch.float16.*bfloat16"):
        large(row_dtype=torch.bfloat16)
