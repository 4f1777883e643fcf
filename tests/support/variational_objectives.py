"""Objectives and covariances of the variational tests."""

import torch
from small_networks import mlp, randn

from laplace_marglik import DataEmphasizedELBO, GaussianPrior, LowRankCovariance


def objective(model=None, likelihood="classification", n_data=12, prior=None, **options):
    model = model or mlp()
    options.setdefault("generator", torch.Generator().manual_seed(1))
    return DataEmphasizedELBO(
        model, likelihood, n_data=n_data, prior=prior or GaussianPrior(model), **options
    )


def low_rank(model, prefix, rank=3):
    own = {name: w for name, w in model.named_parameters() if name.startswith(prefix)}
    diagonal = {
        name: 0.5 + randn(*w.shape, seed=i).square() for i, (name, w) in enumerate(own.items())
    }
    factor = {name: randn(*w.shape, rank, seed=9 + i) for i, (name, w) in enumerate(own.items())}
    return LowRankCovariance(diagonal, factor)
