"""Blocks with an inducing set: values and gradients against the naive oracle, selection, sampling,
intervals, and what is refused.

The oracle itself is held against theory in test_conditioned_theory.
"""

import copy
import io
import itertools
import math
from collections import Counter

import conditioned_reference as oracle
import pytest
import reference
import torch
from cases import Shift
from inducing_problems import expected, kernel_of, marglik, row_numbers
from sklearn.datasets import load_digits
from torch import nn

from laplace_marglik import (
    Categorical,
    Evidence,
    GaussianPrior,
    InducingPartition,
    MarginalLikelihood,
    MarglikError,
    Partition,
)

STRUCTURES = ["ntk", "full", "blockdiag"]
ROOTS = ["fisher", "symmetric", "eigen"]
SOFTMAX = ["softmax3", "softmax2"]
DIAGONAL = ["gaussian", "bernoulli", "poisson", "heteroscedastic"]
FIELDS = ["log_det_ratio", "log_likelihood", "scatter", "total"]
NAN, INF = float("nan"), float("inf")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def outputs_of(ml, x):
    return ml.model(x[:1]).shape[1]


def partition_of(ml, x, rows, inducing=0.5, seed=0):
    return InducingPartition(len(x), outputs_of(ml, x), rows, inducing, generator=generator(seed))


def evaluate(ml, x, y, block, **options):
    return ml(x[block.index], y[block.index], block=block, **options)


def evaluate_cached(ml, x, y, block):
    return ml.cached(x[block.index], y[block.index], block=block)()


def assert_same(evidence, want, rtol=1e-9):
    for field in FIELDS:
        ours, theirs = (getattr(e, field).detach().double() for e in (evidence, want))
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=rtol, msg=lambda m, f=field: f"{f}: {m}"
        )


def shift():
    augment = Shift(3)
    with torch.no_grad():
        augment.eta.copy_(torch.tensor([0.2, -0.3]))
    return augment


