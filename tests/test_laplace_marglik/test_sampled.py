"""Sampled linearised Laplace against exact linear algebra: samples, effective dimension, prior
updates, evidence.
"""

import pytest
import torch
from exact_posterior import EXACT, ROUGH, Exact, N, log_evidence
from torch import nn

from laplace_marglik import GaussianPrior, SampledLaplace
from laplace_marglik.errors import MarglikError
from laplace_marglik.posterior.sampled import ConjugateGradients, Sgd
from laplace_marglik.posterior.sampled.dimension import mackay
from laplace_marglik.posterior.sampled.mode import LinearModel
from laplace_marglik.posterior.sampled.precondition import RowPreconditioner, root_rows
from laplace_marglik.posterior.sampled.rounds import Plan, Residual, descend

# ------------------------------------------------------------------------------------------ samples


@pytest.fixture(params=["classification", "regression"])
def exact(request):
    return Exact(request.param)


def test_products_are_those_of_the_matrices(exact):
    posterior = exact.sampled(together=2)
    system, z = posterior.system(exact.loader), torch.randn(5, len(exact.w), dtype=torch.float64)
    torch.testing.assert_close(system.product(z), z @ exact.h)
    posterior.linear.together = 1
    torch.testing.assert_close(system.product(z), z @ exact.h)


def test_samples_have_the_covariance_of_the_posterior(exact):
    k = 1000
    posterior = exact.sampled(k).fit(exact.loader)
    assert max(posterior.diagnostics()["residuals"]) < 1e-5
    # N(0, I) if they are N(0, H^-1)
    white = posterior.weight_samples @ torch.linalg.cholesky(exact.h)
    covariance = white.mT @ white / k
    error = covariance - torch.eye(len(exact.w), dtype=torch.float64)
    d = len(exact.w)
    assert error.abs().max() < 5.5 / k**0.5 * 2**0.5
    # its expectation under Wishart
    assert error.square().sum().item() == pytest.approx(d * (d + 1) / k, rel=0.2)
    assert white.mean(0).abs().max() < 5 / k**0.5


def test_noise_of_the_data_has_the_curvature_as_covariance(exact):
    k = 2000
    u = exact.sampled(k).system(exact.loader).data_noise(exact.w[:1])
    scale = exact.m.diagonal().sqrt()
    assert (
        (u.mT @ u / k - exact.m) / (scale.unsqueeze(0) * scale.unsqueeze(1))
    ).abs().max() < 8 / k**0.5


def test_both_objectives_have_the_gradient_of_the_system(exact):
    posterior = exact.sampled(4).fit(exact.loader)
    system, z = posterior.system(exact.loader), torch.randn(4, len(exact.w), dtype=torch.float64)
    prior_noise = system.prior_noise(range(4), exact.w)
    whole = {}
    for noise_in, target in (("prior", prior_noise + posterior._u), ("data", prior_noise)):
        parts = [system.gradient(z, b, range(4), target, noise_in) for b in system.batches()]
        whole[noise_in] = torch.stack(parts).mean(0)
    torch.testing.assert_close(whole["prior"], whole["data"])
    torch.testing.assert_close(whole["prior"], z @ exact.h - prior_noise - posterior._u)
    for noise_in, target in (
        ("prior", (prior_noise + posterior._u)[1:3]),
        ("data", prior_noise[1:3]),
    ):
        parts = [
            system.gradient(z[1:3], b, range(1, 3), target, noise_in) for b in system.batches()
        ]
        torch.testing.assert_close(torch.stack(parts).mean(0), whole["prior"][1:3])


def test_gradient_noise_is_as_predicted():
    """Per datum: tr M_i - tr M_i^2 H^-1 with the noise in the data, tr M_i^2 H^-1 with it in the
    prior.
    """
    exact, k = Exact(), 800
    single = list(zip(exact.x.split(1), exact.y.split(1), strict=True))
    system = exact.sampled(k).system(single)
    u, target = system.data_noise(exact.w[:1]), system.prior_noise(range(k), exact.w)
    z = torch.linalg.solve(exact.h, (target + u).mT).mT
    decay, moments = z * exact.a().detach(), {"prior": [], "data": []}
    for batch in system.batches():
        for noise_in, own in (("prior", target + u), ("data", target)):
            g = (system.gradient(z, batch, range(k), own, noise_in) - decay + own) / N
            moments[noise_in].append(g.square().sum(1).mean())
    inverse = exact.h.inverse()
    reduced = torch.stack([(m @ m @ inverse).trace() for m in exact.each])
    plain = torch.stack([m.trace() for m in exact.each]) - reduced
    torch.testing.assert_close(torch.stack(moments["prior"]), reduced, rtol=0.3, atol=0)
    torch.testing.assert_close(torch.stack(moments["data"]), plain, rtol=0.3, atol=0)
    assert sum(moments["prior"]).item() == pytest.approx(reduced.sum().item(), rel=0.06)
    assert sum(moments["data"]).item() == pytest.approx(plain.sum().item(), rel=0.06)


