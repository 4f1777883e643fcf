"""The evidence of all data with gradients of one block at a time."""

import pytest
import torch
from cases import Shift
from marginal_likelihoods import X, Y, marglik

from laplace_marglik import MarglikError, evidence_by_blocks

pytestmark = pytest.mark.quick
BLOCKS = [(X[:2], Y[:2]), (X[2:4], Y[2:4]), (X[4:], Y[4:])]


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_a_round_of_blocks_has_the_gradient_of_all_data_on_average(structure):
    ml = marglik(structure=structure, augment=Shift(2))
    whole = ml.full_batch(BLOCKS).total
    (want,) = torch.autograd.grad(whole, ml.augment.eta)
    evaluate = evidence_by_blocks(ml, BLOCKS, torch.Generator().manual_seed(0))
    gradients = []
    for _ in BLOCKS:
        total = evaluate().total
        torch.testing.assert_close(total, whole)
        gradients.append(torch.autograd.grad(total, ml.augment.eta)[0])
    assert not torch.allclose(gradients[0], gradients[1])
    torch.testing.assert_close(torch.stack(gradients).mean(0), want)


def test_the_prior_has_the_gradient_of_all_data_every_time():
    ml = marglik(structure="kfac", augment=Shift(2))
    want = torch.autograd.grad(ml.full_batch(BLOCKS).total, ml.prior.log_precision)
    evaluate = evidence_by_blocks(ml, BLOCKS, torch.Generator().manual_seed(0))
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(evaluate().total, ml.prior.log_precision), want
        )


def test_a_kernel_is_no_sum_over_data():
    with pytest.raises(MarglikError, match=r"need a curvature that is a sum over data.*full_batch"):
        evidence_by_blocks(marglik(structure="ntk"), BLOCKS, torch.Generator())
