"""Passes are laid out within a budget, and what does not fit is refused before it is computed."""

import pytest
import torch
from small_estimators import assert_same, large

from asdl_marglik import Passes
from laplace_marglik import MarglikError
from ntkmarglik.problem.augment import AffineAugmentation


def test_a_block_beyond_the_budget_is_refused_before_it_is_computed(monkeypatch):
    ml = large(memory_budget=150e6, augment=AffineAugmentation(2))
    ml.describe(torch.randn(2, 3, 16, 16))
    monkeypatch.setattr(Passes, "_chunk", lambda *_, **__: pytest.fail("computed something"))
    with pytest.raises(
        MarglikError, match=r"needs about .* GB.*use a block of \d+ data points or structure='kfac'"
    ):
        ml(torch.randn(100, 3, 16, 16), torch.arange(100) % 10)


def test_the_largest_block_named_is_accepted():
    ml = large(memory_budget=40e6, augment=AffineAugmentation(2))
    with pytest.raises(MarglikError) as refused:
        ml(torch.randn(100, 3, 16, 16), torch.arange(100) % 10)
    points = int(str(refused.value).split("a block of ")[1].split()[0])
    assert 0 < points < 100
    assert ml(torch.randn(points, 3, 16, 16), torch.arange(points) % 10).total.isfinite()


def test_nothing_fits():
    with pytest.raises(MarglikError, match="raise memory_budget"):
        large(memory_budget=1000)(torch.randn(4, 3, 16, 16), torch.arange(4))


def test_a_larger_budget_keeps_more_graphs_and_changes_nothing():
    x, y = torch.randn(12, 3, 16, 16), torch.arange(12) % 10
    found = []
    for budget in (None, 4e9):
        ml = large(memory_budget=budget, augment=AffineAugmentation(2, init=0.1), chunk=6)
        total = ml(x, y).total
        found.append([total.detach(), *torch.autograd.grad(total, ml.hyperparameters())])
    assert_same(found[0], found[1], 1e-5)


def test_a_small_budget_takes_small_chunks():
    sizes = []
    for budget in (1e9, 5e7):
        ml = large(memory_budget=budget, structure="kfac")
        sizes.append(
            int(
                ml.describe(torch.randn(64, 3, 16, 16)).split("inputs per chunk: ")[1].split(";")[0]
            )
        )
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("budget", [0, -1.0])
def test_a_budget_must_be_positive(budget):
    with pytest.raises(MarglikError, match="memory_budget must be at least 1"):
        large(memory_budget=budget)
