"""The kernels of a cached block, combined anew for every step of the prior."""

from dataclasses import replace

import pytest
import torch
from small_estimators import TOLERANCE, assert_same, data, estimator

from asdl_marglik import ALL
from asdl_marglik.curvature.kernel.prior_steps import Combination


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


@pytest.mark.parametrize("ranks", [(1, 1), (1, 3, 1, 2), (4, 4)])
def test_a_combination_of_kernels_against_autograd(ranks):
    generator = torch.Generator().manual_seed(3)
    roots = [torch.randn(6, rank, generator=generator, dtype=torch.float64) for rank in (*ranks, 1)]
    kernels = [root @ root.mT for root in roots[:-1]] + [torch.zeros(6, 6, dtype=torch.float64)]
    combination = Combination(kernels, len(kernels), torch.float64)
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
