"""The two pictures of the slides on samples: variance of gradients, and how many samples it takes.

python benchmarks/sampled_noise.py variance samples --data-root data

`variance` writes illustrations/data/sampled_variance.csv: the variance of minibatch gradients of L
(noise in the data) and of L' (noise in the prior), by the closed form of
`laplace_marglik.posterior.sampled.noise` while the network is trained and for several noise scales,
and measured along the steps of the sampler. `samples` writes illustrations/data/sampled_count.csv:
effective dimension and test log-likelihood by k samples, for several seeds.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from asdl_marglik import jacobian_rows
from laplace_marglik import Categorical, GaussianPrior, MarginalLikelihood, SampledLaplace
from laplace_marglik.posterior.sampled import ConjugateGradients
from laplace_marglik.posterior.sampled.noise import gradient_noise
from laplace_marglik.posterior.sampled.solve import conjugate_gradients
from laplace_marglik.posterior.sampled.system import System
from ntkmarglik.learn.evaluate import metrics
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.problem.data import Dataset, load
from ntkmarglik.problem.models import build

FOLDER = Path(__file__).parent.parent / "illustrations/data"
Row = dict[str, object]


@dataclass(frozen=True)
class Study:
    """A network, and what is looked at while it is trained and after."""

    dataset: str = "digits"
    model: str = "cnn"
    n_data: int = 200
    n_test: int = 500
    epochs: tuple[int, ...] = (1, 5, 20, 100)  # after which the kernel is looked at
    noises: tuple[float, ...] = (0.01, 0.1, 1, 10, 100)  # variance, in units of softmax's
    batches: tuple[int, ...] = (10, 40)
    steps: tuple[int, ...] = (0, 10, 40, 160)  # of the sampler, on the trained network
    precision: float = 2.6  # of the prior; what EM steps learn on digits
    samples: tuple[int, ...] = (1, 2, 4, 8, 16)
    seeds: int = 5
    width: int = 0


def trained(study: Study, data: Dataset) -> Iterator[tuple[int, nn.Module]]:
    """The network after each of the epochs, trained by Adam with the prior."""
    model = build(study.model, data.input_shape, data.n_classes, width=study.width)
    prior = GaussianPrior(model, "scalar", study.precision)
    ml = MarginalLikelihood(model, "classification", n_data=data.n_data, prior=prior)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for epoch in range(1, max(study.epochs) + 1):
        for index in torch.randperm(data.n_data).split(50):
            optimizer.zero_grad(set_to_none=True)
            ml.map_loss(data.x_train[index], data.y_train[index]).backward()
            optimizer.step()
        if epoch in study.epochs:
            optimizer.zero_grad(set_to_none=True)
            model.eval()
            yield epoch, model


def kernel(model: nn.Module, data: Dataset) -> Tensor:
    """V V^T [N, C, N, C] of the Fisher root of all training data."""
    with torch.no_grad():
        f = model(data.x_train)
        columns = torch.arange(data.n_classes).expand(len(f), -1)
        U = Categorical().root(f, data.y_train, "fisher", columns)
        V = jacobian_rows(model, data.x_train, U.mT)
    rows = V.reshape(-1, V.shape[-1])
    n, c = len(f), data.n_classes
    return (rows @ rows.mT).double().reshape(n, c, n, c)


def by_formula(study: Study, model: nn.Module, data: Dataset, epoch: int) -> list[Row]:
    """Variances at both ends of sampling for each noise scale, which divides the curvature."""
    whole = kernel(model, data)
    curvature = whole.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum(1)  # tr M_i
    top = curvature.sort(descending=True).values[: max(data.n_data // 10, 1)].sum()
    rows = []
    for noise in study.noises:
        for at in ("start", "solution"):
            found = gradient_noise(whole / noise, study.precision, study.batches[0], at)
            rows.append(
                {
                    **{"kind": "formula", "epoch": epoch, "step": "", "noise": noise, "at": at},
                    **{"batch": study.batches[0], "data": found.data, "prior": found.prior},
                    "ratio": found.ratio,
                    "leverage": found.leverage,
                    "mean_leverage": found.mean_leverage,
                    "curvature_of_top_tenth": (top / curvature.sum()).item(),
                }
            )
    return rows


def along_the_steps(study: Study, model: nn.Module, data: Dataset, k: int = 4) -> list[Row]:
    """Variances over all batches of a partition, measured at steps of the sampler and at its end.

    The steps are those of Nesterov's method on all data; conjugate gradients give the end.
    """
    prior = GaussianPrior(model, "scalar", study.precision)
    posterior = SampledLaplace(
        model, "classification", n_data=data.n_data, prior=prior, samples=k, together=k
    )
    whole = posterior.system([(data.x_train, data.y_train)])
    noise = whole.prior_noise(range(k), data.x_train)
    rate = 0.5 / whole.steepest(data.x_train.flatten()[:1])
    rows: list[Row] = []
    for batch in study.batches:
        loader = list(zip(data.x_train.split(batch), data.y_train.split(batch), strict=True))
        system = posterior.system(loader)
        u = system.data_noise(data.x_train)  # which belongs to the batches of a loader
        z = noise / study.precision
        velocity = torch.zeros_like(z)
        for step in range(max(study.steps) + 1):
            if step in study.steps:
                rows.append(_measured(study, system, z, u, step))
            g = whole.product(z) - noise - u
            velocity = 0.9 * velocity + g
            z = z - rate * (g + 0.9 * velocity)
        conjugate_gradients(whole.product, noise + u, z, ConjugateGradients(1e-3, 200))
        rows.append(_measured(study, system, z, u, math.inf))
    return rows


def _measured(study: Study, system: System, z: Tensor, u: Tensor, step: float) -> Row:
    """Variances of both gradients at z, over the batches of a system."""
    found = {name: _variance(system, z, u, name) for name in ("data", "prior")}
    batch = next(system.batches()).total
    return {
        **{"kind": "measured", "epoch": max(study.epochs), "step": step, "noise": 1, "at": ""},
        **{"batch": batch, **found, "ratio": found["data"] / found["prior"]},
        **{"leverage": "", "mean_leverage": "", "curvature_of_top_tenth": ""},
    }


def _variance(system: System, z: Tensor, u: Tensor, noise_in: str) -> float:
    """Of gradients at z over the batches of a system, each as likely as the others."""
    numbers = range(len(z))
    noise = system.prior_noise(numbers, z)
    target = noise + u if noise_in == "prior" else noise
    estimates = [
        system.gradient(z, batch, numbers, target, noise_in)  # type: ignore[arg-type]
        for batch in system.batches()
    ]
    mean = torch.stack(estimates).mean(0)
    squares = [(g - mean).square().sum(1).mean().item() for g in estimates]
    return sum(squares) / (len(squares) - 1) * (1 - 1 / len(squares))


def variance(study: Study, data: Dataset) -> list[Row]:
    """Both parts of the first picture."""
    rows: list[Row] = []
    for epoch, model in trained(study, data):
        rows += by_formula(study, model, data, epoch)
        print(rows[-1], flush=True)
        if epoch == max(study.epochs):
            rows += along_the_steps(study, model, data)
        model.train()
    return rows


def samples(study: Study, data: Dataset) -> list[Row]:
    """Effective dimension, MacKay's precision and test log-likelihood by the first k samples."""
    *_, (_, model) = trained(study, data)
    K = kernel(model, data).flatten(2).flatten(0, 1) / study.precision
    values = torch.linalg.eigvalsh(K).clamp_min(0)
    exact = (values / (1 + values)).sum().item()
    prior = GaussianPrior(model, "scalar", study.precision)
    x, y = data.x_test[: study.n_test], data.y_test[: study.n_test]
    most = max(study.samples)
    with torch.no_grad():
        rows: list[Row] = [_scored("map", 0, model(x).unsqueeze(0), y, exact, math.nan)]
    for seed in range(study.seeds):
        posterior = SampledLaplace(
            model,
            "classification",
            n_data=data.n_data,
            prior=prior,
            samples=most,
            solver=ConjugateGradients(0.01, 200),
            together=most,
            generator=torch.Generator().manual_seed(seed),
        ).fit([(data.x_train, data.y_train)])
        logits = posterior.sample_logits(x)
        gammas = posterior._results.function.sum(1)
        squares = posterior.mode.square().sum().item()
        for k in study.samples:
            gamma = gammas[:k].mean().item()
            rows.append(_scored(k, seed, logits[:k], y, gamma, gamma / squares))
        print(rows[-1], flush=True)
    return rows


def _scored(k: object, seed: int, logits: Tensor, y: Tensor, gamma: float, precision: float) -> Row:
    """A row of predictions that are averaged over outputs [k, n, C]."""
    log_p = torch.logsumexp(logits.double().log_softmax(2), 0) - math.log(len(logits))
    return {
        **{"samples": k, "seed": seed, "effective_dimension": gamma, "precision": precision},
        "test_log_likelihood": metrics(log_p, y)["log_likelihood"],
    }


PICTURES = {
    "variance": (variance, "sampled_variance.csv"),
    "samples": (samples, "sampled_count.csv"),
}


def write(rows: list[Row], target: Path) -> None:
    """All rows, in place of older ones."""
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})  # type: ignore[arg-type]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=list(PICTURES))
    parser.add_argument("--data-root", default="data")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.what:
        make, target = PICTURES[name]
        torch.manual_seed(0)
        study = Study()
        write(
            make(study, load(study.dataset, given.data_root, n_data=study.n_data)), FOLDER / target
        )


if __name__ == "__main__":
    sys.exit(exit_code(main))
