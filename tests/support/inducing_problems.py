"""Small problems for blocks with an inducing set, and their evidence by the naive oracle."""

import conditioned_reference as oracle
import reference
import torch
from cases import targets
from torch import nn

from laplace_marglik import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPrior,
    HeteroscedasticGaussian,
    MarginalLikelihood,
    Poisson,
)

N = 7
KINDS = {
    Categorical: "categorical",
    Gaussian: "gaussian",
    Bernoulli: "bernoulli",
    Poisson: "poisson",
    HeteroscedasticGaussian: "heteroscedastic",
}


def mlp(outputs, width=4, inputs=4, activation=nn.Tanh):
    return nn.Sequential(nn.Linear(inputs, width), activation(), nn.Linear(width, outputs))


# name: (network, inputs, likelihood); temperatures and noises are not one, and learnt
PROBLEMS = {
    "softmax3": (lambda: mlp(3), 4, lambda: Categorical(1.3, learn_temperature=True)),
    "softmax2": (lambda: mlp(2), 4, lambda: Categorical(0.8, learn_temperature=True)),
    "gaussian": (
        lambda: mlp(2),
        4,
        lambda: Gaussian(0.7, temperature=1.2, learn_temperature=True),
    ),
    "bernoulli": (lambda: mlp(2), 4, lambda: Bernoulli(1.3, learn_temperature=True)),
    "poisson": (lambda: mlp(2), 4, lambda: Poisson(1.3, learn_temperature=True)),
    "heteroscedastic": (
        lambda: mlp(4),
        4,
        lambda: HeteroscedasticGaussian(1.3, learn_temperature=True),
    ),
    "single": (lambda: mlp(1), 4, lambda: Bernoulli(0.9)),
    # large inputs give large outputs
    "leaky": (lambda: mlp(3, activation=nn.LeakyReLU), 4, Categorical),
    # fewer weights than rows: 9, and 6 + 9
    "linear": (lambda: nn.Linear(2, 3), 2, lambda: Categorical(1.3, learn_temperature=True)),
    "narrow": (lambda: mlp(3, 2, 2), 2, lambda: Categorical(1.3, learn_temperature=True)),
}


def problem(name, *, n=N, seed=0):
    """A network of random weights with its data and likelihood, all in float64."""
    build, inputs, likelihood = PROBLEMS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, x = build().double(), torch.randn(n, inputs, dtype=torch.float64)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.6)
        likelihood = likelihood()
        return model, x, targets(KINDS[type(likelihood)], model(x), seed), likelihood


def marglik(name, structure="ntk", *, prior="layerwise", hyper=(), n=N, seed=0, **options):
    """A marginal likelihood of a problem under a prior with its own mean and precisions; the data.

    Options are those of `MarginalLikelihood`.
    """
    model, x, y, likelihood = problem(name, n=n, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        means = {k: 0.2 * torch.randn_like(p) for k, p in model.named_parameters()}
        means = {k: mean for k, mean in means.items() if k not in hyper}
        gaussian = GaussianPrior(model, prior, mean=means, hyper=hyper)
        with torch.no_grad():
            gaussian.log_precision.normal_(-0.3, 0.6)
    ml = MarginalLikelihood(
        model, likelihood, n_data=n, prior=gaussian, structure=structure, hyper=hyper, **options
    )
    return ml, x, y


def row_numbers(block, n_outputs):
    """The rows of a block as numbers i C + c among all rows: those of U, those of B."""
    numbers = block.index[block.rows[:, 0]] * n_outputs + block.rows[:, 1]
    return numbers[: block.n_inducing].tolist(), numbers[block.n_inducing :].tolist()


def likelihood_of(ml):
    """The likelihood for the oracle, at the current noise and temperature."""
    sigma = ml.likelihood.log_sigma.exp() if isinstance(ml.likelihood, Gaussian) else 1.0
    tau = ml.likelihood.log_temperature.exp()
    return reference.Likelihood(KINDS[type(ml.likelihood)], sigma, tau)


def precisions(ml):
    """The prior precision of every weight [P]."""
    values = ml.prior.log_precision.exp()
    each = [values[ml.prior.groups[k]].expand(w.numel()) for k, w in ml.weights.items()]
    return torch.cat(each).double()


def rows_of(ml, x, y, root):
    """All rows V [n C, P] at the current hyperparameters, and log p / tau of each datum [n]."""
    inputs = x if ml.augment is None else ml.augment(x)
    augmented = ml.augment is not None
    return oracle.all_rows(ml.model, [*ml.weights], inputs, y, likelihood_of(ml), root, augmented)


def kernel_of(ml, x, y, root):
    """A = I + V P0^-1 V^T of all rows of the data, without a graph."""
    return oracle.kernel(rows_of(ml, x, y, root)[0], precisions(ml)).detach()


def expected(ml, x, y, block, root, *, likelihood_batch=None):
    """The evidence of a block by the oracle; x and y are ALL data."""
    V, log_p = rows_of(ml, x, y, root)
    U, B = row_numbers(block, len(V) // len(y))
    deviation = [(w.detach() - ml.prior.mean_of(k)).flatten() for k, w in ml.weights.items()]
    layers = None
    if ml.structure == "blockdiag":
        layers = reference.module_blocks(ml.model, [*ml.weights])
    fit = None
    if likelihood_batch is not None:
        other = rows_of(ml, *likelihood_batch, root)[1]
        fit = len(y) / len(other) * other.sum()
    return oracle.estimate(
        V, log_p, torch.cat(deviation), precisions(ml), U, B, layers=layers, log_likelihood=fit
    )
