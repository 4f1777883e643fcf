"""Regression on scikit-learn's diabetes data: decay and noise, learned or searched for.

Inputs and targets are standardised with the training set's mean and deviation; four fifths of the
442 patients are trained on, drawn anew for every seed. Log-likelihoods are per patient, of targets
in units of their deviation; "accuracy" is the share of variance explained (R squared).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

from laplace_marglik import EvidenceLearner, Gaussian, GaussianPrior, MarginalLikelihood
from laplace_marglik.schedule import cosine, set_rate

DEFAULT = "default decay"
GRID = "grid of decay and noise"
RIDGE, PROCESS = "BayesianRidge", "Gaussian process"
PEOPLE = (DEFAULT, GRID, RIDGE, PROCESS)
OURS = ("learned decay and noise", "learned decay and noise, posterior")
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the mean loss; the noise's variance is part of it
NOISES = (0.5, 0.6, 0.7, 0.8, 1.0)
ADAMW = 0.01
EPOCHS, BATCH, LR = (200, 64, 5e-3)
HIDDEN = 50
Network = Callable[[Tensor], Tensor]
Found = tuple[dict[str, float], str, int]  # scores, what was chosen, number of fits


@dataclass(frozen=True)
class Split:
    """Standardised training and test data."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @staticmethod
    def drawn(seed: int) -> Split:
        x, y = (np.asarray(part, dtype=float) for part in load_diabetes(return_X_y=True))
        order = np.random.default_rng(seed).permutation(len(y))
        train, test = order[: 4 * len(y) // 5], order[4 * len(y) // 5 :]
        parts = []
        for values in (x, y[:, None]):
            mean, deviation = values[train].mean(0), values[train].std(0)
            for rows in (train, test):
                parts.append(torch.tensor((values[rows] - mean) / deviation).float())
        return Split(parts[0], parts[2], parts[1], parts[3])

    def held_out(self) -> Split:
        """A fifth of the training data in place of the test data."""
        n = 4 * len(self.y) // 5
        return Split(self.x[:n], self.y[:n], self.x[n:], self.y[n:])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(10, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
    )


def scores(mean: Tensor, deviation: Tensor | float, y: Tensor) -> dict[str, float]:
    """Log-likelihood of targets under normal predictions, and the variance explained."""
    mean, y = mean.double().flatten(), y.double().flatten()
    deviation = torch.as_tensor(deviation, dtype=torch.float64)
    log_p = torch.distributions.Normal(mean, deviation).log_prob(y)
    explained = 1 - (y - mean).square().mean() / y.var(correction=0)
    return {"log_likelihood": log_p.mean().item(), "accuracy": explained.item()}


def trained(split: Split, seed: int, epochs: int, decay: float, *, decoupled: bool) -> Network:
    """The network after plain training."""
    model = network(seed)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(model.parameters(), LR, weight_decay=decay)
    steps = epochs * -(-len(split.y) // BATCH)
    step = 0
    for _ in range(epochs):
        for index in torch.randperm(len(split.y)).split(BATCH):
            set_rate(optimizer, cosine(step, steps, LR, 1e-6))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(split.x[index]), split.y[index]).backward()
            optimizer.step()
            step += 1
    return torch.no_grad()(model)


def by_default(split: Split, seed: int, epochs: int) -> Found:
    """AdamW's decay, and the noise that the training residuals have."""
    model = trained(split, seed, epochs, ADAMW, decoupled=True)
    noise = (model(split.x) - split.y).square().mean().sqrt().item()
    return scores(model(split.x_test), noise, split.y_test), f"noise {noise:.3g}", 1


def by_grid(split: Split, seed: int, epochs: int) -> Found:
    """The best pair on a held-out fifth; noises cost no fit."""
    held_out = split.held_out()
    found = []
    for decay in DECAYS:
        mean = trained(held_out, seed, epochs, decay, decoupled=False)(held_out.x_test)
        for noise in NOISES:
            score = scores(mean, noise, held_out.y_test)["log_likelihood"]
            found.append((score, decay, noise))
    _, decay, noise = max(found)
    mean = trained(split, seed, epochs, decay, decoupled=False)(split.x_test)
    chosen = f"decay {decay:.3g}, noise {noise:.3g}"
    return scores(mean, noise, split.y_test), chosen, len(DECAYS) + 1


def by_ridge(split: Split, seed: int, epochs: int) -> Found:
    model = BayesianRidge().fit(split.x.numpy(), split.y.numpy().ravel())
    mean, deviation = model.predict(split.x_test.numpy(), return_std=True)
    found = scores(torch.tensor(mean), torch.tensor(deviation), split.y_test)
    return found, f"noise {model.alpha_**-0.5:.3g}", 1


def by_process(split: Split, seed: int, epochs: int) -> Found:
    """A squared-exponential kernel with a length for each input, by its marginal likelihood."""
    kernel = ConstantKernel() * RBF(np.ones(10), (1e-1, 1e3)) + WhiteKernel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # lengths of inputs that do not matter
        model = GaussianProcessRegressor(kernel).fit(split.x.numpy(), split.y.numpy().ravel())
    mean, deviation = model.predict(split.x_test.numpy(), return_std=True)
    found = scores(torch.tensor(mean), torch.tensor(deviation), split.y_test)
    return found, f"noise {model.kernel_.k2.noise_level**0.5:.3g}", 1


def learned(split: Split, seed: int, epochs: int, *, posterior: bool) -> Found:
    """Decay of every layer and noise by the evidence, with the learner's defaults."""
    model = network(seed)
    n_data = len(split.y)
    likelihood = Gaussian(sigma=1.0)
    prior = GaussianPrior(model, "layerwise")
    ml = MarginalLikelihood(model, likelihood, n_data=n_data, prior=prior)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    learner = EvidenceLearner(ml, (split.x, split.y), burn_in=10, every=5, total_rounds=epochs)
    learner.attach(optimizer)
    steps = epochs * -(-n_data // BATCH)
    step = 0
    for _ in range(epochs):
        for index in torch.randperm(n_data).split(BATCH):
            set_rate(optimizer, cosine(step, steps, LR, 1e-6))
            optimizer.zero_grad()
            ml.data_loss(model(split.x[index]), split.y[index]).backward()
            optimizer.step()
            step += 1
        learner.round()
    sigma = likelihood.sigma.item()
    with torch.no_grad():
        mean = model(split.x_test)
    variance = torch.zeros_like(mean)
    if posterior:
        mean, variance = ml.posterior([(split.x, split.y)], structure="full").functional(
            split.x_test
        )
    deviation = (variance.double().flatten() + sigma**2).sqrt()
    return scores(mean, deviation, split.y_test), f"noise {sigma:.3g}", 1


WAYS = {
    DEFAULT: by_default,
    GRID: by_grid,
    RIDGE: by_ridge,
    PROCESS: by_process,
    OURS[0]: lambda *given: learned(*given, posterior=False),
    OURS[1]: lambda *given: learned(*given, posterior=True),
}


def row(way: str, seed: int, *, quick: bool = False) -> dict[str, object]:
    """One way with one seed, as a row of the alternatives."""
    split = Split.drawn(seed)
    epochs = 2 if quick else EPOCHS
    start = time.process_time()
    by_default(split, seed, epochs)
    fit_seconds = time.process_time() - start
    start = time.process_time()
    found, chosen, fits = WAYS[way](split, seed, epochs)
    seconds = time.process_time() - start
    return {
        "way": way,
        "test_log_likelihood": found["log_likelihood"],
        "test_accuracy": found["accuracy"],
        "test_ece": "",
        "cpu_seconds": seconds,
        "fit_seconds": fit_seconds,
        "fits": fits,
        "chosen": chosen,
    }
