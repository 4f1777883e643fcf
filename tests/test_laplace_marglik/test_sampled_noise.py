"""The variance of minibatch gradients in closed form, against all batches of many draws."""

import itertools

import pytest
import torch
from exact_posterior import Exact, N

from laplace_marglik.errors import MarglikError
from laplace_marglik.posterior.sampled.noise import gradient_noise

PRECISION = 0.7


def kernel(exact):
    """V V^T, by roots of Lambda from its eigenvalues."""
    values, vectors = torch.linalg.eigh(exact.b)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    rows = torch.einsum("ncd,ncp->ndp", root, exact.j)
    return torch.einsum("ncp,mdp->ncmd", rows, rows)


@pytest.mark.parametrize("at", ["start", "solution"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_variance_is_that_of_drawn_gradients(likelihood, at):
    """Batches of three, by the variance over single data; then all pairs, to check its factor."""
    exact, k, batch = Exact(likelihood, "scalar", PRECISION), 1000, 3
    single = list(zip(exact.x.split(1), exact.y.split(1), strict=True))
    system = exact.sampled(k).system(single)
    n = system.prior_noise(range(k), exact.w)
    u = system.data_noise(exact.w[:1])
    z = n / PRECISION if at == "start" else torch.linalg.solve(exact.h, (n + u).mT).mT
    expected = gradient_noise(kernel(exact), PRECISION, batch, at)
    for noise_in, target in (("prior", n + u), ("data", n)):
        g = torch.stack(
            [system.gradient(z, b, range(k), target, noise_in) for b in system.batches()]
        )
        spread = (g - g.mean(0)).square().sum(2).mean(1).sum() / (N - 1)
        found = spread / batch * (1 - batch / N)
        assert getattr(expected, noise_in) == pytest.approx(found.item(), rel=0.1)
    pairs = torch.stack([(g[i] + g[j]) / 2 for i, j in itertools.combinations(range(N), 2)])
    found = (pairs - g.mean(0)).square().sum(2).mean()
    assert gradient_noise(kernel(exact), PRECISION, 2, at).data == pytest.approx(
        found.item(), rel=0.1
    )


def test_leverage_is_weighted_by_curvature():
    exact = Exact(structure="scalar", precision=PRECISION)
    found = gradient_noise(kernel(exact), PRECISION, 5)
    inverse = exact.h.inverse()
    levered = sum((m @ m @ inverse).trace() for m in exact.each)
    assert found.leverage == pytest.approx((levered / exact.m.trace()).item())
    assert found.mean_leverage == pytest.approx((exact.m @ inverse).trace().item() / (3 * N))
    strong = gradient_noise(kernel(exact), 1e4, 5)
    assert strong.leverage < 0.01 and strong.ratio > 50  # L' wins where data determine little
    weak = gradient_noise(kernel(exact)[:4, :, :4], 1e-4, 2)
    assert weak.leverage > 0.5 and weak.ratio < 1  # and loses where each determines itself


def test_what_has_no_variance_is_refused():
    whole = kernel(Exact())
    for call in (
        lambda: gradient_noise(whole, 1.0, N),
        lambda: gradient_noise(whole[0], 1.0, 3),
        lambda: gradient_noise(whole, 1.0, 3, "middle"),
    ):
        with pytest.raises(MarglikError, match=r"expected a kernel|must be"):
            call()
