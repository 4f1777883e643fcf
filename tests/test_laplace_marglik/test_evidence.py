"""What theory says about the evidence: identities, orders of bounds, and closed forms."""

import itertools
import math

import pytest
import reference
import torch
from cases import Shift
from hypothesis import given, settings
from hypothesis import strategies as st
from marginal_likelihoods import by_name
from torch import nn

import laplace_marglik
from asdl_marglik import STRUCTURES
from laplace_marglik import (
    Categorical,
    ClassPartition,
    Evidence,
    Gaussian,
    GaussianPrior,
    MarginalLikelihood,
)

TRUE_ROOTS = ["fisher", "symmetric", "eigen"]
LIKELIHOODS = {
    "categorical": Categorical(1.3),
    "gaussian": Gaussian(0.7, temperature=1.3),
}
examples = settings(max_examples=6, deadline=None, derandomize=True)


def marglik(model, likelihood="classification", *, n_data=None, precision=1.0, **options):
    return MarginalLikelihood(
        model, likelihood, n_data=n_data, prior=GaussianPrior(model, precision=precision), **options
    )


def log_det(ml, x, y, columns=None):
    """log|I + K| of one block, not multiplied with the number of blocks."""
    evidence = ml(x, y, None if columns is None else torch.as_tensor(columns))
    return float(evidence.log_det_ratio.detach()) / evidence.n_blocks


class Rows(nn.Module):
    """f_i = x_i w: a model whose Jacobian is its input [n, C, P]."""

    def __init__(self, p):
        super().__init__()
        self.w = nn.Parameter(0.5 * torch.randn(p, dtype=torch.float64))

    def forward(self, x):
        return x @ self.w