@pytest.mark.parametrize(
    "exact, noise_in", [("classification", "prior"), ("regression", "data")], indirect=["exact"]
)
def test_stochastic_gradients_reach_the_same_samples(exact, noise_in):
    expected = exact.sampled(4).fit(exact.loader)
    settings = Sgd(noise_in=noise_in)
    found = exact.sampled(4, settings).fit(exact.loader)
    error = (found.weight_samples - expected.weight_samples).norm(
        dim=1
    ) / expected.weight_samples.norm(dim=1)
    assert error.max() < 0.1
    assert max(found.diagnostics()["residuals"]) < 0.1
    assert (found.mode - expected.mode).norm() < 0.15 * expected.mode.norm()


@pytest.mark.parametrize("batch", [11, 30])
def test_minibatch_gradients_agree_with_conjugate_gradients_at_their_defaults(batch):
    """Also where the last batch is shorter: 11, 11 and 8."""
    exact = Exact(structure="scalar")
    loader = list(zip(exact.x.split(batch), exact.y.split(batch), strict=True))
    expected = exact.sampled(4).fit(exact.loader)
    found = exact.sampled(4, Sgd())
    found.fit(loader)
    dense = torch.linalg.solve(exact.h, _right_hand_sides(found, exact).mT).mT
    error = exact_norm(found.weight_samples - dense, exact) / exact_norm(dense, exact)
    assert error.max() < 0.05 and found.converged
    assert found.diagnostics()["mode_error"] <= 0.01
    assert (found.mode - expected.mode).norm() < 0.02 * expected.mode.norm()
    assert found.update_prior(loader).item() == pytest.approx(
        (found_gamma(dense, exact) / expected.mode.square().sum()).item(), rel=0.05
    )


def _right_hand_sides(posterior, exact):
    system = posterior.system(exact.loader)
    return system.prior_noise(range(posterior.samples), exact.w) + posterior._u


def exact_norm(vectors, exact):
    """|v|_H of each vector."""
    return (vectors @ exact.h * vectors).sum(1).sqrt()


def found_gamma(z, exact):
    """The effective dimension in function space by samples z."""
    return (z @ exact.m * z).sum(1).mean()


def test_rounds_calm_down_where_batches_contradict_each_other():
    """Two batches in directions of their own: the first batch's spectrum misses the second's."""
    h = [torch.diag(torch.tensor(d, dtype=torch.float64)) for d in ([1.0, 0.0], [0.0, 400.0])]
    b = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    whole = sum(h) + torch.eye(2, dtype=torch.float64)

    def residual(z):
        r = z @ whole - b
        return Residual(
            lambda d, i: 2 * d @ h[i] + d + r,
            r.norm(dim=1, keepdim=True),
            (r.norm() / b.norm()).item(),
            0.5 * (z * (r - b)).sum(1),
        )

    z = torch.zeros(1, 2, dtype=torch.float64)
    plan = Plan.of(Sgd(), steepest=2.0, flattest=1.0, n_batches=2)
    reached = descend(residual, lambda: range(2), z, Sgd(), plan)
    assert reached.residual <= 0.01 and (z @ whole - b).norm() <= 0.011 * b.norm()
    with pytest.raises(MarglikError, match="step"):
        descend(residual, lambda: range(2), torch.zeros_like(z), Sgd(rate=1.0, clip=1e9), plan)


@pytest.mark.parametrize(
    "solver, more",
    [
        (ConjugateGradients(tolerance=1e-10, max_iterations=3), "max_iterations"),
        (Sgd(steps=3), "solver='cg'"),
    ],
)
def test_few_steps_are_said_and_marked(exact, solver, more):
    rough = exact.sampled(2, solver)
    with pytest.warns(UserWarning, match=f"not converged: after 3 steps .*{more}"):
        rough.fit(exact.loader)
    diagnostics = rough.diagnostics()
    assert diagnostics["steps"] == 3 and max(diagnostics["residuals"]) > 1e-4
    assert not diagnostics["converged"] and not rough.converged


