"""From settings to a finished run: load, fit, evaluate, save, show."""

from __future__ import annotations

import math
import platform
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml

from asdl_marglik import evaluating, trainable
from laplace_marglik import FixedPosterior, MarginalLikelihood
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.distributed import refuse_several
from ntkmarglik.learn.evaluate import metrics
from ntkmarglik.learn.predictive import BATCH, SCORED, posterior_scores
from ntkmarglik.machine import device as machine
from ntkmarglik.programs.finetune import inputs, report
from ntkmarglik.programs.finetune.checkpoints import check_name, find
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.examples import check_dataset, is_text
from ntkmarglik.programs.finetune.fit import Fit
from ntkmarglik.programs.finetune.objectives import LIKELIHOOD, Elbo
from ntkmarglik.programs.finetune.plan import PLANS, Result, best
from ntkmarglik.programs.finetune.pretrained import Preparation, load
from ntkmarglik.programs.finetune.scores import averaged, evaluated
from ntkmarglik.programs.finetune.swag import read as read_statistics
from ntkmarglik.programs.finetune.transfer import Transfer
from ntkmarglik.runs.folder import CHECKPOINT, folder_named, only_writer
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.resumable import check_written, how_to_continue, resumable_run
from ntkmarglik.runs.summary import commit
from ntkmarglik.settings import check_values, warn_unused

PREDICT_SEED = 2**30  # added to the seed: draws of predictions are independent of all others


def run(config: FinetuneConfig) -> Metrics:
    """Fine-tune by the configured method; returns the summary."""
    refuse_several(config.script)
    check(config)
    warn_of_unused(config)
    device = machine.device_named(config.run.device)
    task = config.task
    text = is_text(task.dataset)
    with machine.threads(config.run.threads or torch.get_num_threads()):
        place = find(task.checkpoint)
        prepare = Preparation(place, text=text, max_length=task.max_length)
        data = inputs.load(config, prepare, device)
        model = load(place, data.n_classes, text=text, seed=config.run.seed).to(device)
        statistics = None
        if config.search.prior == "ptyl":
            statistics = read_statistics(place, model).to(device)
        transfer = Transfer(config, model, data, statistics)
        if config.run.dry_run:
            print(yaml.safe_dump(config.flat(), sort_keys=False))
            print(_estimate(transfer))
            return {}
        resume = config.run.resume
        path = folder_of(config)
        with only_writer(path):
            with how_to_continue(path):
                lines, summary = resumable_run(transfer, summarise, path, resume=resume)
            report.show(summary)
            report.save(config.search.method, lines, summary, path / "figure.png")
            if config.run.save_model:
                _save_model(transfer, prepare, path)
            print(f"run folder: {path}")
            check_written([summary], path)
    return summary


def folder_of(config: FinetuneConfig) -> Path:
    """The run folder: as given; else named by the settings."""
    return config.run.out or folder_named(config.name, resume=config.run.resume)


def _save_model(transfer: Transfer, prepare: Preparation, path: Path) -> None:
    """The final network and what makes its inputs, as a checkpoint of its own."""
    if not transfer.finished:
        raise NtkMarglikError(
            f"--save-model: {path} has the summary of the finished run, but its weights "
            f"({CHECKPOINT}) are lost; run it again in another folder with --out."
        )
    prepare.processor.save_pretrained(path / "model")
    transfer.model.save(path / "model")


def warn_of_unused(config: FinetuneConfig) -> None:
    """Say which of the flags that are given change nothing with this method or data."""
    names = {setting.name for setting in fields(config.search)}
    ignored = names - PLANS[config.search.method].uses()
    if config.search.prior == "ptyl":
        ignored.discard("prior_jitter")
    if not is_text(config.task.dataset):
        ignored.add("max_length")
    if not issubclass(PLANS[config.search.method].objective, Elbo):
        ignored.add("predict_samples")
    where = f"--method {config.search.method} and --dataset {config.task.dataset}"
    warn_unused(config, ignored, where)


def check(config: FinetuneConfig) -> None:
    """Refuse what is wrong whatever the data."""
    check_values(config)
    check_dataset(config.task.dataset)
    check_name(config.task.checkpoint)
    method = config.search.method
    if config.search.prior == "ptyl" and not PLANS[method].takes_covariance:
        able = ", ".join(name for name, plan in PLANS.items() if plan.takes_covariance)
        raise NtkMarglikError(
            f"--prior ptyl is not for --method {method}, whose Laplace approximation is of "
            f"independent weights; use it with {able}."
        )
    machine.check_device(config.run.device)


