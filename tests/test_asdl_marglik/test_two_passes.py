"""The second pass goes over the same data and weights as the first, chunk by chunk."""

import numpy as np
import pytest
import torch
from cases import Jitter
from marginal_likelihoods import X, Y, marglik
from small_estimators import KINDS, assert_same, estimator, evaluated, large
from small_networks import mlp
from torch import nn

from asdl_marglik import CurvatureError


@pytest.mark.parametrize("structure, kfac", KINDS)
def test_without_augmentation_several_chunks_change_nothing(structure, kfac):
    whole, chunked = (estimator(structure, kfac, torch.float64, None, chunk=c) for c in (None, 4))
    assert_same(evaluated(chunked, torch.float64), evaluated(whole, torch.float64), 1e-9)


def test_rows_are_deferred_where_only_the_prior_is_learned(monkeypatch):
    """No more rows than those of one weight are alive: the buffer of all rows is never made."""
    monkeypatch.setattr(
        "asdl_marglik.passes.two_passes.Collected.add", lambda *_: pytest.fail("kept all rows")
    )
    ml = large()
    ml(torch.randn(8, 3, 16, 16), torch.arange(8)).total.backward()


def from_numpy(*shape):
    return torch.as_tensor(np.random.default_rng().standard_normal(shape))


OWN = torch.Generator()


@pytest.mark.quick
@pytest.mark.parametrize(
    "draw",
    [from_numpy, lambda *shape: torch.randn(*shape, generator=OWN, dtype=torch.float64)],
    ids=["numpy", "own generator"],
)
@pytest.mark.parametrize("chunk", [None, 4])
def test_an_augmentation_that_draws_from_elsewhere(draw, chunk):
    ml = marglik(augment=Jitter(draw), chunk=chunk)
    with pytest.raises(
        CurvatureError, match=r"other copies in the second pass.*generators are seeded"
    ):
        ml(X, Y).total.backward()
    with pytest.raises(CurvatureError, match="other copies in the second pass"):
        ml.full_batch([(X[:3], Y[:3]), (X[3:], Y[3:])]).total.backward()
    torch.autograd.grad(ml(X, Y).total, ml.prior.log_precision)  # a single pass needs no second one


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x + from_numpy(*x.shape[1:]))


@pytest.mark.quick
def test_a_model_that_draws_from_elsewhere():
    with pytest.raises(CurvatureError, match="other outputs in the second pass"):
        marglik(Noisy(), augment=Jitter(), chunk=2)(X, Y).total.backward()


CHANGES = {
    "scaled": lambda w: w.data.mul_(1.001),
    "negated": lambda w: w.data.neg_(),
    "turned": lambda w: setattr(w, "data", w.data.flip(0)),
    "one entry": lambda w: w.data.view(-1)[0].add_(0.1),
}


@pytest.mark.quick
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("chunk", [None, 2])
def test_weights_changed_through_data_before_backward(change, chunk):
    ml = marglik(augment=Jitter(), chunk=chunk)
    total = ml(X, Y).total
    CHANGES[change](ml.model[0].weight)
    with pytest.raises(CurvatureError, match="before any optimiser step"):
        total.backward()


@pytest.mark.parametrize("change", ["order", "inputs", "fewer", "more"])
def test_a_loader_that_changes_between_the_passes_is_refused(change):
    first = [(X[:3], Y[:3]), (X[3:], torch.tensor([2, 1, 0]))]
    swapped = [(X[3:], Y[:3]), (X[:3], torch.tensor([2, 1, 0]))]  # the same targets by chance
    loader, ml = list(first), marglik(mlp(), augment=Jitter())
    total = ml.full_batch(loader).total
    loader[:] = {
        "order": first[::-1],
        "inputs": swapped,
        "fewer": first[:1],
        "more": [*first, first[0]],
    }[change]
    with pytest.raises(CurvatureError, match="same"):
        total.backward()
