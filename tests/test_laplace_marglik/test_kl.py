"""The divergence of Gaussians and the prior precisions that minimise it."""

import itertools

import pytest
import torch
from small_networks import GROUPS, mlp, randn
from torch.distributions import MultivariateNormal, kl_divergence
from variational_objectives import low_rank, objective

from laplace_marglik import GaussianPrior

PRIORS = {
    "scalar": lambda model: GaussianPrior(model, "scalar", 2.0),
    "layerwise": lambda model: GaussianPrior(model, "layerwise", 2.0, mean=0.1),
    "diagonal": lambda model: GaussianPrior(model, "diagonal", 2.0),
    "groups": lambda model: GaussianPrior(
        model, groups=GROUPS, mean={"0.weight": randn(5, 4, seed=7)}
    ),
    "low rank": lambda model: GaussianPrior(
        model,
        groups=GROUPS,
        mean={"0.weight": randn(5, 4, seed=7)},
        covariance={"0.*": low_rank(model, "0.")},
    ),
}


def dense(elbo):
    """Means and covariances of posterior and prior, built naively."""
    prior, model = elbo.prior, elbo.model
    weights = dict(model.named_parameters())
    variance = elbo.prior_variance()
    mean, blocks, sigma = [], [], []
    for name, w in weights.items():
        group = prior.groups[name]
        v = variance[name] if isinstance(group, slice) else variance[prior.group_names[group]]
        mean.append((torch.as_tensor(prior.mean_of(name)).double().expand(w.shape)).flatten())
        blocks.append(v.expand(w.shape).flatten())
        own = elbo.width.groups[name]
        s = elbo.sigma[own] if isinstance(own, int) else elbo.sigma[own].reshape(w.shape)
        sigma.append(s.expand(w.shape).flatten())
    covariance = torch.diag(torch.cat(blocks))
    for number, low in prior.covariance.items():
        own = torch.cat(
            [torch.full((w.numel(),), prior.groups[n] == number) for n, w in weights.items()]
        )
        u = torch.cat([low._scaled[n] * low.diagonal[n].reshape(-1, 1) for n in low.diagonal])
        d = torch.cat([d.flatten() for d in low.diagonal.values()])
        block = variance[prior.group_names[number]] * (torch.diag(d) + u @ u.mT)
        covariance[own.nonzero(), own.nonzero().mT] = block
    m = torch.cat([w.flatten() for w in weights.values()])
    return MultivariateNormal(m, torch.diag(torch.cat(sigma).square())), MultivariateNormal(
        torch.cat(mean), covariance
    )


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("posterior", ["scalar", "group", "diagonal"])
@pytest.mark.parametrize("variance", ["optimal", "fixed"])
def test_the_divergence_is_that_of_dense_gaussians(prior, posterior, variance):
    model = mlp()
    elbo = objective(model, prior=PRIORS[prior](model), posterior=posterior, variance=variance)
    with torch.no_grad():
        elbo.width.raw_sigma += randn(len(elbo.width.raw_sigma)) + 5
    q, p = dense(elbo)
    torch.testing.assert_close(elbo.kl(), kl_divergence(q, p))


@pytest.mark.parametrize("prior", PRIORS)
def test_the_closed_form_is_the_minimum_and_obeys_the_envelope_theorem(prior):
    model = mlp()
    elbo = objective(model, prior=PRIORS[prior](model), sigma=0.3)
    best = elbo.kl()
    gradient = torch.autograd.grad(best, [elbo.width.raw_sigma, *model.parameters()])
    elbo.update_prior()
    elbo.variance = "fixed"
    torch.testing.assert_close(elbo.kl(), best)
    detached = torch.autograd.grad(elbo.kl(), [elbo.width.raw_sigma, *model.parameters()])
    for inside, outside in zip(gradient, detached, strict=True):
        torch.testing.assert_close(inside, outside)
    for entry, shift in itertools.product(range(len(elbo.prior.log_precision)), (-0.1, 0.1)):
        with torch.no_grad():
            elbo.prior.log_precision[entry] += shift
            assert elbo.kl() > best
            elbo.prior.log_precision[entry] -= shift


def test_the_published_closed_form():
    """lambda* = |m - mu|^2 / D_b + sigma^2, tau* = |m|^2 / D_c + sigma^2, KL* = sum d/2
    log(v*/sigma^2) (L2-SP).
    """
    model, pretrained = mlp(), {"0.weight": randn(5, 4, seed=3), "0.bias": randn(5, seed=4)}
    elbo = objective(model, prior=GaussianPrior(model, groups=GROUPS, mean=pretrained), sigma=0.2)
    moved = torch.cat(
        [(w - pretrained[f"0.{n}"]).flatten() for n, w in model[0].named_parameters()]
    )
    head = torch.cat([w.flatten() for w in model[2].parameters()])
    lam, tau = (e.square().mean() + 0.04 for e in (moved, head))
    found = elbo.prior_variance()
    torch.testing.assert_close(found, {"0.*": lam.detach(), "2.*": tau.detach()})
    torch.testing.assert_close(elbo.kl(), (25 * (lam / 0.04).log() + 18 * (tau / 0.04).log()) / 2)
    elbo.update_prior()
    torch.testing.assert_close(elbo.prior.precision.detach(), 1 / torch.stack([lam, tau]).detach())
