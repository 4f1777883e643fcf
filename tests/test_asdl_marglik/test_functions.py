"""The one-line curvature functions: against torch.func, naive loops and finite differences."""

import doctest

import pytest
import reference
import torch
from cases import CASES
from small_networks import randn
from torch import nn
from torch.func import functional_call, jacrev

import asdl_marglik.functions
from asdl_marglik import (
    CurvatureError,
    ggn,
    ggn_blocks,
    ggn_diagonal,
    jacobian_rows,
    kfac_factors,
    naive,
    ntk,
)
from laplace_marglik import Bernoulli, Categorical, Gaussian, Poisson

by_name = {case.name: case for case in CASES}
GRADIENT_CASES = ["mlp", "mininet", "vit", "groupnorm", "raw", "repeated"]


def close(got, want, tolerance=1e-9):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def torch_func_jacobian(model, x):
    """J [n, C, P] by torch.func, in the order of the weights that require grad."""
    weights = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def outputs(w):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return functional_call(model, w, (x,)).flatten(1)

    by_weight = jacrev(outputs)(weights)
    return torch.cat(
        [by_weight[name].reshape(*by_weight[name].shape[:2], -1) for name in weights], 2
    )


def curvature(model, x, y, likelihood):
    """J^T Lambda J from torch.func and the likelihood's Hessian."""
    J = torch_func_jacobian(model, x)
    f = model(x)
    Lambda = likelihood.curvature_scale() * likelihood.hessian(f.detach(), y)
    return torch.einsum("ncp,ncd,ndq->pq", J, Lambda.to(J), J).detach()


