"""Passes are laid out within a budget, and what does not fit is refused before it is computed."""

import itertools
from dataclasses import replace

import pytest
import torch
from small_estimators import assert_same, large
from small_networks import mlp, randn

from asdl_marglik import STRUCTURES, Passes, Problem, free_memory, make_plan, parts_of
from asdl_marglik.passes.memory import arrange, largest_fitting
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


def problem(n_data=20, rows_per_datum=3, **options):
    model = mlp()
    weights = dict(model.named_parameters())
    groups = {name: i for i, name in enumerate(weights)}
    plan = make_plan(model, weights, randn(4, 4))
    return Problem(plan, groups, n_data, rows_per_datum, **options)


@pytest.mark.quick
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_smaller_budget_never_takes_more(structure):
    p = problem()
    parts = parts_of(structure, p)
    arrangements = [arrange(p, parts, again=True, budget=budget) for budget in (1e9, 1e5, 1e3, 1)]
    for larger, smaller in itertools.pairwise(arrangements):
        assert smaller.bytes <= larger.bytes
        assert 1 <= smaller.chunk_inputs <= larger.chunk_inputs
    assert arrange(p, parts, again=True, budget=1, chunk=7).chunk_inputs == 7


@pytest.mark.quick
def test_what_is_left_of_a_budget_keeps_graphs():
    p = problem()
    parts = parts_of("ntk", p)
    kept = [
        arrange(p, parts, again=True, budget=1e8, spend=spend, chunk=5).kept_chunks
        for spend in (False, True)
    ]
    assert kept[0] == 1 < kept[1]


@pytest.mark.quick
@pytest.mark.parametrize("structure", ["ntk", "blockdiag"])
def test_the_largest_block_fits_and_one_more_does_not(structure):
    p = problem(n_data=200)

    def needs(n):
        smaller = replace(p, n_data=n)
        return arrange(smaller, parts_of(structure, smaller), again=True, budget=1).bytes

    budget = needs(50)
    largest = largest_fitting(structure, p, again=True, budget=budget)
    assert 50 <= largest < 200
    assert needs(largest) <= budget < needs(largest + 1)
    assert largest_fitting(structure, p, again=True, budget=1) == 0


@pytest.mark.quick
def test_free_memory_is_a_part_of_what_the_machine_has():
    assert 0 < free_memory(torch.device("cpu")) < 2**50