def softmax_problem(seed, n=4, c=3, p=5):
    """A random linear softmax model with its data and a random prior precision between e^-3 and
    e^3.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, x = Rows(p), torch.randn(n, c, p, dtype=torch.float64)
        return model, x, torch.randint(c, (n,)), float(torch.exp(6 * torch.rand(()) - 3))


# ----------------------------------------------------------------------------- Sylvester and orders


@pytest.mark.parametrize("name", ["mlp", "mininet", "transformer", "raw"])
@pytest.mark.parametrize("columns", [None, [1]])
def test_kernel_and_weight_space_have_the_same_determinant(name, columns):
    model, x, y = by_name[name].make()
    dual, full = (
        log_det(marglik(model, n_data=len(y), structure=s), x, y, columns) for s in ("ntk", "full")
    )
    assert full == pytest.approx(dual, rel=1e-9)


def test_full_goes_to_weight_space_when_that_is_smaller():
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 3).double(), torch.randn(8, 2).double(), torch.arange(8) % 3
    full, dual = (marglik(model, n_data=8, structure=s, precision=0.1) for s in ("full", "ntk"))
    assert "dense" in full.describe(x) and "kernel" in dual.describe(x)  # 24 rows, 9 weights
    assert log_det(full, x, y) == pytest.approx(log_det(dual, x, y), rel=1e-10)


@pytest.mark.parametrize("name", ["mlp", "mininet", "fixup", "transformer", "batchnorm"])
@pytest.mark.parametrize("columns", [None, [2]])
def test_coarser_curvature_has_the_smaller_determinant(name, columns):
    model, x, y = by_name[name].make()
    options = [
        ("full", "module"),
        ("blockdiag", "module"),
        ("blockdiag", "tensor"),
        ("diag", "module"),
    ]
    values = [
        log_det(marglik(model, n_data=len(y), structure=s, blocks=b), x, y, columns)
        for s, b in options
    ]
    assert values == sorted(values)
    assert values[0] < values[-1] * 0.999


def groups(labels):
    """The positions that have the same label, as lists."""
    return [[i for i, label in enumerate(labels) if label == one] for one in sorted(set(labels))]


def partition_sum(ml, x, y, data_labels, column_labels):
    blocks = itertools.product(groups(data_labels), groups(column_labels))
    return sum(log_det(ml, x[index], y[index], columns) for index, columns in blocks)


labels = st.integers(0, 1)
assignments = st.tuples(*[st.lists(labels, min_size=size, max_size=size) for size in (5, 5, 3, 3)])


@pytest.mark.parametrize(
    "structure, root", [*(("ntk", root) for root in TRUE_ROOTS), ("diag", "fisher")]
)
@given(assignment=assignments, precision=st.floats(1e-2, 1e2))
@examples
def test_refining_a_partition_never_lowers_the_sum(structure, root, assignment, precision):
    data, finer_data, columns, finer_columns = assignment
    model, x, y = by_name["mlp"].make()
    ml = marglik(model, n_data=5, precision=precision, structure=structure, root=root)
    exact = log_det(ml, x, y)
    coarse = partition_sum(ml, x, y, data, columns)
    fine = partition_sum(
        ml, x, y, [*zip(data, finer_data, strict=True)], [*zip(columns, finer_columns, strict=True)]
    )
    single = partition_sum(ml, x, y, range(5), range(3))
    slack = 1e-9 * (1 + single)
    assert exact <= coarse + slack and coarse <= fine + slack and fine <= single + slack


# ------------------------------------------------------------------------------- the counterexample


@pytest.mark.parametrize("qa", [0.1, 0.5, 1.0, 1.9, 2.1, 10.0])
def test_two_classes_where_the_published_single_outputs_undershoot(qa):
    """f = (w, -w) for one datum: J P0^-1 J^T = q [[1, -1], [-1, 1]] with q = 1 / precision, a = p
    (1 - p).
    """
    model, x, y = Rows(1), torch.tensor([[[1.0], [-1.0]]]).double(), torch.tensor([0])
    p = (2 * model.w.detach()).sigmoid()
    precision = float(p * (1 - p) / qa)
    exact, sums = math.log(1 + 4 * qa), {}
    for root in ("paper", *TRUE_ROOTS):
        ml = marglik(model, n_data=1, precision=precision, root=root)
        assert log_det(ml, x, y) == pytest.approx(exact, rel=1e-9)
        sums[root] = partition_sum(ml, x, y, [0], [0, 1])
    assert sums["paper"] == pytest.approx(2 * math.log(1 + qa), rel=1e-9)
    assert (sums["paper"] < exact) == (qa < 2)
    assert all(sums[root] >= exact - 1e-9 for root in TRUE_ROOTS)


@pytest.mark.parametrize("root", TRUE_ROOTS)
@given(seed=st.integers(0, 10**6))
@examples
def test_true_roots_bound_every_softmax_problem(root, seed):
    model, x, y, precision = softmax_problem(seed)
    ml = marglik(model, n_data=4, precision=precision, root=root)
    assert partition_sum(ml, x, y, [0] * 4, range(3)) >= log_det(ml, x, y) - 1e-9


def test_the_published_estimator_violates_the_bound_on_some_softmax_problems():
    violated = 0
    for seed in range(20):
        model, x, y, precision = softmax_problem(seed)
        ml = marglik(model, n_data=4, precision=precision, root="paper")
        violated += partition_sum(ml, x, y, [0] * 4, range(3)) < log_det(ml, x, y) - 1e-6
    assert 1 <= violated <= 19


# --------------------------------------------------------------------------- partitions, enumerated


def partitions(y, columns):
    generator = torch.Generator().manual_seed(0)  # 5 = 2 + 2 + 1 data, 3 = 2 + 1 columns
    yield laplace_marglik.Partition(len(y), 3, 2, 2, columns=columns, generator=generator)
    yield ClassPartition(y, 3, 3, 1, columns=columns, generator=generator)


@pytest.mark.parametrize("columns", ["shared", "iid"])
@pytest.mark.parametrize("root", ["paper", "fisher"])
@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag", "diag"])
def test_mean_over_all_blocks_is_the_partition_sum(structure, root, columns):
    model, x, y = by_name["mlp"].make()
    names, lik = reference.weight_names(model), reference.Likelihood("categorical")
    jacobian, f = reference.jacobian(model, x, names).detach(), reference.outputs(model, x).detach()
    delta = torch.full((jacobian.shape[2],), 0.3, dtype=torch.float64)
    ml = marglik(model, n_data=5, precision=0.3, structure=structure, root=root)
    for partition in partitions(y, columns):
        evidences = [ml(x[b.index], y[b.index], block=b) for b in partition]
        rows = [
            reference.rows(
                jacobian[b.index], reference.cotangents(lik, f[b.index], b.columns, root)
            )
            for b in partition
        ]
        modules = reference.module_blocks(model, names)
        want = sum(reference.log_det_ratio(structure, v, delta, modules) for v in rows)
        mean = Evidence.mean(evidences)
        assert float(mean.log_det_ratio.detach()) == pytest.approx(float(want), rel=1e-8)
        assert float(mean.log_likelihood.detach()) == pytest.approx(
            float(reference.log_prob(lik, f, y)), rel=1e-10
        )
        assert {e.n_blocks for e in evidences} == {len(partition)}
        if root == "fisher":
            assert mean.total <= ml(x, y).total


# ------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("structure", ["ntk", "full", "kfac"])
def test_linear_gaussian_evidence_and_its_gradients(structure):
    """At the posterior mode the Laplace evidence is exact, and so (envelope theorem) are its
    gradients at fixed w.
    """
    torch.manual_seed(1)
    X, y = torch.randn(7, 3).double(), torch.randn(7).double()
    model, prior_mean = nn.Linear(3, 1, bias=False).double(), torch.randn(3).double()
    log_sigma, log_delta = torch.tensor(-0.4).double(), torch.tensor(0.3).double()
    noise, delta = log_sigma.exp() ** 2, log_delta.exp().expand(3)
    mode = torch.linalg.solve(
        X.mT @ X / noise + torch.diag(delta), X.mT @ y / noise + delta * prior_mean
    )
    prior = GaussianPrior(
        model, "scalar", float(log_delta.exp()), mean={"weight": prior_mean[None]}
    )
    likelihood = Gaussian(float(log_sigma.exp()))
    with torch.no_grad():
        model.weight.copy_(mode)
    evidence = MarginalLikelihood(model, likelihood, n_data=7, prior=prior, structure=structure)(
        X, y
    )
    want = reference.linear_regression_evidence(X, y, log_sigma.exp(), prior_mean, delta)
    torch.testing.assert_close(evidence.total.detach(), want)
    gradients = torch.autograd.grad(evidence.total, [prior.log_precision, likelihood.log_sigma])

    def closed_form():
        return reference.linear_regression_evidence(
            X, y, log_sigma.exp(), prior_mean, log_delta.exp().expand(3)
        )

    for gradient, parameter in zip(gradients, (log_delta, log_sigma), strict=True):
        torch.testing.assert_close(
            gradient.squeeze(),
            reference.finite_difference(closed_form, parameter),
            rtol=1e-7,
            atol=1e-8,
        )
    with torch.no_grad():  # away from the mode it is not the evidence, but lower
        model.weight += 0.3
    assert MarginalLikelihood(model, likelihood, n_data=7, prior=prior)(X, y).total < want - 1e-3


@pytest.mark.parametrize("structure", ["ntk", "full", "diag"])
def test_augmentation_is_the_jacobian_of_the_averaged_network(structure):
    model, x, y = by_name["mlp"].make()
    augment = Shift(3)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def averaged(w):
        return (
            torch.func.functional_call(model, w, (augment(x).flatten(0, 1).detach(),))
            .unflatten(0, (5, 3))
            .mean(1)
        )

    J = torch.cat([j.flatten(2) for j in torch.func.jacrev(averaged)(weights).values()], 2)
    p = averaged(weights).softmax(1)
    H = (
        torch.einsum("ncp,ncd,ndq->pq", J, torch.diag_embed(p) - p[:, :, None] * p[:, None], J)
        / 2.0
    )
    want = (
        torch.log1p(H.diagonal()).sum()
        if structure == "diag"
        else torch.logdet(torch.eye(len(H)).double() + H)
    )
    got = marglik(model, n_data=5, precision=2.0, structure=structure, augment=augment)(x, y)
    torch.testing.assert_close(got.log_det_ratio.detach(), want)


# ------------------------------------------------------------------------- status, errors, extremes


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_status_says_what_the_value_is(structure, likelihood):
    model, x, y = by_name["mlp" if likelihood == "categorical" else "mlp-gaussian"].make()
    for root, k, s in itertools.product(["paper", "fisher", "eigen"], [1, 2, 3], [2, 5]):
        ml = marglik(
            model, LIKELIHOODS[likelihood], n_data=5, structure=structure, root=root, outputs=k
        )
        published = root == "paper" and likelihood == "categorical" and k < 3
        if structure == "kfac" or published:
            want = "approximation"
        elif structure in ("ntk", "full") and (k, s) == (3, 5):
            want = "exact"
        else:
            want = "bound"
        assert ml(x[:s], y[:s]).status == want, (root, k, s)


def test_mean_of_evidences_has_a_standard_error_and_the_weakest_status():
    def evidence(value, status):
        return Evidence(*(torch.tensor(v) for v in (value, 0.0, 0.0)), n_blocks=4, status=status)

    mean = Evidence.mean([evidence(1.0, "exact"), evidence(2.0, "bound"), evidence(6.0, "bound")])
    assert mean.total == 3 and mean.status == "bound" and mean.n_blocks == 4
    assert mean.standard_error == pytest.approx((((4 + 1 + 9) / 2) / 3) ** 0.5)
    assert (
        Evidence.mean([evidence(1.0, "exact"), evidence(1.0, "approximation")]).status
        == "approximation"
    )
    assert Evidence.mean([evidence(1.0, "exact")]).standard_error is None


@pytest.mark.parametrize("scale", [40.0, 1000.0])
@pytest.mark.parametrize("root", ["paper", *TRUE_ROOTS])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_saturated_softmax_is_finite(structure, root, scale):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(),
        torch.randn(4, 4).double(),
    )
    with torch.no_grad():
        model[2].weight *= scale / model(x).abs().max()
        model[2].bias.zero_()
    ml = marglik(model, n_data=8, structure=structure, root=root, augment=Shift(2))
    for columns in (torch.tensor([0]), None):
        total = ml(x, torch.tensor([0, 1, 2, 0]), columns).total
        for value in (total, *torch.autograd.grad(total, ml.hyperparameters())):
            assert value.isfinite().all()
