"""Every shortcut changes speed and memory, never values: on against off, and both against the
reference's precision.
"""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from asdl_marglik import ALL, Chunk, FastPaths, Passes
from asdl_marglik.curvature.kernel.prior_steps import Combination
from asdl_marglik.curvature.kernel.row_storage import SharedFactors
from asdl_marglik.linalg import eigenvalues, eigenvalues_of_rows, gram_of
from laplace_marglik import GaussianPrior, MarginalLikelihood, MarglikError
from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.problem.models import build

SWITCHES = [f.name for f in fields(FastPaths)]
NONE = FastPaths(**dict.fromkeys(SWITCHES, False))
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
KINDS = [
    ("ntk", "expand"),
    ("full", "expand"),
    ("blockdiag", "expand"),
    ("kfac", "expand"),
    ("kfac", "reduce"),
    ("diag", "expand"),
]


class Net(nn.Module):
    """Strides, a pooling, few positions in the second layer and many in the first, scalars, and a
    linear map.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            nn.Conv2d(3, 8, 3, stride=2),
        )
        self.scale, self.shift = (
            nn.Parameter(torch.tensor([1.2])),
            nn.Parameter(torch.tensor([0.1])),
        )
        self.third, self.last = nn.Conv2d(8, 5, 2), nn.Linear(20, 4)

    def forward(self, x):
        x = torch.relu(self.first(x)) * self.scale + self.shift
        x = torch.relu(self.third(torch.relu(self.second(x))))
        return self.last(
            nn.functional.max_pool2d(x, 2, stride=1, padding=1)[..., :2, :2].flatten(1)
        )


def estimator(structure, kfac, dtype, outputs=None, copies=0, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    augment = AffineAugmentation(copies, init=0.3).to(dtype) if copies else None
    return MarginalLikelihood(
        model,
        "classification",
        n_data=90,
        prior=GaussianPrior(model, precision=0.3),
        structure=structure,
        kfac=kfac,
        outputs=outputs,
        augment=augment,
        generator=torch.Generator().manual_seed(1),
        **options,
    )


def data(dtype, n=9):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, 1, 8, 8, generator=generator, dtype=dtype), torch.arange(n) % 4


def evaluated(ml, dtype):
    """Value and all gradients, in float64."""
    total = ml(*data(dtype)).total
    gradients = torch.autograd.grad(total, ml.hyperparameters())
    return [total.detach().double(), *[g.double() for g in gradients]]


def assert_same(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max())), (a, b)


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("outputs", [1, None])
def test_kernels_of_a_cached_block_in_packed_form(outputs, dtype):
    """Prior steps with and without: among the groups are single weights, whose kernels have rank
    one.
    """
    found = []
    for fast in (ALL, replace(ALL, packed_kernels=False, kept_log_prob=False)):
        ml = estimator("ntk", "expand", dtype, outputs)
        ml._fast = fast
        again = ml.cached(*data(dtype))
        for step in range(2):
            with torch.no_grad():
                ml.prior.log_precision.add_(0.3 * torch.arange(len(ml.prior.log_precision)) - step)
            total = again().total
            found.append([total.detach(), *torch.autograd.grad(total, ml.hyperparameters())])
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert_same(ours, theirs, TOLERANCE[dtype])


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


@pytest.mark.parametrize("n", [5, 200, 201, 1001])
def test_a_gram_matrix_half_of_which_is_mirrored(n):
    rows = torch.randn(n, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(gram_of(rows), rows @ rows.mT)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_eigenvalues_of_rows_and_their_derivatives_against_autograd(shape, dtype):
    rows = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    weights = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    found = []
    for function in (
        lambda r: torch.linalg.eigvalsh(r.double() @ r.double().mT)[:, -4:],
        eigenvalues_of_rows,
        lambda r: eigenvalues(r @ r.mT)[:, -4:],
    ):
        leaf = rows.clone().requires_grad_()
        values = function(leaf)
        found.append([values.detach(), *torch.autograd.grad((values * weights).sum(), leaf)])
    for ours in found[1:]:
        for a, b in zip(ours, found[0], strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(
                a, b, rtol=10 * TOLERANCE[dtype], atol=TOLERANCE[dtype] * float(b.abs().max())
            )


@pytest.mark.parametrize("ranks", [(1, 1), (1, 3, 1, 2), (4, 4)])
def test_a_combination_of_kernels_against_autograd(ranks):
    generator = torch.Generator().manual_seed(3)
    roots = [torch.randn(6, rank, generator=generator, dtype=torch.float64) for rank in (*ranks, 1)]
    kernels = [root @ root.mT for root in roots[:-1]] + [torch.zeros(6, 6, dtype=torch.float64)]
    combination = Combination(kernels, torch.float64)
    ours, theirs = (
        torch.linspace(0.5, 2, len(kernels), dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    value = combination.log_det_identity_plus(ours)
    total = sum(w * k for w, k in zip(theirs, kernels, strict=True))
    expected = torch.logdet(torch.eye(6, dtype=torch.float64) + total)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        torch.autograd.grad(value, ours), torch.autograd.grad(expected, theirs)
    )


@pytest.mark.parametrize("structure, kfac", KINDS)
def test_without_augmentation_several_chunks_change_nothing(structure, kfac):
    whole, chunked = (estimator(structure, kfac, torch.float64, None, chunk=c) for c in (None, 4))
    assert_same(evaluated(chunked, torch.float64), evaluated(whole, torch.float64), 1e-9)


def test_the_switches_are_all_on_by_default():
    assert FastPaths() == ALL and all(getattr(ALL, switch) for switch in SWITCHES)


def test_rows_are_deferred_where_only_the_prior_is_learned(monkeypatch):
    """No more rows than those of one weight are alive: the buffer of all rows is never made."""
    monkeypatch.setattr(
        "asdl_marglik.passes.two_passes.Collected.add", lambda *_: pytest.fail("kept all rows")
    )
    ml = large()
    ml(torch.randn(8, 3, 16, 16), torch.arange(8)).total.backward()


def large(**options):
    """A small residual network: activations are smaller than the rows."""
    torch.manual_seed(0)
    model = build("resnet", (3, 16, 16), 10)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return MarginalLikelihood(
        model,
        "classification",
        n_data=1000,
        prior=GaussianPrior(model),
        outputs=1,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def test_a_real_network_by_shortcuts_and_without():
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8)
    found = []
    for fast in (ALL, NONE):
        ml = large(augment=AffineAugmentation(2, init=0.1))
        ml._fast = fast
        total = ml(x, y).total
        found.append([total.detach(), *torch.autograd.grad(total, ml.hyperparameters())])
    assert_same(found[0], found[1], 1e-5)


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
