"""Blocks of weights: partitions by name, their log-determinants against dense ones, and errors."""

import pytest
import reference
import torch
from marginal_likelihoods import close, marglik
from small_networks import randn
from torch import nn

from asdl_marglik import CurvatureError, blocks_of, ggn_blocks
from asdl_marglik.naive import log_det_blocks
from laplace_marglik import Categorical, Partition

X, Y = randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
NAMES = ["stem.weight", "stages.0.conv.weight", "stages.0.scale.shift", "stages.1.conv.weight"]
PATTERNS = [["0.*", "2.bias"], ["2.weight"], ["4.*"]]


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def estimator(blocks, model=None, **options):
    model = model or network()
    return marglik(model, structure="blockdiag", blocks=blocks, n_data=12, **options)


def indices(model, blocks):
    """Of the weights of each block in the vector of all."""
    names = [name for name, _ in model.named_parameters()]
    of_tensor = dict(zip(names, reference.tensor_blocks(model, names), strict=True))
    return [torch.cat([of_tensor[name] for name in block]) for block in blocks.values()]


def test_blocks_by_name():
    assert list(blocks_of(NAMES, "tensor")) == NAMES
    by_module = blocks_of(NAMES, "module")
    assert list(by_module) == ["stem", "stages.0.conv", "stages.0.scale", "stages.1.conv"]
    by_parent = blocks_of(NAMES, "parent")
    assert list(by_parent.values()) == [(NAMES[0],), tuple(NAMES[1:3]), (NAMES[3],)]


def test_blocks_by_patterns_keep_the_order_of_the_weights():
    found = blocks_of(NAMES, [["stages.1.*", "st*m.*"], ["stages.0.*"]])
    assert list(found.values()) == [(NAMES[0], NAMES[3]), tuple(NAMES[1:3])]


@pytest.mark.parametrize("outputs", [None, 1])
@pytest.mark.parametrize(
    "blocks", [PATTERNS, [["*"]], [["*weight"], ["*bias"]], "parent", "module", "tensor"], ids=str
)
def test_log_determinants_are_those_of_dense_blocks(blocks, outputs):
    ml = estimator(blocks, root="fisher")
    model = ml.model
    names = [name for name, _ in model.named_parameters()]
    columns = None if outputs is None else torch.tensor([1])
    W = reference.cotangents(reference.Likelihood("categorical"), model(X), columns, "fisher")
    V = reference.rows(reference.jacobian(model, X, names), W)
    delta = reference.per_weight(model, names, ml.prior.precision.detach())
    dense = log_det_blocks(V, delta, indices(model, blocks_of(names, blocks)))
    found = ml(X, Y, columns)
    close(found.log_det_ratio, found.n_blocks * dense)
    assert found.status == "bound"


def test_merged_blocks_give_the_tighter_bound():
    finer = ["tensor", "module", PATTERNS, [["0.*", "2.*"], ["4.*"]], [["*"]]]
    merged = ["module", [["0.*"], ["2.*", "4.*"]], [["0.*", "2.*"], ["4.*"]], [["*"]], "parent"]
    for fine, coarse in zip(finer, merged, strict=True):
        assert estimator(coarse)(X, Y).total >= estimator(fine)(X, Y).total - 1e-9
    whole = marglik(network(), structure="full", n_data=12)
    close(estimator([["*"]])(X, Y).total, whole(X, Y).total)


def test_gradients_of_any_partition_are_those_of_differences():
    ml = estimator(PATTERNS, hyper=["4.bias"])
    for parameter in ml.hyperparameters():
        (found,) = torch.autograd.grad(ml(X, Y).total, parameter)
        want = reference.finite_difference(lambda: ml(X, Y).total, parameter)
        torch.testing.assert_close(found, want.to(found), rtol=1e-6, atol=1e-6)


def test_blocks_of_data_posteriors_and_curvature_have_the_same_partition():
    ml = estimator(PATTERNS)
    block = Partition(12, 3, 6, 1).sample()
    assert ml(X, Y, block=block).total.isfinite()
    ml.n_data = 6
    posterior = ml.posterior([(X, Y)])
    close(posterior.log_evidence.total, ml(X, Y).total)
    head = ml.posterior([(X, Y)], weights=["4.*", "2.weight"])
    assert head.functional(X)[1].shape == (6, 3, 3)
    H = ggn_blocks(ml.model, X, Y, Categorical(), blocks=PATTERNS)
    assert {name: len(matrix) for name, matrix in H.items()} == {
        "0.*, 2.bias": 29,
        "2.weight": 20,
        "4.*": 15,
    }


@pytest.mark.parametrize(
    "blocks, words",
    [
        ([["0.*"], ["2.*"]], "4.weight, 4.bias: in none of the blocks"),
        ([["0.*", "2.*"], ["2.bias", "4.*"]], "2.bias: in more than one of the blocks"),
        ([["*"], ["5.*"]], "5..: patterns that fit no weight"),
        (["0.*", "2.*", "4.*"], "one list for each block"),
        ([["*"], []], "one list for each block"),
        ("layer", "blocks must be one of tensor, module, parent"),
    ],
)
def test_what_is_no_partition_is_refused(blocks, words):
    with pytest.raises(CurvatureError, match=words):
        estimator(blocks)


def test_many_missing_weights_are_not_all_named():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)])
    with pytest.raises(CurvatureError, match="and 11 more"):
        blocks_of([name for name, _ in model.named_parameters()], [["0.*"]])


def test_frozen_weights_need_no_block():
    model = network()
    model[2].requires_grad_(False)
    assert estimator([["0.*"], ["4.*"]], model)(X, Y).total.isfinite()
    with pytest.raises(CurvatureError, match="patterns that fit no weight"):
        estimator([["0.*"], ["2.*"], ["4.*"]], model)