# ------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("call", [evaluate, evaluate_cached])
@pytest.mark.parametrize(
    "name, root", [*itertools.product(SOFTMAX, ROOTS), *((name, "eigen") for name in DIAGONAL)]
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_value_is_the_oracles(structure, name, root, call):
    """More rows than data, so that some data have several rows."""
    ml, x, y = marglik(name, structure, root=root)
    block = partition_of(ml, x, rows=10).sample()
    assert len(block.index) < len(block.rows) == 10 and block.n_inducing == 5
    evidence = call(ml, x, y, block)
    assert_same(evidence, expected(ml, x, y, block, root))
    assert evidence.status == "bound" and evidence.interval is None


@pytest.mark.parametrize("name", DIAGONAL)
@pytest.mark.parametrize("root", ["paper", "fisher", "symmetric"])
def test_every_root_of_diagonal_curvature_is_the_same(name, root):
    ml, x, y = marglik(name, root=root)
    block = partition_of(ml, x, rows=8).sample()
    assert_same(evaluate(ml, x, y, block), expected(ml, x, y, block, "fisher"))


@pytest.mark.parametrize("options", [{}, {"root": None}], ids=["left out", "None"])
def test_default_root_is_eigen(options):
    ml, x, y = marglik("softmax3", **options)
    block = partition_of(ml, x, rows=10).sample()
    assert_same(evaluate(ml, x, y, block), expected(ml, x, y, block, "eigen"))


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("name", ["softmax3", "gaussian"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_value_with_augmentation_and_hyperparameters_inside_the_network(structure, name, root):
    ml, x, y = marglik(name, structure, root=root, augment=shift(), hyper=["0.bias"])
    block = partition_of(ml, x, rows=10, inducing=0.3).sample()
    assert_same(evaluate(ml, x, y, block), expected(ml, x, y, block, root))


@pytest.mark.parametrize("inducing", [0.0, 0.25, 0.8])
@pytest.mark.parametrize("call", [evaluate, evaluate_cached])
@pytest.mark.parametrize("name", ["linear", "narrow"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_value_with_more_rows_than_weights(structure, name, call, inducing):
    """20 rows; 9 weights, or 6 and 9 in two layers: weight space is smaller, for U perhaps not."""
    ml, x, y = marglik(name, structure, root="fisher")
    block = partition_of(ml, x, rows=20, inducing=inducing).sample()
    assert_same(call(ml, x, y, block), expected(ml, x, y, block, "fisher"))


@pytest.mark.parametrize("call", [evaluate, evaluate_cached])
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diagonal"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_value_under_every_prior(structure, prior, call):
    ml, x, y = marglik("softmax3", structure, prior=prior, root="symmetric")
    block = partition_of(ml, x, rows=9).sample()
    assert_same(call(ml, x, y, block), expected(ml, x, y, block, "symmetric"))


@pytest.mark.parametrize("name", ["softmax3", "gaussian", "narrow"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_cached_block_follows_prior_noise_and_temperature(structure, name):
    ml, x, y = marglik(name, structure, root="fisher")
    block = partition_of(ml, x, rows=10).sample()
    cached = ml.cached(x[block.index], y[block.index], block=block)
    with torch.no_grad():
        for parameter in ml.hyperparameters():
            parameter += torch.linspace(0.2, 0.6, parameter.numel()).reshape(parameter.shape)
    assert_same(cached(), expected(ml, x, y, block, "fisher"))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("rows, inducing", [(1, 0.5), (2, 0.5), (20, 0.05), (20, 0.94)])
def test_extreme_sizes(structure, rows, inducing):
    ml, x, y = marglik("softmax3", structure, root="fisher")
    block = partition_of(ml, x, rows=rows, inducing=inducing).sample()
    assert block.n_inducing == round(inducing * rows)
    assert_same(evaluate(ml, x, y, block), expected(ml, x, y, block, "fisher"))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_inducing_rows_give_the_plain_estimate(structure):
    """Of the same rows: for one output always, otherwise where each datum has one row."""
    ml, x, y = marglik("single", structure, root="fisher", n=20)
    block = partition_of(ml, x, rows=6, inducing=0.0).sample()
    assert_same(evaluate(ml, x, y, block), ml(x[block.index], y[block.index]))

    ml, x, y = marglik("softmax3", structure, root="fisher", n=20)
    partition = partition_of(ml, x, rows=4, inducing=0.0)
    block = next(b for b in iter(partition.sample, None) if len(b.index) == 4)
    columns = torch.empty(4, 1, dtype=torch.long)
    columns[block.rows[:, 0], 0] = block.rows[:, 1]
    assert_same(evaluate(ml, x, y, block), ml(x[block.index], y[block.index], columns))


@pytest.mark.parametrize("inducing", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("name", ["softmax3", "gaussian", "linear"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_all_rows_give_the_evidence_of_all_data(structure, name, inducing):
    ml, x, y = marglik(name, structure, root="eigen")
    n_rows = len(x) * outputs_of(ml, x)
    block = partition_of(ml, x, rows=n_rows, inducing=inducing).sample()
    evidence, exact = evaluate(ml, x, y, block), ml(x, y)
    assert_same(evidence, exact)
    assert block.weight == 1
    assert evidence.status == exact.status == ("bound" if structure == "blockdiag" else "exact")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("root", ROOTS)
def test_mean_over_all_blocks_bounds_the_exact_evidence(structure, root):
    """Every B of one U, found by drawing: 9 rows, u = 2, b = 2, 21 blocks."""
    ml, x, y = marglik("softmax3", structure, root=root, n=3)
    partition, found = partition_of(ml, x, rows=4), {}
    for _ in range(400):
        block = partition.sample()
        found.setdefault(frozenset(row_numbers(block, 3)[1]), block)
    assert len(found) == math.comb(7, 2)
    with torch.no_grad():
        mean = Evidence.mean([evaluate(ml, x, y, block) for block in found.values()])
        exact = ml(x, y)
    assert mean.log_det_ratio >= exact.log_det_ratio - 1e-9
    assert float(mean.log_likelihood) == pytest.approx(float(exact.log_likelihood), rel=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_single_precision_is_close(structure):
    ml, x, y = marglik("softmax3", n=30)
    single, double = copy.deepcopy(ml.model).float(), copy.deepcopy(ml.model).float().double()
    block = InducingPartition(30, 3, 40, generator=generator()).sample()
    values = []
    for model, inputs in ((single, x.float()), (double, x.float().double())):
        prior = GaussianPrior(model, precision=0.5)
        ml = MarginalLikelihood(
            model, Categorical(), n_data=30, prior=prior, structure=structure, root="eigen"
        )
        values.append(float(evaluate(ml, inputs, y, block).log_det_ratio.detach()))
    assert values[0] == pytest.approx(values[1], rel=1e-4)


# ---------------------------------------------------------------------- log-likelihood of more data


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["softmax3", "gaussian"])
def test_likelihood_batch_replaces_the_log_likelihood_alone(structure, name):
    ml, x, y = marglik(name, structure, root="fisher", augment=shift())
    block = partition_of(ml, x, rows=6).sample()
    batch = (x[[0, 2, 3, 5]], y[[0, 2, 3, 5]])
    evidence = evaluate(ml, x, y, block, likelihood_batch=batch)
    assert_same(evidence, expected(ml, x, y, block, "fisher", likelihood_batch=batch))
    plain = evaluate(ml, x, y, block)
    torch.testing.assert_close(evidence.log_det_ratio, plain.log_det_ratio)


def test_likelihood_batch_of_all_data_is_exact():
    ml, x, y = marglik("softmax3", root="fisher")
    block = partition_of(ml, x, rows=6).sample()
    evidence = evaluate(ml, x, y, block, likelihood_batch=(x, y))
    torch.testing.assert_close(evidence.log_likelihood, ml(x, y).log_likelihood)


# ---------------------------------------------------------------------------------------- gradients


def check_gradients(ml, evidence, parameters, truth, rtol=2e-5):
    """Autograd of the library against central differences of the oracle."""
    gradients = torch.autograd.grad(evidence.total, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        want = reference.finite_difference(truth, parameter, 1e-5)
        scale = float(want.abs().max()) + 1e-3
        torch.testing.assert_close(gradient, want.to(gradient), rtol=rtol, atol=rtol * scale)
    assert all(w.grad is None for w in ml.weights.values())


def truth_of(ml, x, y, block, root, **options):
    return lambda: expected(ml, x, y, block, root, **options).total.detach()


@pytest.mark.parametrize("name, root", [("gaussian", "eigen"), *(("softmax3", r) for r in ROOTS)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradient_in_every_hyperparameter(structure, name, root):
    """Prior, noise, temperature, augmentation, and a bias inside the network."""
    ml, x, y = marglik(name, structure, root=root, augment=shift(), hyper=["0.bias"], n=5)
    block = partition_of(ml, x, rows=8).sample()
    parameters = ml.hyperparameters()
    assert len(parameters) == (5 if name == "gaussian" else 4)
    evidence = evaluate(ml, x, y, block)
    check_gradients(ml, evidence, parameters, truth_of(ml, x, y, block, root), rtol=1e-4)


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "heteroscedastic"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradient_under_every_likelihood(structure, name):
    ml, x, y = marglik(name, structure, augment=shift(), hyper=["0.bias"], n=5)
    block = partition_of(ml, x, rows=7).sample()
    evidence = evaluate(ml, x, y, block)
    check_gradients(ml, evidence, ml.hyperparameters(), truth_of(ml, x, y, block, "eigen"))


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diagonal"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradient_with_more_rows_than_weights(structure, prior):
    ml, x, y = marglik("narrow", structure, prior=prior, root="fisher", augment=shift())
    block = partition_of(ml, x, rows=20).sample()
    evidence = evaluate(ml, x, y, block)
    check_gradients(ml, evidence, ml.hyperparameters(), truth_of(ml, x, y, block, "fisher"))


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "diagonal"])
@pytest.mark.parametrize("name", ["softmax3", "gaussian", "narrow"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradient_of_a_cached_block(structure, name, prior):
    """In prior, noise and temperature, twice, the second time at other values."""
    ml, x, y = marglik(name, structure, prior=prior, root="fisher", n=5)
    block = partition_of(ml, x, rows=10).sample()
    cached, truth = (
        ml.cached(x[block.index], y[block.index], block=block),
        truth_of(ml, x, y, block, "fisher"),
    )
    for _ in range(2):
        check_gradients(ml, cached(), ml.hyperparameters(), truth)
        with torch.no_grad():
            for parameter in ml.hyperparameters():
                parameter += 0.3


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["softmax3", "gaussian"])
def test_gradient_with_a_likelihood_batch(structure, name):
    ml, x, y = marglik(name, structure, root="fisher", augment=shift(), hyper=["0.bias"], n=5)
    block = partition_of(ml, x, rows=6).sample()
    options = {"likelihood_batch": (x[1:], y[1:])}
    evidence = evaluate(ml, x, y, block, **options)
    truth = truth_of(ml, x, y, block, "fisher", **options)
    check_gradients(ml, evidence, ml.hyperparameters(), truth)


# ------------------------------------------------------------------------------ selection by pivots


def block_kernel(ml, x, y, block, root):
    U, B = row_numbers(block, outputs_of(ml, x))
    rows = U + B
    return kernel_of(ml, x, y, root)[rows][:, rows]


def assert_greedy(A, order):
    """Each row has the largest conditional variance given those before, up to rounding."""
    assert sorted(order) == list(range(len(A)))
    for k, chosen in enumerate(order):
        variances = oracle.conditional(A, order[:k]).diagonal()
        assert variances[chosen] >= variances[order[k:]].max() - 1e-9


@pytest.mark.parametrize("call", [evaluate, evaluate_cached])
@pytest.mark.parametrize("name", ["softmax3", "gaussian", "linear", "narrow"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_pivots_are_the_greedy_order(structure, name, call):
    ml, x, y = marglik(name, structure, root="fisher")
    block = partition_of(ml, x, rows=12).sample()
    pivots = call(ml, x, y, block).pivots
    assert not pivots.requires_grad
    A = block_kernel(ml, x, y, block, "fisher")
    assert_greedy(A, pivots.tolist())
    assert pivots[:6].tolist() == oracle.pivot_order(A)[0][:6]


@pytest.mark.parametrize("root", ["symmetric", "eigen"])
def test_pivots_of_every_root_are_greedy(root):
    """The last eigen column of each datum is zero: such rows are equally good, and last."""
    ml, x, y = marglik("softmax3", root=root)
    block = partition_of(ml, x, rows=15).sample()
    pivots = evaluate(ml, x, y, block).pivots.tolist()
    assert_greedy(block_kernel(ml, x, y, block, root), pivots)


def test_pivots_are_those_of_the_present_prior():
    """A cached block at another prior chooses other rows."""
    ml, x, y = marglik("softmax3", root="fisher", n=20)
    block = partition_of(ml, x, rows=30).sample()
    cached, orders = ml.cached(x[block.index], y[block.index], block=block), []
    for precision in (-4.0, 2.0):
        with torch.no_grad():
            ml.prior.log_precision.fill_(precision)
        orders.append(cached().pivots.tolist())
        assert_greedy(block_kernel(ml, x, y, block, "fisher"), orders[-1])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_update_takes_the_first_pivots(structure):
    ml, x, y = marglik("softmax3", structure, root="fisher")
    partition = partition_of(ml, x, rows=10, inducing=0.4)
    for _ in range(3):
        block = partition.sample()
        A, own = block_kernel(ml, x, y, block, "fisher"), block.rows
        first = oracle.pivot_order(A)[0][:4]
        partition.update(block, evaluate(ml, x, y, block))
        want = {(int(block.index[own[r, 0]]), int(own[r, 1])) for r in first}
        assert {tuple(row) for row in partition.inducing_rows.tolist()} == want


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("root", ROOTS)
def test_saturated_data_are_not_chosen_and_harm_nothing(structure, root):
    """Four of seven data have one-hot probabilities: their rows have length zero."""
    ml, x, y = marglik("leaky", structure, root=root, augment=shift())
    x[:4] *= 1e5
    y[:4] = ml.outputs_of(x[:4]).argmax(1)
    assert torch.equal(ml.outputs_of(x[:4]).softmax(1).amax(1), torch.ones(4).double())
    partition = partition_of(ml, x, rows=18, inducing=1 / 6)
    block = partition.sample()
    evidence = evaluate(ml, x, y, block)
    assert_same(evidence, expected(ml, x, y, block, root), rtol=1e-8)
    gradients = torch.autograd.grad(evidence.total, ml.hyperparameters())
    assert all(gradient.isfinite().all() for gradient in gradients)
    partition.update(block, evidence)
    assert partition.inducing_rows[:, 0].min() >= 4
    assert evaluate(ml, x, y, partition.sample()).total.isfinite()


def trained_on_digits(n, precision):
    """A small network after 150 full-batch steps on n images, and these."""
    digits = load_digits()
    x, y = torch.tensor(digits.data[:n] / 16), torch.tensor(digits.target[:n])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    prior = GaussianPrior(model, "scalar", precision)
    ml = MarginalLikelihood(model, Categorical(), n_data=n, prior=prior, root="eigen")
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        ml.map_loss(x, y).backward()
        optimizer.step()
    return ml, x, y


def test_streamed_selection_tightens_the_bound():
    """Digits: 1,500 rows, 60 of them at a time; expectations over fresh blocks by the oracle."""
    ml, x, y = trained_on_digits(150, precision=3.0)
    with torch.no_grad():
        A = kernel_of(ml, x, y, "eigen")
    exact, g = float(torch.linalg.slogdet(A).logabsdet), generator(1)

    def slack(U):
        rest = torch.tensor(oracle.outside(1500, U))
        fresh = [rest[torch.randperm(len(rest), generator=g)[:30]] for _ in range(100)]
        return float(oracle.upper_side(A, U, torch.stack(fresh)).mean()) - exact

    partition = InducingPartition(150, 10, 60, generator=generator())
    start = [torch.randperm(1500, generator=g)[:30].tolist() for _ in range(8)]
    start.append(row_numbers(partition.sample(), 10)[0])
    with torch.no_grad():
        for _ in range(50):
            block = partition.sample()
            partition.update(block, evaluate(ml, x, y, block))
    chosen = (partition.inducing_rows[:, 0] * 10 + partition.inducing_rows[:, 1]).tolist()
    assert 0 < slack(chosen) < 0.6 * sum(map(slack, start)) / len(start)


# --------------------------------------------------------------------------------- sampling of rows


def row_set(rows):
    return {(int(i), int(c)) for i, c in rows}


def assert_is_a_block(block, partition, n, c, s, u):
    """Distinct data, distinct rows at their positions, U first, and the weight of the others."""
    assert len(block.rows) == s and block.rows.shape[1] == 2 and block.n_inducing == u
    assert block.index.unique().numel() == len(block.index)
    assert set(block.rows[:, 0].tolist()) == set(range(len(block.index)))
    rows = torch.stack([block.index[block.rows[:, 0]], block.rows[:, 1]], 1)
    assert rows.min() >= 0 and rows[:, 0].max() < n and rows[:, 1].max() < c
    assert len(row_set(rows)) == s
    assert partition.inducing_rows.shape == (u, 2)
    assert row_set(rows[:u]) == row_set(partition.inducing_rows)
    assert block.weight == pytest.approx((n * c - u) / (s - u))
    return rows


@pytest.mark.parametrize(
    "n, c, s, inducing",
    [(1, 1, 1, 0.0), (1, 4, 3, 0.5), (9, 1, 4, 0.5), (6, 3, 7, 0.3), (6, 3, 18, 0.5)],
)
def test_blocks_are_consistent(n, c, s, inducing):
    partition = InducingPartition(n, c, s, inducing, generator=generator())
    for _ in range(20):
        assert_is_a_block(partition.sample(), partition, n, c, s, round(inducing * s))


def test_blocks_are_uniform_over_all_sets_of_rows_outside_the_inducing_set():
    """8 rows, u = 2, b = 3: all 20 sets come equally often (chi-square, 19 degrees of freedom)."""
    partition, draws = InducingPartition(4, 2, 5, 0.4, generator=generator()), 3000
    counts = Counter()
    for _ in range(draws):
        rows = assert_is_a_block(partition.sample(), partition, 4, 2, 5, 2)
        counts[frozenset(row_set(rows[2:]))] += 1
    assert len(counts) == 20
    assert sum((k - draws / 20) ** 2 / (draws / 20) for k in counts.values()) < 60


def test_first_inducing_sets_are_uniform():
    """6 rows, u = 2: the 15 sets of different seeds (chi-square, 14 degrees of freedom)."""
    counts = Counter(
        frozenset(row_set(InducingPartition(3, 2, 4, generator=generator(seed)).inducing_rows))
        for seed in range(1500)
    )
    assert len(counts) == 15
    assert sum((k - 100) ** 2 / 100 for k in counts.values()) < 55


def test_a_million_rows_are_sampled_quickly_and_evenly():
    n, c, s = 100_000, 10, 200
    partition, numbers = InducingPartition(n, c, s, generator=generator()), []
    for _ in range(60):
        rows = assert_is_a_block(partition.sample(), partition, n, c, s, 100)[100:]
        numbers.append(rows[:, 0] * c + rows[:, 1])
    position = torch.cat(numbers).double() / (n * c)  # uniform on [0, 1]
    tenths = torch.bincount((10 * position).long(), minlength=10)
    assert ((tenths - 600) ** 2 / 600).sum() < 50
    columns = torch.bincount(torch.cat(numbers) % c, minlength=10)
    assert ((columns - 600) ** 2 / 600).sum() < 50


def test_same_seed_same_blocks():
    one, other = (InducingPartition(9, 3, 8, generator=generator(4)) for _ in range(2))
    for _ in range(3):
        assert_same_block(one.sample(), other.sample())


def assert_same_block(one, other):
    assert torch.equal(one.index, other.index) and torch.equal(one.rows, other.rows)
    assert (one.n_inducing, one.weight) == (other.n_inducing, other.weight)


def test_state_goes_through_a_checkpoint_and_continues_bit_for_bit():
    ml, x, y = marglik("softmax3")
    partition = partition_of(ml, x, rows=8, seed=3)

    def step(of):
        block = of.sample()
        of.update(block, evaluate(ml, x, y, block))
        return block

    for _ in range(3):
        step(partition)
    file = io.BytesIO()
    torch.save(partition.state_dict(), file)
    file.seek(0)
    restored = partition_of(ml, x, rows=8, seed=77)
    restored.load_state_dict(torch.load(file))
    assert torch.equal(restored.inducing_rows, partition.inducing_rows)
    for _ in range(4):
        assert_same_block(step(restored), step(partition))
        assert torch.equal(restored.inducing_rows, partition.inducing_rows)


def test_a_saved_state_does_not_move_on_with_the_partition():
    ml, x, y = marglik("softmax3")
    partition = partition_of(ml, x, rows=8)
    state, block = partition.state_dict(), partition.sample()
    partition.update(block, evaluate(ml, x, y, block))
    partition.load_state_dict(state)
    assert_same_block(partition.sample(), block)


# ---------------------------------------------------------------------------------------- intervals


def evaluated(ml, x, y, partition, count):
    """Some blocks of the present inducing set, and their evidences."""
    blocks = [partition.sample() for _ in range(count)]
    with torch.no_grad():
        return blocks, [evaluate(ml, x, y, block) for block in blocks]


@pytest.mark.parametrize("count", [5, 9])
@pytest.mark.parametrize("name, rows", [("softmax3", 8), ("gaussian", 6), ("linear", 14)])
@pytest.mark.parametrize("structure", ["ntk", "full"])
def test_interval_is_the_oracles(structure, name, rows, count):
    ml, x, y = marglik(name, structure, root="fisher")
    partition = partition_of(ml, x, rows=rows)
    blocks, evidences = evaluated(ml, x, y, partition, count)
    A, U = kernel_of(ml, x, y, "fisher"), row_numbers(blocks[0], outputs_of(ml, x))[0]
    B = torch.tensor([row_numbers(block, outputs_of(ml, x))[1] for block in blocks])
    totals = torch.stack([expected(ml, x, y, block, "fisher").total for block in blocks])
    want = oracle.interval(totals.detach(), *oracle.sides(A, U, B))
    mean = Evidence.mean(evidences)
    assert [*map(float, mean.interval)] == pytest.approx(want, rel=1e-8)
    assert float(mean.interval_width) == pytest.approx((want[1] - want[0]) / len(x), rel=1e-7)
    assert mean.status == "bound"


def test_no_interval_without_five_blocks_of_one_inducing_set_and_the_whole_kernel():
    ml, x, y = marglik("softmax3", root="fisher", n=12)
    partition = partition_of(ml, x, rows=8)
    blocks, evidences = evaluated(ml, x, y, partition, 5)
    partition.update(blocks[0], evidences[0])
    other = evaluated(ml, x, y, partition, 3)[1]
    apart, x, y = marglik("softmax3", "blockdiag", root="fisher", n=12)
    with torch.no_grad():
        plain = [ml(x[b.index], y[b.index], block=b) for b in Partition(12, 3, 2)]
    for few in (
        evidences[:1],
        evidences[:4],
        [*evidences[:3], *other],
        evaluated(apart, x, y, partition, 5)[1],
        plain,
    ):
        mean = Evidence.mean(few)
        assert mean.interval is None and mean.interval_width is None
    assert all(e.interval is None and e.interval_width is None for e in evidences)


def test_interval_of_all_rows_is_a_point():
    ml, x, y = marglik("softmax3", root="fisher")
    partition = partition_of(ml, x, rows=21)
    mean = Evidence.mean(evaluated(ml, x, y, partition, 5)[1])
    exact = float(ml(x, y).total.detach())
    assert [*map(float, mean.interval)] == pytest.approx([exact, exact], rel=1e-9)


def test_interval_covers_the_exact_evidence():
    """100 problems, 8 of their blocks each; the truth by the oracle's dense determinant."""
    ml, x, y = marglik("softmax3", root="fisher", n=9)
    covered, g = 0, generator(0)
    for seed in range(100):
        with torch.no_grad():
            x.normal_(generator=g)
            y.random_(3, generator=g)
            ml.prior.log_precision.normal_(-0.5, 1.0, generator=g)
            for w in ml.weights.values():
                w.normal_(0, 0.8, generator=g)
        mean = Evidence.mean(evaluated(ml, x, y, partition_of(ml, x, rows=12, seed=seed), 8)[1])
        everything = InducingPartition(9, 3, 27, 0.0, generator=generator()).sample()
        with torch.no_grad():
            truth = expected(ml, x, y, everything, "fisher").total
        covered += mean.interval[0] <= truth <= mean.interval[1]
    assert covered >= 90


# ------------------------------------------------------------------------------------------- misuse


def assert_says(error, *words):
    message = str(error.value)
    missing = [word for word in words if str(word) not in message]
    assert not missing, f"{missing} not in {message!r}"


def shown(value):
    """A number as messages show it: 1.0 may be written 1."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("inducing", [-0.1, 1.0, 1.5, NAN, INF])
def test_inducing_is_a_fraction_below_one(inducing):
    with pytest.raises(MarglikError) as error:
        InducingPartition(6, 3, 8, inducing)
    assert_says(error, "inducing", shown(inducing))


@pytest.mark.parametrize("rows", [0, -3, 19, 2.5, NAN, "ten"])
def test_rows_are_a_number_of_those_there_are(rows):
    with pytest.raises(MarglikError) as error:
        InducingPartition(6, 3, rows)
    assert_says(error, "rows", shown(rows))


@pytest.mark.parametrize("size", [0, -1, 2.5, NAN])
@pytest.mark.parametrize("name", ["n_data", "n_outputs"])
def test_sizes_are_whole_numbers(name, size):
    with pytest.raises(MarglikError) as error:
        InducingPartition(**({"n_data": 6, "n_outputs": 3} | {name: size}), rows=2)
    assert_says(error, name, shown(size))


def test_a_fraction_that_leaves_no_row_to_draw_is_refused_or_lowered():
    try:
        block = InducingPartition(20, 3, 10, 0.99, generator=generator()).sample()
    except MarglikError:
        return
    assert block.n_inducing < 10 and math.isfinite(block.weight)


def test_the_published_root_of_softmax_is_refused():
    ml, x, y = marglik("softmax3", root="paper")
    block = partition_of(ml, x, rows=6).sample()
    for call in (evaluate, evaluate_cached):
        with pytest.raises(MarglikError) as error:
            call(ml, x, y, block)
        assert_says(error, "paper", "eigen")


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_structures_without_rows_are_refused(structure):
    ml, x, y = marglik("softmax3", structure, root="fisher")
    block = partition_of(ml, x, rows=6).sample()
    for call in (evaluate, evaluate_cached):
        with pytest.raises(MarglikError) as error:
            call(ml, x, y, block)
        assert_says(error, structure, "ntk")


@pytest.mark.parametrize("sizes", [(8, 3, 8), (7, 2, 8), (7, 3, 10)])
def test_a_state_of_another_size_is_refused(sizes):
    partition = InducingPartition(7, 3, 8, generator=generator())
    before = partition.inducing_rows.clone()
    with pytest.raises(MarglikError) as error:
        partition.load_state_dict(InducingPartition(*sizes).state_dict())
    mine, theirs = next((a, b) for a, b in zip((7, 3, 8), sizes, strict=True) if a != b)
    assert_says(error, mine, theirs)
    assert torch.equal(partition.inducing_rows, before)


@pytest.mark.parametrize("n_data, n_outputs", [(9, 3), (7, 2)])
def test_a_block_of_another_problem_is_refused(n_data, n_outputs):
    ml, x, y = marglik("softmax3", root="fisher", n=7)
    x, y = torch.cat([x, x]), torch.cat([y, y])
    block = InducingPartition(n_data, n_outputs, 4, generator=generator()).sample()
    with pytest.raises(MarglikError) as error:
        evaluate(ml, x, y, block)
    ours, theirs = (7, 9) if n_data == 9 else (3, 2)
    assert_says(error, ours, theirs)


def test_data_that_are_not_those_of_the_block_are_refused():
    ml, x, y = marglik("softmax3", root="fisher")
    block = partition_of(ml, x, rows=3).sample()
    with pytest.raises(MarglikError) as error:
        ml(x, y, block=block)
    assert_says(error, len(block.index), len(x), "block.index")


def test_an_update_needs_the_evidence_of_its_block():
    ml, x, y = marglik("softmax3", root="fisher")
    partition = partition_of(ml, x, rows=8)
    block = partition.sample()
    with pytest.raises(MarglikError):
        partition.update(block, ml(x, y))  # has no pivots
    smaller = partition_of(ml, x, rows=6).sample()
    with pytest.raises(MarglikError):
        partition.update(block, evaluate(ml, x, y, smaller))


def test_a_likelihood_batch_has_as_many_inputs_as_targets():
    ml, x, y = marglik("softmax3", root="fisher")
    block = partition_of(ml, x, rows=8).sample()
    for batch in ((x[:3], y[:4]), (x[:0], y[:0])):
        with pytest.raises(MarglikError):
            evaluate(ml, x, y, block, likelihood_batch=batch)
