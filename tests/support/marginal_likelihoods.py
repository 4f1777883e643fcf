"""Marginal likelihoods of the cases, and the same numbers from the naive reference."""

import reference
import torch
from cases import CASES, LIKELIHOOD_CASES
from small_networks import mlp, randn

from asdl_marglik import STRUCTURES
from laplace_marglik import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPrior,
    HeteroscedasticGaussian,
    MarginalLikelihood,
    Poisson,
)

__all__ = [
    "STRUCTURES",
    "X",
    "Y",
    "assert_reference_value",
    "by_name",
    "close",
    "expected",
    "marglik",
    "setup",
]

LIKELIHOODS = {
    "categorical": Categorical,
    "gaussian": lambda: Gaussian(0.7).double(),
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}
X, Y = randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])  # of `marglik`
N_DATA = 24  # the block is a part of a larger data set
by_name = {case.name: case for case in [*CASES, *LIKELIHOOD_CASES]}


def setup(case, structure, *, prior="layerwise", augment=None, **options):
    """A marginal likelihood with a non-trivial prior, and its data."""
    model, x, y = case.make()
    model.eval()
    torch.manual_seed(3)
    gaussian_prior = GaussianPrior(
        model,
        prior,
        mean={n: 0.1 * torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad},
    )
    with torch.no_grad():
        gaussian_prior.log_precision.normal_(0.5, 0.5)
    ml = MarginalLikelihood(
        model,
        LIKELIHOODS[case.likelihood](),
        n_data=N_DATA,
        prior=gaussian_prior,
        structure=structure,
        augment=augment,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    return ml, x, y


def expected(ml, case, x, y, columns, *, sharing="expand", blocks="module", root=None):
    """The same evidence from the naive reference."""
    names = list(ml.weights)
    deltas = [
        ml.prior.log_precision[ml.prior.groups[n]].exp().expand(ml.weights[n].numel())
        for n in names
    ]
    means = torch.cat(
        [torch.as_tensor(ml.prior.mean_of(n)).expand(ml.weights[n].shape).flatten() for n in names]
    )
    lik = reference.Likelihood(case.likelihood, sigma=0.7 if case.likelihood == "gaussian" else 1.0)
    block_maker = reference.module_blocks if blocks == "module" else reference.tensor_blocks
    plan = ml._planned(x)
    copies = x if ml.augment is None else ml.augment(x)
    return reference.evidence(
        ml.model,
        copies,
        y,
        lik,
        torch.cat(deltas),
        structure=ml.structure,
        n_data=N_DATA,
        columns=columns,
        root=root or ml.root or "paper",
        mean=means,
        names=names,
        blocks=block_maker(ml.model, names),
        sharing=sharing,
        augmented=ml.augment is not None,
        dense=[n for n in names if n not in plan.kronecker],
    )


def close(ours, theirs, rtol=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(ours).detach(), torch.as_tensor(theirs).detach(), rtol=rtol, atol=1e-9
    )


def marglik(model=None, likelihood="classification", n_data=6, *, prior=None, **options):
    """A marginal likelihood of a small network, seeded; prior: one, or the groups of one."""
    model = mlp() if model is None else model
    if not isinstance(prior, GaussianPrior):
        prior = GaussianPrior(model, prior or "layerwise", hyper=options.get("hyper", ()))
    options.setdefault("generator", torch.Generator().manual_seed(0))
    return MarginalLikelihood(model, likelihood, n_data=n_data, prior=prior, **options)


def assert_reference_value(ml, x, y, kind="categorical"):
    names = list(ml.weights)
    delta = reference.per_weight(ml.model, names, ml.prior.precision.detach())
    dense = [name for name in names if name not in ml._planned(x).kronecker]
    want = reference.evidence(
        ml.model,
        x,
        y,
        reference.Likelihood(kind),
        delta,
        structure=ml.structure,
        n_data=ml.n_data,
        dense=dense,
    )
    close(ml(x, y).total, want.total)