def summarise(transfer: Transfer) -> Metrics:
    """The final numbers of a run; tables rely on their names."""
    config = transfer.config
    data = transfer.data
    test = evaluated(transfer.model, data.test)
    train = evaluated(transfer.model, data.train)
    chosen = {name: value for name, value in transfer.chosen.items() if name != "model"}
    result = transfer.done[chosen["fit"]]
    held_out_score = best(transfer.done[:-1]).score if transfer.plan.holds_out else None
    return {
        "method": config.search.method,
        "prior": config.search.prior,
        "dataset": config.task.dataset,
        "classes": list(config.task.classes),
        "checkpoint": config.task.checkpoint,
        "n_data": len(data.train),
        "seed": config.run.seed,
        "n_parameters": _n_trained(transfer),
        **{f"test_{name}": value for name, value in test.items()},
        **_posterior_scores(transfer, chosen["prior_variance"]),
        **_sampled_scores(transfer, chosen),
        "train_accuracy": train["accuracy"],
        "train_log_likelihood": train["log_likelihood"],
        "objective": result.score,
        **vars(result.candidate),
        **chosen,
        "held_out_score": held_out_score,
        "fits": [_described(result) for result in transfer.done],
        **{f"seconds_{kind}": value for kind, value in transfer.seconds.items()},
        "steps": transfer.steps,
        "peak_memory_bytes": machine.peak_memory(data.train.y.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


def _posterior_scores(transfer: Transfer, variance: dict[str, float]) -> Metrics:
    """Scores of a diagonal posterior's predictions, with the variances of the prior that was
    chosen; its means do not matter to them. Weights that are not independent have no such one.
    """
    skipped = transfer.config.run.predict == "none" or not transfer.plan.learns
    if skipped or transfer.priors.covariance:
        return {}
    model = transfer.model
    prior = transfer.priors.at(model, 1 / variance["backbone"], 1 / variance["head"])
    data = transfer.data
    n = len(data.train)
    ml = MarginalLikelihood(model, LIKELIHOOD, n_data=n, prior=prior, structure="diag")
    test = list(data.test.first(SCORED).batches(BATCH))
    with torch.no_grad(), evaluating(model):
        network = torch.cat([model(x) for x, _ in test])
    return posterior_scores(ml, "diag", data.train.batches(), test, network)


def _sampled_scores(transfer: Transfer, chosen: dict[str, Any]) -> Metrics:
    """Scores of predictions averaged over the Gaussian that a bound was made of."""
    draws = transfer.config.run.predict_samples
    if not draws or "sigma" not in chosen:
        return {}
    weights = trainable(transfer.model, ())
    sigma = torch.tensor(chosen["sigma"])
    test = transfer.data.test
    posterior = FixedPosterior(weights, {name: sigma.to(w) for name, w in weights.items()})
    generator = torch.Generator(test.y.device).manual_seed(PREDICT_SEED + transfer.config.run.seed)
    p = averaged(transfer.model, posterior, test, draws, generator)
    scores = metrics(p.clamp_min(torch.finfo(p.dtype).tiny).log(), test.y)
    return {f"sampled_test_{name}": value for name, value in scores.items()}


def _described(result: Result) -> dict[str, Any]:
    """A fit in the summary; one that diverged has no score."""
    score = None if result.score == -math.inf else result.score
    return {**vars(result.candidate), "score": score}


def _n_trained(transfer: Transfer) -> int:
    """Weights that are trained."""
    return sum(p.numel() for p in transfer.model.parameters() if p.requires_grad)


def _estimate(transfer: Transfer) -> str:
    """Sizes, and the time from one step; nothing is written."""
    data = transfer.data
    config = transfer.config
    fit = transfer.next_fit()
    seconds = 0.0
    for _ in range(2):  # the first is slower
        start = time.perf_counter()
        fit.advance()
        seconds = time.perf_counter() - start
    shapes = [f"{name} {tuple(x.shape[1:])}" for name, x in _named(fit).items()]
    fits = f"{transfer.n_fits} of {config.training.steps} steps, {1000 * seconds:.1f} ms each"
    if transfer.plan.holds_out:
        fits += f"; the last with all data, the others without {len(transfer.held_out)}"
    lines = [
        f"data     {config.task.dataset}: {len(data.train)} training, {len(data.test)} test, "
        f"{data.n_classes} classes",
        f"inputs   {', '.join(shapes)}",
        f"network  {config.task.checkpoint}: {_n_trained(transfer):,} parameters",
        f"fits     {fits}",
        f"time     about {transfer.total * seconds:.0f} s without scores and evaluations",
    ]
    return "\n".join(lines)


def _named(fit: Fit) -> dict[str, torch.Tensor]:
    x, _ = fit.part.batch(torch.arange(1))
    return {"pixels": x} if isinstance(x, torch.Tensor) else x