def test_errors_bound_what_residuals_hide():
    """Where M is steep against A, |r| / |b| is small long before the flat directions are solved
    for.
    """
    exact = Exact(precision=0.01)
    rough = exact.sampled(4, ConjugateGradients(tolerance=0.02)).fit(exact.loader)
    residuals, errors = (
        torch.tensor(rough.diagnostics()[name]) for name in ("residuals", "errors")
    )
    z = (
        exact.sampled(4, ConjugateGradients(tolerance=1e-10, max_iterations=1000))
        .fit(exact.loader)
        .weight_samples
    )
    wrong = rough.weight_samples - z

    def length(v):
        return torch.einsum("kp,pq,kq->k", v, exact.h, v).sqrt()

    true = length(wrong) / length(rough.weight_samples)
    assert residuals.max() < 0.02 and (true <= errors).all()
    assert (true > 3 * residuals).all() and (errors < 10 * true).all()


def test_warm_starts_save_iterations():
    exact = Exact()
    posterior = exact.sampled(4).fit(exact.loader)
    cold, z = posterior.diagnostics()["steps"], posterior.weight_samples.clone()
    with torch.no_grad():
        exact.prior.log_precision += 0.01
    assert posterior.refit(exact.loader).diagnostics()["steps"] < cold
    assert 0 < (posterior.weight_samples - z).norm() < 0.05 * z.norm()  # common random numbers


def test_rows_make_a_preconditioner():
    exact = Exact(precision=0.01)
    system = exact.sampled(1).system(exact.loader)
    identity = torch.eye(len(exact.w), dtype=torch.float64)
    conditions = [torch.linalg.cond(exact.h).item()]
    for r in (10, 20, N):
        precondition = RowPreconditioner(system, root_rows(system, r, exact.w))
        inverse, v = precondition(identity), precondition.rows
        diagonal = exact.a(precondition._diagonal.log()).detach()
        torch.testing.assert_close(inverse, (torch.diag(diagonal) + N / r * v.mT @ v).inverse())
        values = torch.linalg.eigvals(inverse @ exact.h).real
        conditions.append((values.max() / values.min()).item())
    assert conditions == sorted(conditions, reverse=True) and conditions[-1] < 0.1 * conditions[0]
    settings = ConjugateGradients(tolerance=1e-6, max_iterations=500, rows=N)
    z = [exact.sampled(2, solver).fit(exact.loader).weight_samples for solver in (EXACT, settings)]
    torch.testing.assert_close(*z, rtol=1e-3, atol=1e-3)


# -------------------------------------------------------------------------- dimension and the prior


def test_effective_dimension_both_ways(exact):
    posterior = exact.sampled(1000).fit(exact.loader)
    truth = exact.gammas()
    for space in ("function", "weight"):
        found = posterior.effective_dimension(space)
        assert abs(found.total - truth.sum().item()) < 4 * found.standard_error
        assert ((found.groups - truth).abs() < 5 * found.group_errors).all()
        assert found.standard_error < 0.03 * found.total


def test_one_sample_is_as_good_as_predicted():
    """Variance of one sample's estimate: 2 tr (H^-1 M)^2 in function space, 2 tr (A H^-1)^2 in
    weight space.
    """
    exact = Exact()
    posterior = exact.sampled(1500).fit(exact.loader)
    inverse = exact.h.inverse()
    for space, matrix in (
        ("function", inverse @ exact.m),
        ("weight", inverse * exact.a().detach()),
    ):
        predicted = (2 * (matrix @ matrix).trace()).sqrt().item()
        measured = posterior.effective_dimension(space).standard_error * 1500**0.5
        assert measured == pytest.approx(predicted, rel=0.08)
    single = exact.sampled(1).fit(exact.loader).effective_dimension()
    assert single.standard_error == pytest.approx((2 * single.total) ** 0.5)


def updated(exact, log_precision):
    """log gamma_l - log |theta_l|^2 of the linear regression model, by matrices."""
    inverse = torch.linalg.inv(exact.m + torch.diag(exact.a(log_precision)))
    targets = exact.y - exact.f + torch.einsum("ncp,p->nc", exact.j, exact.w)
    theta = inverse @ torch.einsum("ncp,ncd,nd->p", exact.j, exact.b, targets)
    sizes = [(exact.prior.groups[name], p.numel()) for name, p in exact.model.named_parameters()]
    group = torch.cat([torch.full((size,), index) for index, size in sizes])
    sums = [
        torch.zeros_like(log_precision).index_add(0, group, v)
        for v in ((exact.m @ inverse).diagonal(), theta**2)
    ]
    return sums[0].log() - sums[1].log()


