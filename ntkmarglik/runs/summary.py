"""The final numbers of a run; other tools rely on their names."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from ntkmarglik.learn.train import Trainer
from ntkmarglik.runs.loggers import Metrics


def summarise(trainer: Trainer) -> Metrics:
    """Final metrics of a trained network, its evidence, what was learned, what it cost, and what it
    was made with.
    """
    problem, config = trainer.problem, trainer.problem.config
    with trainer.timed("total"):
        test, training = trainer.evaluate("test"), trainer.evaluate("train")
        evidence = trainer.method.evidence()
        extras = trainer.method.extras()
    n, hyper = problem.data.n_data, config.hyperparameters
    eta = getattr(problem.augment, "eta", None)
    return {
        "method": config.estimator.method,
        "subset": config.estimator.subset,
        "outputs": config.estimator.outputs,
        "seed": config.run.seed,
        "dataset": config.problem.dataset,
        "model": config.problem.model,
        "n_data": n,
        "n_parameters": sum(p.numel() for p in problem.model.parameters()),
        "test_accuracy": test["accuracy"],
        "test_log_likelihood": test["log_likelihood"],
        "test_ece": test["ece"],
        "train_log_likelihood": training["log_likelihood"],
        "log_marglik": evidence.total.item() / n,
        "log_marglik_status": evidence.status,
        "log_marglik_error": None
        if evidence.standard_error is None
        else evidence.standard_error / n,
        "log_marglik_structure": trainer.method.structure,
        "seconds_total": trainer.seconds["total"],
        "seconds_weights": trainer.seconds["weights"],
        "seconds_hyper": trainer.seconds["hyper"],
        "peak_memory_bytes": trainer.peak_memory(),
        "prior_precision": {
            name: p.mean().item() for name, p in problem.prior.precisions().items()
        },
        # of a variational posterior the prior is known in closed form and starts nowhere
        "initial_prior_precision": None
        if trainer.method.measures_by == "draws"
        else hyper.prior_precision,
        "augmentation": None if eta is None else eta.detach().tolist(),
        "ranks": 1 if problem.ranks is None else problem.ranks.size,
        **extras,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


def commit() -> str | None:
    """The git commit of this code, if it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git on this machine
        return None
    return found.stdout.strip() or None
