"""Covariances of a prior, diagonal plus low rank, and those of a training run."""

import math

import torch
from small_networks import GROUPS, mlp, randn
from torch.distributions import LowRankMultivariateNormal
from variational_objectives import objective

from laplace_marglik import GaussianPrior, LowRankCovariance


def test_a_covariance_without_a_factor_is_diagonal_and_the_identity_changes_nothing():
    model = mlp()
    own = {name: w for name, w in model.named_parameters() if name.startswith("0.")}
    diagonal = {name: 0.5 + randn(*w.shape).square() for name, w in own.items()}
    nothing = {name: torch.zeros(*w.shape, 2, dtype=torch.float64) for name, w in own.items()}
    covariances = [LowRankCovariance(diagonal), LowRankCovariance(diagonal, nothing)]
    values = [
        objective(model, prior=GaussianPrior(model, groups=GROUPS, covariance={"0.*": c})).kl()
        for c in covariances
    ]
    torch.testing.assert_close(*values)
    ones = LowRankCovariance({name: torch.ones_like(w) for name, w in own.items()})
    plain = objective(model, prior=GaussianPrior(model, groups=GROUPS)).kl()
    torch.testing.assert_close(
        objective(model, prior=GaussianPrior(model, groups=GROUPS, covariance={"0.*": ones})).kl(),
        plain,
    )


def test_the_density_is_that_of_torchs_low_rank_gaussian():
    s, q, x = randn(3, 2).square(), randn(3, 2, 5, seed=1), randn(3, 2, seed=2)
    low = LowRankCovariance.swag({"w": s}, {"w": q}, jitter=0.3)
    gaussian = LowRankMultivariateNormal(
        torch.zeros(6).double(), q.flatten(0, 1) / 8**0.5, s.flatten() / 2 + 0.3
    )
    log_density = -(low.quadratic({"w": x}) + low.log_det + 6 * math.log(2 * math.pi)) / 2
    torch.testing.assert_close(log_density, gaussian.log_prob(x.flatten()))


def test_the_covariance_of_a_training_run():
    s, q = randn(3, 2).square(), randn(3, 2, 5, seed=1)
    low = LowRankCovariance.swag({"w": s}, {"w": q})
    flat = q.flatten(0, 1)
    sigma = torch.diag(s.flatten()) / 2 + 0.1 * torch.eye(6).double() + flat @ flat.mT / 8
    x = randn(3, 2, seed=2)
    torch.testing.assert_close(low.log_det, sigma.logdet())
    torch.testing.assert_close(low.quadratic({"w": x}), x.flatten() @ sigma.inverse() @ x.flatten())
    torch.testing.assert_close(
        low.trace({"w": x.square()}), (sigma.inverse().diagonal() * x.flatten() ** 2).sum()
    )