@pytest.mark.parametrize("structure", ["scalar", {"0.*": "first", "*": "last"}])
def test_the_fixed_point_of_prior_updates_maximises_the_evidence(structure):
    exact = Exact("regression", structure)
    leaf = exact.prior.log_precision.detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([leaf], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -log_evidence(exact, leaf)
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(updated(exact, leaf.detach()), leaf.detach(), atol=1e-4, rtol=0)
    with torch.no_grad():
        exact.prior.log_precision.copy_(leaf + 0.5)
    posterior = exact.sampled(300, ROUGH).fit(exact.loader)
    for _ in range(8):
        posterior.update_prior(exact.loader)
    slope = torch.autograd.functional.jacobian(lambda v: updated(exact, v), leaf.detach())
    # of the fixed point to log gamma
    response = torch.linalg.inv(torch.eye(len(leaf), dtype=torch.float64) - slope)
    gamma = posterior.effective_dimension()
    error = (response * gamma.group_errors / gamma.groups).square().sum(1).sqrt()
    assert (
        (exact.prior.log_precision - leaf).detach().abs() < 3.5 * error + 0.003
    ).all() and error.max() < 0.2


def test_the_update_is_the_root_of_the_evidence_gradient():
    exact = Exact("regression")
    posterior = exact.sampled(2).fit(exact.loader)
    leaf = exact.prior.log_precision.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_evidence(exact, leaf), leaf)
    squares = LinearModel(posterior.system(exact.loader), True).squares(posterior.mode)
    torch.testing.assert_close(gradient, (exact.gammas() - leaf.detach().exp() * squares) / 2)
    counts = torch.tensor([10.0, 1.0], dtype=torch.float64)
    kept = mackay(
        torch.tensor([-3.0, 1.4], dtype=torch.float64), torch.ones(2, dtype=torch.float64), counts
    )
    assert kept.tolist() == [1.0, 0.5]  # estimates outside of (0, P_l) are brought back


def test_the_mode_is_that_of_the_linear_model(exact):
    posterior = exact.sampled(1, ConjugateGradients(tolerance=1e-8)).fit(exact.loader)
    theta = posterior.mode.clone().requires_grad_()
    h = exact.f + torch.einsum("ncp,p->nc", exact.j, theta - exact.w)
    tau = exact.likelihood.log_temperature.exp().item()
    loss = (
        -exact.likelihood.log_prob(h, exact.y).sum() / tau
        + (exact.a().detach() * theta.square()).sum() / 2
    )
    (gradient,) = torch.autograd.grad(loss, theta)
    assert gradient.norm() < 1e-4
    no_offset = exact.sampled(1, ConjugateGradients(tolerance=1e-8), offset=False).fit(exact.loader)
    theta = no_offset.mode.clone().requires_grad_()
    h = torch.einsum("ncp,p->nc", exact.j, theta)
    loss = (
        -exact.likelihood.log_prob(h, exact.y).sum() / tau
        + (exact.a().detach() * theta.square()).sum() / 2
    )
    assert torch.autograd.grad(loss, theta)[0].norm() < 1e-4


class Rescaled(nn.Module):
    """tanh(x (c V))  W: the same function for every c, with columns of its Jacobian times c."""

    def __init__(self, c):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.c = c
        self.v = nn.Parameter(torch.randn(4, 5, generator=generator, dtype=torch.float64) / c)
        self.w = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x @ (self.c * self.v)) @ self.w


def test_the_g_prior_does_not_see_the_scale_of_features():
    exact, logits, precisions = Exact(), {}, {}
    for scaling in ("none", "g-prior"):
        for c in (1.0, 3.0):
            model = Rescaled(c)
            prior = GaussianPrior(model, "scalar", precision=2.0)
            posterior = SampledLaplace(
                model,
                "classification",
                n_data=N,
                prior=prior,
                samples=2,
                solver=EXACT,
                scaling=scaling,
                together=2,
                generator=torch.Generator().manual_seed(3),
            ).fit(exact.loader)
            posterior.update_prior(exact.loader)
            logits[scaling, c], precisions[scaling, c] = (
                posterior.sample_logits(exact.x),
                prior.precision.item(),
            )
    torch.testing.assert_close(logits["g-prior", 1.0], logits["g-prior", 3.0], rtol=1e-5, atol=1e-6)
    assert (logits["none", 1.0] - logits["none", 3.0]).abs().max() > 0.1
    assert precisions["none", 1.0] != pytest.approx(precisions["none", 3.0], rel=0.05)


def test_the_scales_of_the_g_prior_are_the_curvature_of_features():
    exact = Exact()
    posterior = exact.sampled(1500, ConjugateGradients(tolerance=1e-2), scaling="g-prior").fit(
        exact.loader
    )
    expected = exact.m.diagonal().rsqrt()
    torch.testing.assert_close(posterior.linear.scale, expected, rtol=0.1, atol=0)
    again = posterior.weight_samples.clone()
    posterior.refit(exact.loader)
    torch.testing.assert_close(posterior.weight_samples, again, rtol=0.1, atol=0.02)
