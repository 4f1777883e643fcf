"""The final numbers of a run; other tools rely on their names."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from ntkmarglik.learn.train import Trainer
from ntkmarglik.runs.loggers import Metrics


def summarise(trainer: Trainer) -> Metrics:
    """Final metrics of a trained network, its evidence, what was learned, its cost and settings."""
    with trainer.timed("total"):
        test = trainer.evaluate("test")
        training = trainer.evaluate("train")
        evidence = trainer.method.evidence()
        extras = trainer.method.extras()
    n = trainer.problem.data.n_data
    error = evidence.standard_error
    return {
        **_identity(trainer),
        "test_accuracy": test["accuracy"],
        "test_log_likelihood": test["log_likelihood"],
        "test_ece": test["ece"],
        "train_log_likelihood": training["log_likelihood"],
        "log_marglik": evidence.total.item() / n,
        "log_marglik_status": evidence.status,
        "log_marglik_error": None if error is None else error / n,
        "log_marglik_interval": [bound / n for bound in evidence.interval or ()] or None,
        "log_marglik_structure": trainer.method.structure,
        "seconds_total": trainer.seconds["total"],
        "seconds_weights": trainer.seconds["weights"],
        "seconds_hyper": trainer.seconds["hyper"],
        "peak_memory_bytes": trainer.peak_memory(),
        **_hyperparameters(trainer),
        "ranks": 1 if trainer.ranks is None else trainer.ranks.size,
        **extras,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


def _identity(trainer: Trainer) -> Metrics:
    """What was trained on what."""
    problem = trainer.problem
    config = trainer.config
    return {
        "method": config.estimator.method,
        "subset": config.estimator.subset,
        "outputs": config.estimator.outputs,
        "seed": config.run.seed,
        "dataset": config.problem.dataset,
        "model": config.problem.model,
        "n_data": problem.data.n_data,
        "n_parameters": sum(p.numel() for p in problem.model.parameters()),
    }


def _hyperparameters(trainer: Trainer) -> Metrics:
    """What was learned: prior, its start unless it is in closed form, temperature, augmentation."""
    precisions = trainer.problem.prior.precisions()
    start: float | None = trainer.config.hyperparameters.prior_precision
    if trainer.method.measures_by == "draws":  # by a variational posterior, with its closed form
        start = None
    eta = getattr(trainer.problem.augment, "eta", None)
    return {
        "prior_precision": {name: p.mean().item() for name, p in precisions.items()},
        "initial_prior_precision": start,
        "temperature": trainer.problem.likelihood.log_temperature.exp().item(),
        "augmentation": None if eta is None else eta.detach().tolist(),
    }


def commit() -> str | None:
    """The git commit of this code, if it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git on this machine
        return None
    return git.stdout.strip() or None
