"""Gram matrices, eigenvalues and log-determinants: against torch, and where rounding decides."""

import warnings

import pytest
import torch
from small_estimators import TOLERANCE
from small_networks import randn

from asdl_marglik.curvature.kernel.prior_steps import Combination
from asdl_marglik.linalg import (
    Conditioning,
    eigenvalues,
    eigenvalues_of_rows,
    gram_in_double,
    gram_of,
    log_det_identity_plus,
    pivot_order,
    precision_of_sums,
    resolved,
)


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


@pytest.mark.quick
def test_rounding_beyond_double_precision_is_said():
    v = randn(30, 3)
    with pytest.warns(RuntimeWarning, match="rounding moves eigenvalues"):
        log_det_identity_plus(1e17 * (v @ v.mT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_det_identity_plus(1e6 * (v @ v.mT))


@pytest.mark.quick
def test_eigenvalues_below_the_rounding_level_are_zero():
    v = randn(40, 4)
    values = resolved(eigenvalues((v @ v.mT).float()), precision_of_sums(torch.float32))
    assert (values[:-4] == 0).all()
    torch.testing.assert_close(values[-4:], torch.linalg.eigvalsh(v.mT @ v), rtol=1e-5, atol=0)


@pytest.mark.quick
@pytest.mark.parametrize("columns", [3, 7, 1000])
def test_a_gram_matrix_in_double_some_columns_at_a_time(columns, monkeypatch):
    monkeypatch.setattr("asdl_marglik.linalg.COLUMNS", 5 * columns)
    rows, inverse = randn(5, 20).float(), randn(20, seed=1).exp().float()
    want = (rows.double() * inverse.double()) @ rows.double().mT
    torch.testing.assert_close(gram_in_double(rows, inverse), want)
    torch.testing.assert_close(gram_in_double(rows), rows.double() @ rows.double().mT)


@pytest.mark.parametrize("u", [0, 3, 7])
@pytest.mark.parametrize("m", [1.0, 4.5])
def test_the_conditioned_log_determinant_and_its_derivative(u, m):
    """Weights on pivots are m log|M| + (1 - m) log|M_U|, and so is what autograd makes of that."""
    rows = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    conditioning = Conditioning(u, m)

    def plain(v):
        M = torch.eye(8, dtype=torch.float64) + v @ v.mT
        return m * torch.logdet(M) + (1 - m) * torch.logdet(M[:u, :u])

    def fast(v):
        return log_det_identity_plus(v @ v.mT, conditioning=conditioning)

    def cached(v):
        kernels = Combination([v @ v.mT], 1, v.dtype, conditioning)
        return kernels.log_det_identity_plus(torch.ones(1, dtype=v.dtype))

    v = rows.clone().requires_grad_()
    torch.testing.assert_close(fast(v), plain(v), rtol=1e-12, atol=0)
    torch.testing.assert_close(cached(rows), plain(rows), rtol=1e-12, atol=0)
    (found,), (expected,) = (torch.autograd.grad(f(v), v) for f in (fast, plain))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_pivots_are_the_rows_of_largest_variance_given_those_before():
    rows = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    M = torch.eye(9, dtype=torch.float64) + rows @ rows.mT
    chosen = []
    for pivot in pivot_order(M, 9).tolist():
        left = [i for i in range(9) if i not in chosen]
        if chosen:
            cross = M[left][:, chosen]
            given = M[left][:, left] - cross @ torch.linalg.solve(M[chosen][:, chosen], cross.mT)
        else:
            given = M
        assert pivot == left[int(given.diagonal().argmax())]
        chosen.append(pivot)
