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


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_the_sum_over_all_blocks_is_the_gradient_of_all_data(structure):
    ml = marglik(structure=structure, augment=Shift(2))
    whole = ml.full_batch(BLOCKS).total
    leaves = [ml.augment.eta, ml.prior.log_precision]
    want = torch.autograd.grad(whole, leaves)
    evaluate = evidence_by_blocks(ml, BLOCKS, torch.Generator().manual_seed(0), len(BLOCKS))
    for _ in range(2):
        total = evaluate().total
        torch.testing.assert_close(total, whole)
        torch.testing.assert_close(torch.autograd.grad(total, leaves), want)


def test_a_sum_over_some_blocks_counts_each_by_its_data():
    ml = marglik(structure="kfac", augment=Shift(2))
    seed = torch.Generator().manual_seed(3)
    single = evidence_by_blocks(ml, BLOCKS, seed)
    order = torch.randperm(len(BLOCKS), generator=torch.Generator().manual_seed(3))[:2].tolist()
    n, sizes = len(Y), [len(BLOCKS[number][1]) for number in order]
    alone = [torch.autograd.grad(single().total, ml.augment.eta)[0] for _ in order]
    parts = [size / n * gradient for size, gradient in zip(sizes, alone, strict=True)]
    both = evidence_by_blocks(ml, BLOCKS, torch.Generator().manual_seed(3), 2)
    (found,) = torch.autograd.grad(both().total, ml.augment.eta)
    torch.testing.assert_close(found, n / sum(sizes) * sum(parts))


@pytest.mark.parametrize("count, sentence", [(4, "there are 3 blocks"), (0, "at least 1")])
def test_a_sum_over_blocks_that_are_not_there_is_refused(count, sentence):
    with pytest.raises(MarglikError, match=sentence):
        evidence_by_blocks(marglik(structure="kfac"), BLOCKS, torch.Generator(), count)


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