def test_doctests():
    result = doctest.testmod(asdl_marglik.functions)
    assert result.attempted > 15 and result.failed == 0


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jacobian_and_ntk_are_those_of_torch_func(case, graph):
    model, x, _ = case.make()
    J = torch_func_jacobian(model, x)
    with torch.set_grad_enabled(graph):
        close(jacobian_rows(model, x).detach(), J)
        close(jacobian_rows(model, x, chunk=2).detach(), J)
        every = torch.einsum("ncp,mdp->nmcd", J, J)
        close(ntk(model, x, outputs="all", chunk=3).detach(), every)
        close(ntk(model, x).detach(), every.diagonal(dim1=2, dim2=3).sum(2))
        close(ntk(model, x, outputs=1).detach(), every[:, :, 1, 1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ggn_blocks_and_diagonal(case):
    model, x, y = case.make()
    likelihood = Categorical(1.3)
    H = curvature(model, x, y, likelihood)
    close(ggn(model, x, y, likelihood, chunk=2).detach(), H)
    with torch.no_grad():
        diagonal = ggn_diagonal(model, x, y, likelihood, chunk=3)
        by_tensor = ggn_blocks(model, x, y, likelihood, blocks="tensor")
    names = reference.weight_names(model)
    close(torch.cat([diagonal[name].flatten() for name in names]), H.diagonal())
    for name, block in zip(names, reference.tensor_blocks(model, names), strict=True):
        close(by_tensor[name], H[block][:, block])
    by_module = ggn_blocks(model, x, y, likelihood)
    for got, block in zip(by_module.values(), reference.module_blocks(model, names), strict=True):
        close(got.detach(), H[block][:, block])


@pytest.mark.parametrize("setting", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["mlp", "mininet", "repeated", "segmentation", "recurrent"])
def test_kfac_factors_are_those_of_the_reference(name, setting):
    model, x, y = by_name[name].make()
    W = reference.cotangents(reference.Likelihood("categorical"), model(x))
    want = reference.kfac(model, x, W, reference.weight_names(model), setting)
    got = kfac_factors(model, x, y, Categorical(), setting=setting, chunk=2)
    assert got.keys() == want.keys()
    for weight, (A, B) in got.items():
        close(B, want[weight][0])
        close(A, (*want[weight], torch.ones(1, 1).double())[1])


def test_kfac_factors_leave_out_what_has_none_and_keep_channel_groups():
    model, x, y = by_name["conv_zoo"].make()
    factors = kfac_factors(model, x, y, Categorical())
    A, B = factors["0.weight"]  # two groups of 1 x 3 x 3 patches and 2 outputs
    assert A.shape == (2, 9, 9) and B.shape == (2, 2, 2)
    model, x, y = by_name["groupnorm"].make()
    assert set(kfac_factors(model, x, y, Categorical())) == {
        f"{i}.{tail}" for i in (0, 3, 6) for tail in ("weight", "bias")
    }


@pytest.mark.parametrize("likelihood", [Gaussian(0.7), Bernoulli(), Poisson()])
def test_likelihoods_by_root_and_by_log_prob_agree(likelihood):
    model, x, _ = by_name["mlp"].make()
    y = torch.randint(2, (5, 3)).double()

    def log_prob(f, y):
        return likelihood.tempered_log_prob(f, y)

    want = curvature(model, x, y, likelihood)
    close(ggn(model, x, y, likelihood).detach(), want)
    close(ggn(model, x, y, log_prob).detach(), want)


def test_a_part_of_the_weights():
    model, x, y = by_name["mlp"].make()
    J = jacobian_rows(model, x).detach()
    close(jacobian_rows(model, x, weights=["2.*"]).detach(), J[:, :, -21:])
    close(jacobian_rows(model, x, weights="0.bias").detach(), J[:, :, 24:30])
    U = randn(2, 3, seed=4)
    close(jacobian_rows(model, x, U).detach(), U @ J)
    u = randn(5, 2, 3, seed=5)
    close(jacobian_rows(model, x, u).detach(), u @ J)
    other = randn(4, 4, seed=6)
    want = torch.einsum("ncp,mcp->nm", J, torch_func_jacobian(model, other))
    close(ntk(model, x, other, chunk=2).detach(), want)
    assert ggn(model, x, y, Categorical(), weights=["2.*"]).shape == (21, 21)


def scalars(model, x, y):
    """One number of each function, with all of its entries in it."""
    lik = Categorical(1.2)
    yield "jacobian", lambda x: (jacobian_rows(model, x, chunk=3) ** 3).sum()
    yield "ntk", lambda x: ntk(model, x).pow(2).sum()
    yield "ggn", lambda x: ggn(model, x, y, lik).pow(2).sum()
    yield "diagonal", lambda x: sum(h.pow(2).sum() for h in ggn_diagonal(model, x, y, lik).values())
    squares = lambda A, B: A.pow(2).sum() * B.pow(2).sum()  # noqa: E731
    yield "kfac", lambda x: sum(squares(A, B) for A, B in kfac_factors(model, x, y, lik).values())


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_in_an_augmentation_and_in_a_weight(name):
    model, x, y = by_name[name].make()
    eta = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    weight = next(p for p in model.parameters() if p.dim() == 1)

    def moved():
        return x * (1 + eta[0]) + eta[1] * torch.cos(x)

    for label, function in scalars(model, x, y):
        value = function(moved())
        got = torch.autograd.grad(value, [eta, weight])
        for leaf, gradient in zip([eta, weight], got, strict=True):
            want = reference.finite_difference(lambda f=function: f(moved()), leaf)
            scale = float(want.abs().max()) + 1e-8
            torch.testing.assert_close(
                gradient / scale, want / scale, rtol=2e-5, atol=2e-5, msg=f"{label} {leaf.shape}"
            )


def test_gradients_through_the_naive_ntk():
    """The kernel of a Linear layer is known: sum over outputs of <x, x'> + 1."""
    model = nn.Linear(3, 2).double()
    x = randn(4, 3).requires_grad_()
    kernel = ntk(model, x)
    close(kernel, 2 * (x @ x.mT + 1))
    (got,) = torch.autograd.grad(kernel.sum(), x)
    close(got, 4 * x.sum(0).expand(4, -1))
    J = naive.jacobian(model, dict(model.named_parameters()), x)
    close(jacobian_rows(model, x), J)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double().train()
    x = randn(5, 3)
    state = torch.get_rng_state()
    first, second = ntk(model, x), ntk(model, x)
    close(first, second)  # dropout is off
    assert all(module.training for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_no_graph_without_gradients():
    model, x, y = by_name["mlp"].make()
    with torch.no_grad():
        assert not ntk(model, x).requires_grad
        assert not ggn(model, x, y, Categorical()).requires_grad
    assert ntk(model, x).requires_grad


def test_float32():
    model, x, y = by_name["mininet"].make()
    want = ggn(model, x, y, Categorical()).detach()
    got = ggn(model.float(), x.float(), y, Categorical()).detach()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m, x, y: ntk(m, x, outputs="mean"), "outputs must be 'sum', 'all' or the number"),
        (lambda m, x, y: ntk(m, x, outputs=3), "one of the 3 outputs, got 3"),
        (lambda m, x, y: ntk(m, x, weights=["head.*"]), "'head.\\*' fits no weight"),
        (lambda m, x, y: ntk(m, x, chunk=0), "chunk must be a whole number"),
        (lambda m, x, y: ntk(m, x[:0]), "at least one datum"),
        (lambda m, x, y: ntk(m, [1.0]), "inputs must be a tensor or a mapping"),
        (lambda m, x, y: jacobian_rows(m, x, torch.ones(2, 2)), "cotangents must be \\[K, 3\\]"),
        (lambda m, x, y: ggn(m, x, y[:2], Categorical()), "expected a tensor of 5 targets"),
        (lambda m, x, y: ggn(m, x, y, "classification"), "likelihood must be a function"),
        (lambda m, x, y: ggn(m, x, y, lambda f, y: f.sum()), "one value per datum"),
        (
            lambda m, x, y: ggn_blocks(m, x, y, Categorical(), blocks="layer"),
            "blocks must be one of tensor, module",
        ),
        (lambda m, x, y: kfac_factors(m, x, y, Categorical(), setting="sum"), "'expand' or"),
        (lambda m, x, y: ntk(m.requires_grad_(False), x), "no weights that require grad"),
    ],
)
def test_misuse(call, message):
    model, x, y = by_name["mlp"].make()
    with pytest.raises(CurvatureError, match=message):
        call(model, x, y)


def test_inference_mode_is_refused():
    model, x, _ = by_name["mlp"].make()
    with torch.inference_mode(), pytest.raises(CurvatureError, match="inference_mode"):
        ntk(model, x)
