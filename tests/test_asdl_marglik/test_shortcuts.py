"""Every shortcut changes speed and memory, never values: each on against all off."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_estimators import (
    KINDS,
    NONE,
    SWITCHES,
    TOLERANCE,
    assert_same,
    data,
    estimator,
    evaluated,
    large,
)
from torch import nn

import asdl_marglik
import laplace_marglik
from asdl_marglik import ALL, Chunk
from laplace_marglik import GaussianPrior, MarginalLikelihood
from ntkmarglik.problem.augment import AffineAugmentation


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("outputs, copies", [(1, 0), (None, 0), (1, 3), (None, 3)])
@pytest.mark.parametrize("structure, kfac", KINDS)
def test_all_shortcuts_together(structure, kfac, outputs, copies, dtype):
    fast, slow = (estimator(structure, kfac, dtype, outputs, copies) for _ in range(2))
    slow._fast = NONE
    assert_same(evaluated(fast, dtype), evaluated(slow, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("structure, kfac", KINDS)
def test_each_shortcut_alone(structure, kfac, switch):
    alone, slow = (estimator(structure, kfac, torch.float64, None, 2) for _ in range(2))
    alone._fast, slow._fast = replace(NONE, **{switch: True}), NONE
    assert_same(evaluated(alone, torch.float64), evaluated(slow, torch.float64), 1e-9)


@pytest.mark.parametrize("structure, kfac", KINDS)
def test_without_gradients_no_second_pass_is_prepared(structure, kfac, monkeypatch):
    ml = estimator(structure, kfac, torch.float64, None, 2)
    with_gradients = ml(*data(torch.float64)).total.item()
    ml = estimator(structure, kfac, torch.float64, None, 2)
    ml.describe(data(torch.float64)[0])  # the plan looks at such a graph, the passes should not
    monkeypatch.setattr(Chunk, "_linear", lambda _: pytest.fail("a graph of cotangents"))
    with torch.no_grad():
        assert ml(*data(torch.float64)).total.item() == pytest.approx(with_gradients, rel=1e-12)


def test_one_backward_pass_for_all_cotangents_of_a_single_weight_together(monkeypatch):
    """The second pass over KFAC-reduce blocks needs a weighted sum of the scale's cotangents."""
    passes: list[int] = []
    backward = Chunk.backward

    def counted(self, cotangent, needed, **options):
        passes.append(len(needed))
        return backward(self, cotangent, needed, **options)

    monkeypatch.setattr(Chunk, "backward", counted)
    found, counts = [], []
    for fast in (ALL, replace(ALL, weighted_cotangents=False)):
        ml = estimator("kfac", "reduce", torch.float64, None, 2, chunk=6)
        ml._fast = fast
        ml.describe(data(torch.float64)[0])
        passes.clear()
        found.append(evaluated(ml, torch.float64))
        counts.append(len([n for n in passes if n]))
    cotangents, chunks = 3, 3
    # the last chunk is kept
    assert counts == [chunks * (cotangents + 1), chunks * cotangents + (chunks - 1) * cotangents]
    assert_same(*found, 1e-9)


class ScaledTwice(nn.Module):
    """A single weight in two operations."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return self.last(torch.relu(self.first(x) * self.scale)) * self.scale


class Shift(nn.Module):
    """One shifted copy."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(self, x):
        return (x + self.by).unsqueeze(1)


def test_a_single_weight_that_is_used_twice():
    """Each use gets the cotangent of its own rows, whichever way these are pulled back."""
    torch.manual_seed(0)
    model = ScaledTwice().double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    gradients = []
    for fast in (ALL, replace(ALL, weighted_cotangents=False), NONE):
        shift = Shift()
        ml = MarginalLikelihood(
            model,
            "classification",
            n_data=6,
            prior=GaussianPrior(model),
            structure="kfac",
            kfac="reduce",
            augment=shift,
        )
        ml._fast = fast
        ml(x, y).total.backward()
        gradients.append(shift.by.grad)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-9, atol=0)
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-9, atol=0)


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_is_on_by_default_and_asked_for_by_the_engine(switch):
    assert getattr(ALL, switch) is True
    engine = Path(asdl_marglik.__file__).parent
    library = Path(laplace_marglik.__file__).parent
    files = [path for folder in (engine, library) for path in folder.rglob("*.py")]
    asked = [p for p in files if re.search(rf"fast\.{switch}\b", p.read_text())]
    assert asked


def test_a_real_network_by_shortcuts_and_without():
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8)
    found = []
    for fast in (ALL, NONE):
        ml = large(augment=AffineAugmentation(2, init=0.1))
        ml._fast = fast
        total = ml(x, y).total
        found.append([total.detach(), *torch.autograd.grad(total, ml.hyperparameters())])
    assert_same(found[0], found[1], 1e-5)
