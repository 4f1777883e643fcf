"""From a configuration to a finished run: prepare, train, evaluate, save, show."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from laplace_marglik import GaussianPrior
from tqdm import tqdm

from . import preflight, report
from .augment import AffineAugmentation
from .config import Config, parse
from .data import Dataset, load
from .errors import NtkMarglikError
from .methods import METHODS, Method, Problem
from .models import build
from .track import Metrics, RunFolder, commit
from .train import Trainer


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        run(parse(arguments))
    except NtkMarglikError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was computed is in the run folder, --resume continues it", file=sys.stderr)
        return 130
    return 0


def run(config: Config) -> report.Runs:
    """Train the configured method (and the MAP baseline), and show the comparison."""
    preflight.check_settings(config)
    data = _data(config)
    problem = prepare(config, data)
    method = METHODS[config.estimator.method](problem)
    sizes = preflight.check_sizes(config, data, problem.model)
    if config.run.dry_run:
        print(yaml.safe_dump(config.flat(), sort_keys=False))
        print(preflight.report(config, sizes, problem, method))
        return {}
    path = folder_of(config)
    label = name_of(config)
    runs: report.Runs = {label: train(problem, method, path, label)}
    if config.run.baseline and method.learns:
        fixed = prepare(config.updated(method="map"), data)
        runs["MAP (fixed prior)"] = train(fixed, METHODS["map"](fixed), path / "baseline", "MAP baseline")
    report.figure(runs, path / "figure.png", augment=problem.augment, example=data.x_train[0])
    report.show(runs)
    print(f"run folder: {path}   figure: {path / 'figure.png'}")
    return runs


def prepare(config: Config, data: Dataset) -> Problem:
    """Network, prior and augmentation of a configuration, all drawn from its seed."""
    device, dtype = _device(config), _dtype(config)
    settings, hyper = config.problem, config.hyperparameters
    model = build(
        settings.model,
        data.input_shape,
        data.n_classes,
        depth=settings.depth,
        width=settings.width,
        seed=config.run.seed,
    ).to(device, dtype)
    prior = GaussianPrior(model, hyper.prior, hyper.prior_precision)
    augment = None
    if hyper.augment == "affine":
        augment = AffineAugmentation(hyper.aug_samples, flip=hyper.flip, init=hyper.aug_init).to(device, dtype)
    generator = torch.Generator().manual_seed(config.run.seed)
    return Problem(config, data, model, prior, augment, generator)


def train(problem: Problem, method: Method, path: Path, label: str) -> tuple[list[Metrics], Metrics]:
    """One run from start (or checkpoint) to summary."""
    config = problem.config
    resume = config.run.resume and (path / "checkpoint.pt").exists()
    folder = RunFolder(path, config, resume=resume)
    trainer = Trainer(problem, method, folder)
    start = time.perf_counter()
    if resume:
        trainer.resume()
    try:
        with tqdm(
            total=config.training.epochs,
            initial=trainer.epoch,
            desc=label,
            unit="epoch",
            disable=not sys.stderr.isatty(),
        ) as bar:
            trainer.run(_progress(bar))
    except KeyboardInterrupt:
        print(f"\nstopped after epoch {trainer.epoch} of {config.training.epochs}", file=sys.stderr)
        raise
    summary = summarise(trainer, time.perf_counter() - start)
    folder.finish(summary)
    return folder.metrics(), summary


def _progress(bar: tqdm) -> Callable[[Metrics], None]:
    shown: dict[str, str] = {}

    def update(metrics: Metrics) -> None:
        shown["loss"] = f"{metrics['loss']:.4f}"
        if "log_marglik" in metrics:
            shown["evidence"] = f"{metrics['log_marglik']:.4f}"
        bar.set_postfix(shown)
        bar.update()

    return update


def summarise(trainer: Trainer, seconds: float) -> Metrics:
    """Final metrics; the keys are relied on by other tools."""
    problem, config = trainer.problem, trainer.problem.config
    test, training = trainer.evaluate("test"), trainer.evaluate("train")
    start = time.perf_counter()
    evidence = trainer.method.evidence()
    seconds += time.perf_counter() - start
    n = problem.data.n_data
    eta = getattr(problem.augment, "eta", None)
    return {
        "method": config.estimator.method,
        "subset": config.estimator.subset,
        "outputs": config.estimator.outputs,
        "seed": config.run.seed,
        "n_data": n,
        "n_parameters": sum(p.numel() for p in problem.model.parameters()),
        "test_accuracy": test["accuracy"],
        "test_log_likelihood": test["log_likelihood"],
        "test_ece": test["ece"],
        "train_log_likelihood": training["log_likelihood"],
        "log_marglik": evidence.total.item() / n,
        "log_marglik_status": evidence.status,
        "log_marglik_error": None if evidence.standard_error is None else evidence.standard_error / n,
        "seconds_total": max(seconds, sum(trainer.seconds.values())),
        "seconds_weights": trainer.seconds["weights"],
        "seconds_hyper": trainer.seconds["hyper"],
        "peak_memory_bytes": _peak_memory(problem.data.x_train.device),
        "prior_precision": {name: p.mean().item() for name, p in problem.prior.precisions().items()},
        "initial_prior_precision": config.hyperparameters.prior_precision,
        "augmentation": None if eta is None else eta.detach().tolist(),
        "dataset": config.problem.dataset,
        "model": config.problem.model,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


def name_of(config: Config) -> str:
    """METHOD-S-K, as the paper writes it; N and C mean all."""
    estimator = config.estimator
    if estimator.method == "map":
        return "map"
    return f"{estimator.method}-{estimator.subset or 'N'}-{estimator.outputs or 'C'}"


def folder_of(config: Config) -> Path:
    """The run folder: as given, or a name made of the settings, numbered if it is taken."""
    if config.run.out is not None:
        return config.run.out
    name = f"{config.problem.dataset}-{config.problem.model}-{name_of(config)}-seed{config.run.seed}"
    taken = [p for p in [Path("runs") / name, *sorted(Path("runs").glob(f"{name}.*"), key=_number)] if p.exists()]
    if not taken:
        return Path("runs") / name
    return taken[-1] if config.run.resume else Path("runs") / f"{name}.{_number(taken[-1]) + 1}"


def _number(path: Path) -> int:
    suffix = path.suffix[1:]
    return int(suffix) if suffix.isdigit() else 1


def _data(config: Config) -> Dataset:
    settings = config.problem
    return load(
        settings.dataset, settings.data_root, n_data=settings.n_data, seed=config.run.seed, device=_device(config),
        dtype=_dtype(config),
    )  # fmt: skip


def _device(config: Config) -> torch.device:
    if config.run.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.run.device)


def _dtype(config: Config) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[config.run.precision]


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
