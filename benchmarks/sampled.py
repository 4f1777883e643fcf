"""Sampled linearised Laplace beside MAP and the bounds: precision, predictions, cost of a step.

python benchmarks/sampled.py digits mnist cifar10 --data-root data      rows of
illustrations/data/sampled.csv MALLOC_MMAP_THRESHOLD_=1000000 python benchmarks/sampled.py memory
peak of an EM step against (3 k + 2) P numbers (the variable makes the allocator give back what is
freed, so that the peak is of what is in use)

Times are CPU seconds in units of a training epoch on the same data; memory is the peak above the
start of the call.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from measure import peak_above_start
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from laplace_marglik import Evidence, GaussianPrior, MarginalLikelihood, SampledLaplace
from laplace_marglik.posterior.sampled import ConjugateGradients
from laplace_marglik.posterior.sampled.system import Loader
from ntkmarglik.learn.evaluate import joint_log_likelihood, metrics
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.problem.data import Dataset, load
from ntkmarglik.problem.models import DEPTH, build

TARGET = Path(__file__).parent.parent / "illustrations/data/sampled.csv"
CURVATURES: tuple[Literal["outputs", "averaged"], ...] = ("outputs", "averaged")
CHUNK = 250  # test inputs whose predictions are made at once


@dataclass(frozen=True)
class Study:
    """A network trained with a fixed prior, then looked at by samples and by bounds."""

    dataset: str
    model: str
    n_data: int
    epochs: int
    samples: int
    passes: int
    em_steps: int
    subset: int  # data points of a block of the bounds
    batch: int = 125
    rungs: int = 5
    n_test: int = 2000
    precision: float = 1.0  # in training
    # precision from which EM steps start: few are taken, and systems of small ones take many passes
    start: float = 1.0
    tolerance: float = 0.01  # relative residual of the samples
    exclude: tuple[str, ...] = ()
    depth: int = DEPTH
    width: int = 0


STUDIES = {
    "digits": Study("digits", "mininet", 500, 300, 8, 100, 4, 250, batch=250),
    "mnist": Study(
        "mnist",
        "mininet",
        500,
        60,
        4,
        60,
        2,
        250,
        batch=250,
        rungs=3,
        n_test=500,
        start=16,
        tolerance=0.03,
    ),
    "cifar10": Study(
        "cifar10",
        "resnet_norm",
        300,
        120,
        4,
        60,
        1,
        50,
        batch=100,
        rungs=4,
        n_test=500,
        exclude=("*norm*",),
        width=4,
        start=64,
        tolerance=0.03,
        depth=10,
    ),
}


def study(settings: Study, data_root: str) -> dict[str, object]:
    """One row: what was learned, how it predicts, and what an EM step cost."""
    data = load(settings.dataset, data_root, n_data=settings.n_data)
    model = build(
        settings.model, data.input_shape, data.n_classes, depth=settings.depth, width=settings.width
    )
    prior = GaussianPrior(model, "scalar", settings.precision)
    ml = MarginalLikelihood(model, "classification", n_data=data.n_data, prior=prior)
    loader = list(
        zip(data.x_train.split(settings.batch), data.y_train.split(settings.batch), strict=True)
    )
    epoch_seconds = trained(settings, ml, data)
    row: dict[str, object] = {
        "dataset": settings.dataset,
        "model": settings.model,
        "n_data": settings.n_data,
    }
    row |= {"n_parameters": sum(p.numel() for p in model.parameters()), "samples": settings.samples}
    row |= {"initial_precision": settings.precision, "start_precision": settings.start}
    row |= {
        f"precision_{name}": value
        for name, value in chosen_by_bounds(settings, model, data, prior).items()
    }
    x, y = data.x_test[: settings.n_test], data.y_test[: settings.n_test]
    with torch.no_grad():
        row |= scores("map", torch.cat([model(part) for part in x.split(CHUNK)]).unsqueeze(0), y)
    for curvature in CURVATURES:
        with torch.no_grad():
            prior.log_precision.fill_(math.log(settings.start))
        posterior = unfitted(settings, ml, curvature)
        learned = learn(settings, posterior, loader, epoch_seconds) | predicted(posterior, x, y)
        row |= {f"{curvature}_{name}": value for name, value in learned.items()}
        print(", ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    return row


def unfitted(
    settings: Study, ml: MarginalLikelihood, curvature: Literal["outputs", "averaged"]
) -> SampledLaplace:
    """A posterior that has no samples yet."""
    return SampledLaplace(
        ml.model,
        "classification",
        n_data=ml.n_data,
        prior=ml.prior,
        samples=settings.samples,
        curvature=curvature,
        solver=ConjugateGradients(settings.tolerance, settings.passes),
        together=settings.samples,
        exclude=settings.exclude,
    )


def trained(settings: Study, ml: MarginalLikelihood, data: Dataset) -> float:
    """Train the weights; returns the CPU seconds of an epoch."""
    optimizer = torch.optim.Adam(ml.model.parameters(), 2e-3)

    def epoch() -> None:
        for index in torch.randperm(data.n_data).split(settings.batch):
            optimizer.zero_grad()
            ml.map_loss(data.x_train[index], data.y_train[index]).backward()
            optimizer.step()

    seconds = _cpu_seconds(lambda: [epoch() for _ in range(settings.epochs)])
    ml.model.eval()
    optimizer.zero_grad(set_to_none=True)
    return seconds / settings.epochs


def learn(
    settings: Study, posterior: SampledLaplace, loader: Loader, epoch_seconds: float
) -> dict[str, float]:
    """EM steps on the prior; what they learned and what they cost."""
    posterior.fit(loader)
    seconds = _cpu_seconds(
        lambda: [posterior.update_prior(loader) for _ in range(settings.em_steps)]
    )
    diagnostics = posterior.diagnostics()
    gamma, error = diagnostics["effective_dimension"]
    evidence, n = posterior.log_evidence(loader, "weights", settings.rungs), posterior.n_data
    return {
        "precision": posterior.prior.precision.item(),
        "effective_dimension": gamma,
        "effective_dimension_error": error,
        "passes": diagnostics["steps"],
        "residual": max(diagnostics["residuals"]),
        "error": max(diagnostics["errors"]),
        "mode_error": diagnostics["mode_error"],
        "em_step_epochs": seconds / settings.em_steps / epoch_seconds,
        "log_marglik": evidence.total.item() / n,
        "log_marglik_error": (evidence.standard_error or 0.0) / n,
        # the bracket of the rule of integration, no interval: that has two of log_marglik_error
        # besides on either side
        "log_marglik_low": evidence.bracket[0] / n,
        "log_marglik_high": evidence.bracket[1] / n,
    }


def chosen_by_bounds(
    settings: Study, model: nn.Module, data: Dataset, prior: GaussianPrior
) -> dict[str, float]:
    """The precision at which each bound on one block is largest; the prior is left as it was."""
    start, found = prior.log_precision.detach().clone(), {}
    index = torch.arange(settings.subset)
    for structure, root in (("ntk", "fisher"), ("kfac", "paper")):
        ml = MarginalLikelihood(
            model,
            "classification",
            n_data=data.n_data,
            prior=prior,
            structure=structure,
            outputs=1,
            root=root,
        )
        evaluate: Callable[[], Evidence] = ml.cached(data.x_train[index], data.y_train[index])
        optimizer = torch.optim.Adam([prior.log_precision], lr=0.1)
        for _ in range(150):
            optimizer.zero_grad()
            (-evaluate().total / ml.n_data).backward()
            optimizer.step()
        found[structure] = prior.precision.item()
        with torch.no_grad():
            prior.log_precision.copy_(start)
    prior.log_precision.grad = None
    return found


def predicted(posterior: SampledLaplace, x: Tensor, y: Tensor) -> dict[str, float]:
    """Scores of both kinds of sampled prediction."""
    probit = torch.cat([posterior.predict(part, "probit") for part in x.split(CHUNK)]).log()
    samples = torch.cat([posterior.sample_logits(part) for part in x.split(CHUNK)], 1)
    return scores("mc", samples, y) | scores("probit", probit.unsqueeze(0), y)


def scores(name: str, samples: Tensor, y: Tensor) -> dict[str, float]:
    """Test accuracy, log-likelihood (of joint labels too), calibration of outputs [k, n, C]."""
    log_p = samples.double().log_softmax(2)
    found = metrics(torch.logsumexp(log_p, 0), y)
    own = log_p.gather(2, y.expand(len(log_p), -1).unsqueeze(2)).squeeze(2)
    found["joint"] = joint_log_likelihood(own, torch.Generator().manual_seed(0))
    return {f"{name}_{key}": value for key, value in found.items()}


def memory(samples: int = 8) -> str:
    """Peak of fit and EM step of a ResNet, beside (3 k + 2) P numbers and a training step."""
    model = build("resnet_norm", (3, 32, 32), 10, depth=18, width=32)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    prior = GaussianPrior(model, "scalar", 100.0)
    solver = ConjugateGradients(max_iterations=2)
    posterior = SampledLaplace(
        model, "classification", n_data=8, prior=prior, samples=samples, solver=solver
    )

    def training() -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    def learning() -> None:
        posterior.fit([(x, y)]).update_prior([(x, y)])

    training()  # the libraries' own first-call allocations
    model.zero_grad(set_to_none=True)
    resident = peak_above_start(learning)
    step = _alive(training)
    model.zero_grad(set_to_none=True)
    peak, size = _alive(learning), posterior.layout.size
    return (
        f"P = {size:,}, k = {samples}: tensors of {peak / 1e6:.0f} MB = {peak / (4 * size):.1f} P "
        f"numbers; (3 k + 2) P is {4 * (3 * samples + 2) * size / 1e6:.0f} MB, a training step "
        f"{step / 1e6:.0f} MB; resident memory rose by {resident / 1e6:.0f} MB"
    )


def _alive(function: Callable[[], object]) -> int:
    """Most bytes of tensors that were alive together, without what an allocator keeps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    found = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return max(
        itertools.accumulate(
            event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())
        )
    )


def _cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def write(row: dict[str, object], target: Path = TARGET) -> None:
    """Add a row, in place of an older one of the same data set."""
    rows = []
    if target.exists():
        with target.open(newline="") as file:
            rows = [old for old in csv.DictReader(file) if old["dataset"] != row["dataset"]]
    rows.append({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})  # type: ignore[arg-type]
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=[*STUDIES, "memory"])
    parser.add_argument("--data-root", default="data")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.what:
        torch.manual_seed(0)
        if name == "memory":
            print(memory())
        else:
            found = study(STUDIES[name], given.data_root)

            write(found)


if __name__ == "__main__":
    sys.exit(exit_code(main))
