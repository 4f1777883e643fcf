"""What theory says about conditioned bounds, enumerated on tiny problems with the naive oracle.

Rows (datum, root column) have A = I + V P0^-1 V^T. An inducing set U that was fixed before the
block B was drawn gives an estimate of log|A| that is too high on average, never too low.
"""

import math

import conditioned_reference as oracle
import pytest
import torch
from reference import Likelihood

pytestmark = pytest.mark.quick

ROOTS = ["fisher", "symmetric", "eigen"]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def softmax_problem(seed, n=4, c=3, p=6, root="fisher"):
    """Rows V [n c, p] of a random linear softmax model, and a prior precision from e^-3 to e^3."""
    g = generator(seed)
    J = torch.randn(n, c, p, generator=g, dtype=torch.float64)
    f = J @ torch.randn(p, generator=g, dtype=torch.float64)
    y = torch.randint(c, (n,), generator=g)
    U = oracle.true_root(Likelihood("categorical"), f, y, root)
    delta = torch.exp(6 * torch.rand((), generator=g, dtype=torch.float64) - 3).expand(p)
    return torch.einsum("ncr,ncp->nrp", U, J).flatten(0, 1), delta


def softmax_kernel(seed, **sizes):
    return oracle.kernel(*softmax_problem(seed, **sizes))


def random_set(n_rows, u, seed):
    return torch.randperm(n_rows, generator=generator(seed))[:u].tolist()


def exact(A):
    return float(torch.linalg.slogdet(A).logabsdet)


# ---------------------------------------------------------------------------------- the upper bound


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("u, b", [(0, 3), (3, 3), (4, 2), (4, 4), (6, 1), (9, 3)])
def test_mean_over_all_blocks_is_the_mean_over_all_partitions(u, b, root):
    A, U = softmax_kernel(1, root=root), random_set(12, u, 2)
    of_blocks = oracle.upper_side(A, U, oracle.all_blocks(12, U, b)).mean()
    given = oracle.log_det(A, U)
    of_partitions = torch.stack(
        [
            given + (oracle.log_det(A, oracle.together(U, blocks)) - given).sum()
            for blocks in map(torch.tensor, oracle.all_partitions(oracle.outside(12, U), b))
        ]
    )
    assert of_blocks == pytest.approx(float(of_partitions.mean()), rel=1e-9, abs=1e-9)
    assert of_partitions.min() >= exact(A) - 1e-9
    assert of_blocks >= exact(A) - 1e-9


def test_expectation_is_never_below_the_exact_value():
    """Over 300 softmax problems, for the sizes that divide the rest and for those that do not."""
    for seed in range(300):
        n, c = 3 + seed % 2, 2 + seed // 2 % 2
        A = softmax_kernel(seed, n=n, c=c, root=ROOTS[seed % 3])
        u = seed % (n * c - 1)
        b = 1 + seed // 7 % (n * c - u)
        U = random_set(n * c, u, seed)
        bound = oracle.upper_side(A, U, oracle.all_blocks(n * c, U, b)).mean()
        assert bound >= exact(A) - 1e-9, f"problem {seed}, u = {u}, b = {b}"


def test_without_inducing_rows_it_is_the_plain_bound():
    A, B = softmax_kernel(3), torch.tensor([0, 4, 5, 11])
    assert oracle.upper_side(A, [], B) == pytest.approx(3 * float(oracle.log_det(A, B)), rel=1e-12)


@pytest.mark.parametrize("u", [0, 1, 5, 11])
def test_with_all_rows_it_is_exact(u):
    A, U = softmax_kernel(4), random_set(12, u, 4)
    (B,) = oracle.all_blocks(12, U, 12 - u)
    assert [*map(float, oracle.sides(A, U, B))][::2] == pytest.approx([exact(A)] * 2, rel=1e-12)


