"""Roots of the likelihoods' curvature, and their parameters."""

import pytest
import reference
import torch
from cases import targets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import hessian

import laplace_marglik
from laplace_marglik import Categorical, FromLogProb, Gaussian, MarglikError

NAN, INF = float("nan"), float("inf")


@pytest.mark.quick
@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0])
@pytest.mark.parametrize("make", [Categorical, Gaussian, lambda v: Gaussian(temperature=v)])
def test_noise_and_temperature_are_positive_and_finite(make, value):
    with pytest.raises(MarglikError, match="must be positive and finite"):
        make(value)


TRUE_ROOTS = ["fisher", "symmetric", "eigen"]
TAU, SIGMA = 1.3, 0.7
NAMED = {
    "categorical": laplace_marglik.Categorical(TAU),
    "gaussian": Gaussian(SIGMA, temperature=TAU),
    "bernoulli": laplace_marglik.Bernoulli(TAU),
    "poisson": laplace_marglik.Poisson(TAU),
}


SHAPES = {"flat": (4, 3), "sequence": (4, 3, 2), "image": (2, 3, 2, 2)}


def outputs(shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_columns(f):
    return torch.arange(f[0].numel()).expand(len(f), -1)


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("root", TRUE_ROOTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_roots_give_the_hessian(kind, root, shape):
    likelihood, f = NAMED[kind], outputs(SHAPES[shape])
    y = targets(kind, f)
    u = likelihood.root(f, y, root, all_columns(f))
    want = reference.autograd_hessian(reference.Likelihood(kind, SIGMA, TAU), f, y)
    torch.testing.assert_close(likelihood.curvature_scale().detach() * u @ u.mT, want)
    torch.testing.assert_close(
        likelihood.curvature_scale().detach() * likelihood.hessian(f, y).detach(), want
    )


@pytest.mark.parametrize("root", TRUE_ROOTS)
def test_heteroscedastic_roots_give_the_expected_hessian(root):
    likelihood, f = laplace_marglik.HeteroscedasticGaussian(TAU), outputs((4, 6))
    mean, log_variance = f.chunk(2, 1)
    # the Hessian is quadratic in y: two points integrate it exactly
    sd = torch.exp(log_variance / 2)
    lik = reference.Likelihood("heteroscedastic", tau=TAU)
    want = sum(reference.autograd_hessian(lik, f, mean + sign * sd) for sign in (1, -1)) / 2
    u = likelihood.root(f, mean, root, all_columns(f))
    torch.testing.assert_close(likelihood.curvature_scale().detach() * u @ u.mT, want)


def student_t(f, y):
    return -2.5 * torch.log1p((f - y).flatten(1).square() / 4).sum(1) - 0.3 * torch.sin(
        f.flatten(1)
    ).prod(1)


@pytest.mark.parametrize("root", TRUE_ROOTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_user_defined_roots_give_the_positive_part_of_the_hessian(root, shape):
    likelihood, f = FromLogProb(student_t), 3 * outputs(SHAPES[shape])
    y = outputs(SHAPES[shape], 1)
    blocks = [
        hessian(lambda v, i=i: -student_t(v[None], y[i : i + 1]).sum(), f[i]) for i in range(len(f))
    ]
    values, vectors = torch.linalg.eigh(torch.stack(blocks).reshape(len(f), f[0].numel(), -1))
    assert values.min() < -1e-3 and values.max() > 1e-3  # there is something to cut off
    u = likelihood.root(f, y, root, all_columns(f))
    torch.testing.assert_close(u @ u.mT, (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT)


@given(
    data=st.data(), shape=st.sampled_from(sorted(SHAPES)), kind=st.sampled_from([*NAMED, "user"])
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_block_roots_give_the_sub_block_of_any_columns(data, shape, kind):
    f = outputs(SHAPES[shape])
    c = f[0].numel()
    k = data.draw(st.integers(1, c))
    columns = torch.stack([torch.tensor(data.draw(st.permutations(range(c)))[:k]) for _ in f])
    likelihood = (
        FromLogProb(lambda f, y: -f.flatten(1).logsumexp(1)) if kind == "user" else NAMED[kind]
    )
    y = targets("gaussian" if kind == "user" else kind, f)
    curvature = likelihood.hessian(f, y).detach()
    want = torch.stack([h[i][:, i] for h, i in zip(curvature, columns, strict=True)])
    u = likelihood.block_root(f, y, columns)
    torch.testing.assert_close(
        torch.eye(k, dtype=f.dtype).expand_as(want) if u is None else u @ u.mT, want
    )
