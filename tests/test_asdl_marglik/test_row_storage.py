"""The rows of one weight, as they are or as factors: the same Gram matrix and cotangents."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_estimators import NONE, assert_same, estimator, evaluated, large
from small_networks import randn
from torch import nn

from asdl_marglik import ALL
from asdl_marglik.curvature.kernel.row_storage import Factors, HalfRows, Rows, SharedFactors
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


class Kept:
    """A chunk that has rows and factors of its own: v_ik = sum_t g_ikt a_it^T."""

    def __init__(self, n, k, t, d, o):
        self.n, self.k, self.scratch, self.differentiable = n, k, None, True
        self.a, self.g = randn(n, t, d), randn(n, k, t, o, seed=1)
        self.f = randn(n, 1)
        self.plan = SimpleNamespace(weights={"w": torch.empty(o, d)})

    def rows(self, name, out=None):
        rows = torch.einsum("nkto,ntd->nkod", self.g, self.a)
        return rows if out is None else out.copy_(rows)

    def input_factors(self, name, form):
        return [self.a.unsqueeze(2)]

    def output_factors(self, name, form):
        return [self.g.unsqueeze(3)]


STORES = {
    "rows": lambda: Rows("w"),
    "rows, both halves": lambda: Rows("w", mirrored=False),
    "half rows": lambda: HalfRows("w"),
    "factors": lambda: Factors("w"),
    "shared factors": lambda: SharedFactors("w"),
}


@pytest.mark.quick
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("k, t", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("name", STORES)
def test_the_gram_matrix_of_every_store_is_that_of_plain_rows(name, k, t, double):
    chunk = Kept(5, k, t, 4, 2)
    store = STORES[name]()
    V = chunk.rows("w").reshape(5 * k, -1)
    gram = store.gram(store.observe(chunk, None), None, double=double)
    tolerance = 2e-3 if name == "half rows" else 1e-12
    torch.testing.assert_close(
        gram, V @ V.mT, rtol=tolerance, atol=tolerance * float(V.square().sum())
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", ["rows", "rows, both halves", "half rows"])
def test_a_precision_per_element_is_applied_to_rows(name):
    chunk = Kept(5, 3, 2, 4, 2)
    store = STORES[name]()
    V, inverse = chunk.rows("w").reshape(15, -1), randn(8, seed=2).exp()
    gram = store.gram(store.observe(chunk, None), inverse)
    tolerance = 2e-3 if name == "half rows" else 1e-12
    scale = float((V.square() * inverse).sum())
    torch.testing.assert_close(gram, (V * inverse) @ V.mT, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.quick
@pytest.mark.parametrize("k, t", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("name", ["rows", "factors", "shared factors"])
def test_cotangents_of_every_store_are_those_of_autograd(name, k, t):
    """Of the observations of some data, for the rows of the Gram matrix that are theirs."""
    chunk = Kept(5, k, t, 4, 2)
    store = STORES[name]()
    kept = [o.requires_grad_() for o in store.observe(chunk, None)]
    bar = randn(5 * k, 5 * k, seed=3)
    gram = store.cross(kept, kept) if isinstance(store, Factors) else store.gram(kept, None)
    expected = torch.autograd.grad((gram * bar).sum(), kept)
    kept = [o.detach() for o in kept]
    symmetric = bar + bar.mT
    for span in (slice(0, 5), slice(1, 3)):
        own = [o[span] for o in kept]
        found = store.cotangents(own, kept, symmetric[k * span.start : k * span.stop], None)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[span])


@pytest.mark.quick
@pytest.mark.parametrize("name", ["factors", "shared factors"])
def test_a_strip_of_the_gram_matrix(name):
    chunk = Kept(5, 3, 4, 4, 2)
    store = STORES[name]()
    kept = store.observe(chunk, None)
    strip = store.cross([o[1:3] for o in kept], kept)
    torch.testing.assert_close(strip, store.gram(kept, None)[3:9])


@pytest.mark.quick
@pytest.mark.parametrize("name", ["rows", "half rows", "shared factors"])
def test_observations_are_written_where_they_are_kept(name):
    chunk = Kept(5, 3, 4, 4, 2)
    store = STORES[name]()
    fresh = store.observe(chunk, None)
    places = [torch.empty_like(o) for o in fresh]
    for place, written, expected in zip(places, store.observe(chunk, places), fresh, strict=True):
        assert written is place and torch.equal(place, expected)