def test_choosing_inducing_rows_from_the_evaluated_block_is_no_bound():
    """One row of variance a among n independent ones: a block of two would take it for U, and count
    it once, but only two blocks in n contain it.
    """
    n, a = 10, 5.0
    A = torch.diag(torch.tensor([a] + [1.0] * (n - 1), dtype=torch.float64))
    pairs = oracle.all_blocks(n, [], 2).tolist()
    greedy = [oracle.upper_side(A, pair[:1], torch.tensor(pair[1:])) for pair in pairs]
    assert torch.stack(greedy).mean() == pytest.approx(2 / n * math.log(a))
    fixed = [oracle.upper_side(A, [r], oracle.all_blocks(n, [r], 1)).mean() for r in range(n)]
    assert torch.stack(fixed).tolist() == pytest.approx([math.log(a)] * n)


@pytest.mark.parametrize("seed", range(5))
def test_conditioning_beats_the_partition_into_the_same_sets(seed):
    A, U = softmax_kernel(seed), random_set(12, 4, seed)
    given = oracle.log_det(A, U)
    for blocks in map(torch.tensor, oracle.all_partitions(oracle.outside(12, U), 4)):
        joint = oracle.log_det(A, oracle.together(U, blocks))
        conditioned = joint.sum() - (len(blocks) - 1) * given
        alone = oracle.log_det(A, blocks)
        assert conditioned <= given + alone.sum() + 1e-9
        for j in range(len(blocks)):
            merged = joint[j] + alone.sum() - alone[j]
            assert conditioned <= merged + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_more_of_the_same_rows_for_a_random_inducing_set_is_tighter(seed):
    """g(k) = E log|A_S| over sets of k rows is concave, so g(s) + (n - s)(g(s) - g(u)) / (s - u)
    falls with u; it is the mean of the upper side over all U and B.
    """
    A, s = softmax_kernel(seed, n=3), 6
    g = [float(oracle.log_det(A, oracle.all_blocks(9, [], k)).mean()) for k in range(10)]
    bounds = [g[s] + (9 - s) * (g[s] - g[u]) / (s - u) for u in range(s)]
    assert bounds[0] == pytest.approx(9 / s * g[s])
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] >= g[9]
    means = [
        oracle.upper_side(A, U, oracle.all_blocks(9, U, 4)).mean()
        for U in oracle.all_blocks(9, [], 2).tolist()
    ]
    assert torch.stack(means).mean() == pytest.approx(bounds[2], rel=1e-9)


# --------------------------------------------------------------------------- lower sides, interval


def test_lower_sides_are_below_the_exact_value_on_average():
    for seed in range(100):
        n, c = 3 + seed % 2, 2 + seed // 2 % 2
        A, u = softmax_kernel(seed, n=n, c=c, root=ROOTS[seed % 3]), seed % 5
        U = random_set(n * c, u, seed)
        b = 1 + seed // 5 % (n * c - u)
        upper, trace, block = oracle.sides(A, U, oracle.all_blocks(n * c, U, b))
        assert trace.mean() <= exact(A) + 1e-9 and block.max() <= exact(A) + 1e-9
        assert exact(A) <= upper.mean() + 1e-9


def drawn_interval(A, log_p, U, b, blocks, g):
    """The interval from some random blocks; log_p of each row, so that its sum is known."""
    rest = torch.tensor(oracle.outside(len(A), U))
    B = torch.stack([rest[torch.randperm(len(rest), generator=g)[:b]] for _ in range(blocks)])
    drawn = oracle.sides(A, U, B)
    fit = log_p[U].sum() + oracle.multiplicity(A, U, B) * log_p[B].sum(1)
    return oracle.interval(fit - 0.5 * drawn.upper, *drawn)


@pytest.mark.parametrize("blocks", [5, 10])
def test_interval_covers_the_exact_evidence(blocks):
    covered = 0
    for seed in range(100):
        A, g = softmax_kernel(seed, n=10, p=12), generator(seed)
        log_p = -torch.rand(10, generator=g, dtype=torch.float64).repeat_interleave(3)
        lower, upper = drawn_interval(A, log_p, random_set(30, 6, seed), 6, blocks, g)
        covered += lower <= float(log_p.sum()) - 0.5 * exact(A) <= upper
    assert covered >= 90


