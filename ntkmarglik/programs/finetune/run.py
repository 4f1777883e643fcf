"""From settings to a finished run: load, fit, evaluate, save, show."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import torch
import yaml
from tqdm import tqdm

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.distributed import refuse_several
from ntkmarglik.machine import device as machine
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.programs.finetune import inputs, report
from ntkmarglik.programs.finetune.config import FinetuneConfig, parse
from ntkmarglik.programs.finetune.examples import is_text
from ntkmarglik.programs.finetune.fit import Fit
from ntkmarglik.programs.finetune.plan import best
from ntkmarglik.programs.finetune.pretrained import Preparation, load
from ntkmarglik.programs.finetune.scores import evaluated
from ntkmarglik.programs.finetune.transfer import Transfer
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.folder import RunFolder, folder_named, read_metrics, read_summary
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.summary import commit


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return exit_code(lambda: run(parse(arguments)))


def run(config: FinetuneConfig) -> Metrics:
    """Fine-tune by the configured method; returns the summary."""
    refuse_several(config.script)
    check(config)
    device, text = machine.device_named(config.run.device), is_text(config.task.dataset)
    with machine.threads(config.run.threads or torch.get_num_threads()):
        prepare = Preparation(config.task.checkpoint, text=text, max_length=config.task.max_length)
        data = inputs.load(config, prepare, device)
        model = load(config.task.checkpoint, data.n_classes, text=text, seed=config.run.seed).to(
            device
        )
        transfer = Transfer(config, model, data)
        if config.run.dry_run:
            print(yaml.safe_dump(config.flat(), sort_keys=False))
            print(_estimate(transfer))
            return {}
        path = config.run.out or folder_named(config.name, resume=config.run.resume)
        try:
            lines, summary = _run(transfer, path)
        except KeyboardInterrupt:
            print(
                f"the same command with --resume --out {path} continues this run", file=sys.stderr
            )
            raise
    report.show(summary)
    report.save(config.search.method, lines, summary, path / "figure.png")
    if config.run.save_model:
        model.save(path / "model")
        prepare.processor.save_pretrained(path / "model")
    print(f"run folder: {path}")
    return summary


def _run(transfer: Transfer, path: Path) -> tuple[list[Metrics], Metrics]:
    """A run from its start (or its checkpoint) to its summary; a finished one is read from its
    folder.
    """
    config, summary = transfer.config, read_summary(path)
    if config.run.resume and (path / "checkpoint.pt").exists():
        transfer.restore(checkpoint.load(path / "checkpoint.pt"))  # before anything is written
        if transfer.finished and summary is not None:
            return read_metrics(path), summary
        print(
            f"continuing after step {transfer.steps} of fit {len(transfer.done) + 1}",
            file=sys.stderr,
        )
    elif config.run.resume and summary is not None:
        raise NtkMarglikError(
            f"{path} holds a finished run without its checkpoint; choose another folder with --out."
        )
    elif config.run.resume:
        print(
            f"there is no checkpoint in {path} yet, starting from the first step", file=sys.stderr
        )
    folder = RunFolder(path, config, resume=config.run.resume, epoch=transfer.steps, unit="step")
    summary = {}
    total = transfer.n_fits * config.training.steps
    try:
        with tqdm(
            total=total, initial=transfer.steps, unit="step", disable=not sys.stderr.isatty()
        ) as bar:

            def progress() -> None:
                bar.set_description(
                    f"fit {len(transfer.done) + 1} of {transfer.n_fits}", refresh=False
                )
                bar.update()

            transfer.run(folder, progress)
        summary = summarise(transfer)
        folder.finish(summary)
    finally:
        folder.close(summary)
    return folder.epochs, summary


def summarise(transfer: Transfer) -> Metrics:
    """The final numbers of a run; tables rely on their names."""
    config, chosen = transfer.config, {k: v for k, v in transfer.chosen.items() if k != "model"}
    test, train = (
        evaluated(transfer.model, part) for part in (transfer.data.test, transfer.data.train)
    )
    found = transfer.done[chosen["fit"]]
    return {
        "method": config.search.method,
        "dataset": config.task.dataset,
        "classes": list(config.task.classes),
        "checkpoint": config.task.checkpoint,
        "n_data": len(transfer.data.train),
        "seed": config.run.seed,
        "n_parameters": sum(p.numel() for p in transfer.model.parameters() if p.requires_grad),
        **{f"test_{name}": value for name, value in test.items()},
        "train_accuracy": train["accuracy"],
        "train_log_likelihood": train["log_likelihood"],
        "objective": found.score,
        **vars(found.candidate),
        **chosen,
        "held_out_score": best(transfer.done[:-1]).score if transfer.plan.holds_out else None,
        "fits": [
            {**vars(r.candidate), "score": r.score if r.score > -float("inf") else None}
            for r in transfer.done
        ],
        **{f"seconds_{kind}": value for kind, value in transfer.seconds.items()},
        "steps": transfer.steps,
        "peak_memory_bytes": machine.peak_memory(transfer.data.train.y.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


def check(config: FinetuneConfig) -> None:
    """Refuse what is wrong whatever the data."""
    search = config.search
    task = config.task
    training = config.training
    run = config.run
    positive = {
        "steps": training.steps,
        "batch_size": training.batch_size,
        "trials": search.trials,
        "draws": search.draws,
        "backbone_decay": search.backbone_decay,
        "head_decay": search.head_decay,
        "sigma": search.sigma,
        "laplace_rate": search.laplace_rate,
        "max_length": task.max_length,
    }
    for name, value in positive.items():
        if not value > 0:
            raise NtkMarglikError(
                f"--{name.replace('_', '-')} must be greater than 0, but is {value}."
            )
    several = {
        "rates": search.rates,
        "backbone_decays": search.backbone_decays,
        "head_decays": search.head_decays,
    }
    for name, values in several.items():
        if not values or not all(value > 0 for value in values):
            shown = " ".join(map(str, values)) or "none"
            raise NtkMarglikError(
                f"--{name.replace('_', '-')} must be numbers greater than 0, but are {shown}."
            )
    not_negative = {
        "n_data": task.n_data,
        "n_test": task.n_test,
        "seed": run.seed,
        "threads": run.threads,
        "kappa": search.kappa,
        "eval_every": run.eval_every,
        "clip": training.clip,
        "laplace_every": search.laplace_every,
        "laplace_steps": search.laplace_steps,
        "sigma_rate": search.sigma_rate,
    }
    for name, value in not_negative.items():
        if not value >= 0:
            raise NtkMarglikError(
                f"--{name.replace('_', '-')} must not be negative, but is {value}."
            )
    if not 0 < search.held_out < 1:
        raise NtkMarglikError(f"--held-out must be between 0 and 1, but is {search.held_out}.")
    if run.device == "cuda" and not torch.cuda.is_available():
        raise NtkMarglikError(
            "--device cuda, but torch sees no GPU here; use --device cpu or auto."
        )


def _estimate(transfer: Transfer) -> str:
    """Sizes, and the time from one step; nothing is written."""
    data, config = transfer.data, transfer.config
    fit = transfer._next()
    seconds = 0.0
    for _ in range(2):  # the first is slower
        start = time.perf_counter()
        fit.advance()
        seconds = time.perf_counter() - start
    total = transfer.n_fits * config.training.steps * seconds
    shape = {name: tuple(t.shape[1:]) for name, t in _named(fit).items()}
    weights = sum(p.numel() for p in transfer.model.parameters() if p.requires_grad)
    return "\n".join(
        [
            f"data     {config.task.dataset}: {len(data.train)} training, {len(data.test)} test, "
            f"{data.n_classes} classes",
            f"inputs   {', '.join(f'{name} {sizes}' for name, sizes in shape.items())}",
            f"network  {config.task.checkpoint}: {weights:,} parameters",
            f"fits     {transfer.n_fits} of {config.training.steps} steps, {1000 * seconds:.1f} "
            "ms each"
            + (
                f"; the last with all data, the others without {len(transfer.held_out)}"
                if transfer.plan.holds_out
                else ""
            ),
            f"time     about {total:.0f} s without scores and evaluations",
        ]
    )


def _named(fit: Fit) -> dict[str, torch.Tensor]:
    x, _ = fit.part.batch(torch.arange(1))
    return {"pixels": x} if isinstance(x, torch.Tensor) else x