# ----------------------------------------------------------------------------- spaces and selection


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("u, b", [(0, 4), (3, 9), (5, 2), (8, 3)])
def test_row_space_and_weight_space_agree(u, b, root):
    V, delta = softmax_problem(5, p=4, root=root)
    delta = delta * torch.arange(1, 5)
    U = random_set(12, u, 5)
    for B in oracle.all_blocks(12, U, b)[:5]:
        in_rows = oracle.upper_side(oracle.kernel(V, delta), U, B)
        assert oracle.weight_space(V, delta, U, B) == pytest.approx(float(in_rows), rel=1e-9)


def test_layers_apart_never_have_the_smaller_upper_side_of_all_rows():
    V, delta = softmax_problem(6)
    layers, U, B = torch.arange(6).split([2, 4]), [0, 5, 7], torch.tensor([1, 2, 3])
    (rest,) = oracle.all_blocks(12, U, 9)
    log_p, deviation = torch.zeros(4).double(), torch.zeros(6).double()
    apart = oracle.estimate(V, log_p, deviation, delta, U, rest, layers=layers).log_det_ratio
    whole = oracle.estimate(V, log_p, deviation, delta, U, rest).log_det_ratio
    assert apart >= whole - 1e-9
    alone = [oracle.upper_side(oracle.kernel(V[:, k], delta[k]), U, B) for k in layers]
    of_block = oracle.estimate(V, log_p, deviation, delta, U, B, layers=layers)
    assert of_block.log_det_ratio == pytest.approx(float(sum(alone)), rel=1e-12)


def test_variances_of_the_greedy_order_fall_and_their_logarithms_add_up():
    A = softmax_kernel(7)
    order, variances = oracle.pivot_order(A)
    assert sorted(order) == list(range(12))
    assert variances == sorted(variances, reverse=True)
    assert sum(map(math.log, variances)) == pytest.approx(exact(A), rel=1e-9)


@pytest.mark.parametrize("u, b", [(0, 2), (2, 3), (4, 1)])
def test_mean_log_likelihood_over_all_blocks_is_that_of_all_data(u, b):
    V, delta = softmax_problem(8)
    log_p = -torch.rand(4, generator=generator(8), dtype=torch.float64)
    U = random_set(12, u, 8)
    fits = [
        oracle.estimate(V, log_p, torch.zeros(6).double(), delta, U, B).log_likelihood
        for B in oracle.all_blocks(12, U, b)
    ]
    assert torch.stack(fits).mean() == pytest.approx(float(log_p.sum()), rel=1e-12)


# ----------------------------------------------------------------------- the oracle is what it says


@pytest.mark.parametrize("kind", ["categorical", "gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("root", ROOTS)
def test_roots_are_true(kind, root):
    likelihood = Likelihood(kind, 0.7, 1.3)
    f = torch.randn(4, 3, generator=generator(0), dtype=torch.float64)
    y = torch.tensor([0, 2, 1, 1])
    y = y if kind == "categorical" else y.double().unsqueeze(1).expand(4, 3)
    U = oracle.true_root(likelihood, f, y, root)
    p = f.softmax(1)
    want = {
        "categorical": torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1),
        "gaussian": torch.eye(3).double().expand(4, 3, 3) / 0.49,
        "bernoulli": torch.diag_embed(f.sigmoid() * (-f).sigmoid()),
        "poisson": torch.diag_embed(f.exp()),
    }[kind]
    torch.testing.assert_close(U @ U.mT, want / 1.3, rtol=1e-10, atol=1e-12)


def test_expected_curvature_of_unknown_noise():
    f = torch.randn(4, 4, generator=generator(0), dtype=torch.float64)
    U = oracle.true_root(Likelihood("heteroscedastic", tau=2.0), f, f[:, :2], "eigen")
    want = torch.cat([torch.exp(-f[:, 2:]), torch.full_like(f[:, 2:], 0.5)], 1) / 2
    torch.testing.assert_close(U @ U.mT, torch.diag_embed(want), rtol=1e-10, atol=1e-12)
