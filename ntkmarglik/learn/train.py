"""The training loop: weights by their loss, hyperparameters by the evidence, interleaved.

After `burnin` epochs, every `frequency` epochs, a round of hyperparameter steps follows the epoch's
weight steps (Immer et al. 2021, algorithm 1). Learning rates are functions of the steps taken, and
every random draw comes from a generator whose state is in the checkpoint, so that a resumed run
repeats the uninterrupted one exactly.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from laplace_marglik import Evidence
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.distributed import SharedLoss, named
from ntkmarglik.learn.evaluate import evaluate
from ntkmarglik.learn.methods import Method, Problem, Round
from ntkmarglik.learn.schedule import cosine, hyper_epochs, set_rate, weight_optimizer
from ntkmarglik.machine.device import peak_memory
from ntkmarglik.machine.interrupts import deferred_interrupts
from ntkmarglik.runs.folder import NoFolder, RunFolder
from ntkmarglik.runs.loggers import Metrics

EVALUATIONS = 50  # of the test set in a run, when their spacing is not given


class Trainer:
    """One run of one method; call `run`."""

    def __init__(self, problem: Problem, method: Method):
        self.problem = problem
        self.method = method
        self.training = problem.config.training
        self.ranks = problem.ranks
        self.loss = method.loss if self.ranks is None else SharedLoss(problem, method, self.ranks)
        self.batches = torch.Generator().manual_seed(problem.config.run.seed)
        self.weights = weight_optimizer(problem.model, self.training)
        augment = [] if problem.augment is None else list(problem.augment.parameters())
        self.prior = torch.optim.Adam(method.hyperparameters(), self.training.lr_hyp)
        self.augment = torch.optim.Adam(augment, self.training.lr_aug) if augment else None
        self.rounds = hyper_epochs(self.training) if method.learns_in_rounds() else []
        self.epoch = 0
        self.steps = {"weights": 0, "prior": 0, "augment": 0}
        self.seconds = {"total": 0.0, "weights": 0.0, "hyper": 0.0}

    @property
    def finished(self) -> bool:
        return self.epoch >= self.training.epochs

    def run(
        self, folder: RunFolder | NoFolder, after_epoch: Callable[[Metrics], None] | None = None
    ) -> None:
        """Train to the last epoch; an interrupt ends the run after the epoch it falls in, with a
        checkpoint.
        """
        saved = -math.inf
        with deferred_interrupts() as interrupted:
            while not self.finished:
                with self.timed("total"):
                    metrics = self._epoch()
                folder.log(metrics)
                if after_epoch is not None:
                    after_epoch(metrics)
                due = time.monotonic() - saved >= self.problem.config.run.checkpoint_seconds
                stop = (
                    interrupted()
                    if self.ranks is None
                    else self.ranks.largest(interrupted(), self._step("end"))
                )
                if due or self.finished or stop:
                    folder.save(self.state())
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
        self.problem.model.eval()

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a block of code to that of a part of the run, which goes on counting
        after a resume.
        """
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def _epoch(self) -> Metrics:
        self.epoch += 1
        with self.timed("weights"):
            metrics: Metrics = {"epoch": self.epoch, **self._weight_steps()}
        if self.epoch in self.rounds:
            with self.timed("hyper"):
                metrics |= self._hyper_round()
        if self.method.learns():
            metrics |= _augmentation(self.problem)
        if self.epoch % self._eval_every == 0 or self.finished:
            evidence = self.method.progress()
            if evidence is not None:
                metrics |= _described(evidence, self.problem) | self.method.describe()
            for split in ("train", "test"):
                metrics |= {
                    f"{split}_{name}": value for name, value in self.evaluate(split).items()
                }
        metrics |= {f"seconds_{part}": self.seconds[part] for part in ("weights", "hyper")}
        metrics["peak_memory_bytes"] = self.peak_memory()
        return metrics

    def peak_memory(self) -> int:
        """Most bytes that a process has used at one time."""
        own = peak_memory(self.problem.data.x_train.device)
        return own if self.ranks is None else int(self.ranks.largest(own, self._step("end")))

    def _step(self, what: str) -> str:
        """A name for a part of the run, for errors."""
        return f"{what} of epoch {self.epoch}"

    @property
    def _eval_every(self) -> int:
        return self.problem.config.run.eval_every or max(1, self.training.epochs // EVALUATIONS)

    def _weight_steps(self) -> Metrics:
        data, training = self.problem.data, self.training
        order = torch.randperm(data.n_data, generator=self.batches)
        per_epoch = -(-data.n_data // training.batch_size)
        parameters = list(self.problem.model.parameters())
        gradient = [torch.zeros_like(p) for p in parameters]  # mean over the epoch
        losses: list[Tensor] = []
        self.problem.model.train()
        for index in order.split(training.batch_size):
            rate = cosine(
                self.steps["weights"], per_epoch * training.epochs, training.lr, training.lr_min
            )
            set_rate(self.weights, rate)
            self.weights.zero_grad()
            with named(self.ranks, self._step(f"weight step {len(losses) + 1}")):
                loss = self.loss(data.x_train[index], data.y_train[index])
                loss.backward()
            self.weights.step()
            if self.method.learns_by == "loss":
                self._follow_the_loss(per_epoch * training.epochs)
            for mean, parameter in zip(gradient, parameters, strict=True):
                if parameter.grad is not None:
                    mean.add_(parameter.grad, alpha=len(index) / data.n_data)
            losses.append(loss.detach() * len(index))
            self.steps["weights"] += 1
        self.weights.zero_grad()
        total = torch.stack(losses).sum()
        if self.ranks is not None:
            total = self.ranks.sum(total, self._step("loss")) / self.ranks.size
        mean_loss = total.item() / data.n_data
        if not math.isfinite(mean_loss):
            raise NtkMarglikError(
                f"The training loss became {mean_loss} in epoch {self.epoch}; the run folder "
                f"holds the metrics up to epoch {self.epoch - 1}. A smaller --lr (now "
                f"{training.lr:g}) usually helps."
            )
        return {
            "loss": mean_loss,
            "map_gradient_norm": torch.stack([g.norm() for g in gradient]).norm().item(),
        }

    def _follow_the_loss(self, total: int) -> None:
        """A step of each hyperparameter down the gradient that the weights' loss has left in it."""
        training = self.training
        for name, optimizer, start, end in (
            ("prior", self.prior, training.lr_hyp, training.lr_hyp_min),
            ("augment", self.augment, training.lr_aug, training.lr_aug_min),
        ):
            if optimizer is not None and any(
                p.grad is not None for g in optimizer.param_groups for p in g["params"]
            ):
                set_rate(optimizer, cosine(self.steps[name], total, start, end))
                optimizer.step()
                optimizer.zero_grad()
                self.steps[name] += 1
        self.problem.project()

    def _hyper_round(self) -> Metrics:
        training, moved = self.training, self.augment is not None
        n_prior, n_augment = training.prior_steps, training.aug_steps if moved else 0
        total = len(self.rounds)

        def set_rates(step: int) -> None:
            done = self.steps["prior"] + step
            set_rate(
                self.prior, cosine(done, total * n_prior, training.lr_hyp, training.lr_hyp_min)
            )
            if self.augment is not None:
                done = self.steps["augment"] + step
                set_rate(
                    self.augment,
                    cosine(done, total * n_augment, training.lr_aug, training.lr_aug_min),
                )

        round_ = Round(self.prior, self.augment, n_prior, n_augment, set_rates)
        self.problem.model.eval()
        self.method.learn(round_)
        self.steps["prior"] += n_prior
        self.steps["augment"] += n_augment
        evidence = Evidence.mean(round_.evidences) if round_.evidences else None
        self._check_round(round_, evidence)
        return round_.metrics if evidence is None else _described(evidence, self.problem)

    def _check_round(self, round_: Round, evidence: Evidence | None) -> None:
        """Refuse to go on with hyperparameters, or with an evidence, that are not finite, wherever
        they come from.
        """
        values = [value for value in _numbers(round_.metrics) if not math.isfinite(value)]
        finite = evidence is None or bool(evidence.total.isfinite())
        if values or not (finite and self.problem.prior.log_precision.isfinite().all()):
            advice = f"A smaller --lr-hyp (now {self.training.lr_hyp:g}) usually helps."
            if self.method.learns_by == "samples":
                advice = (
                    "Another --prior-precision to start from, more --solver-passes or fewer "
                    "--em-steps may help."
                )
            raise NtkMarglikError(
                f"The evidence or the prior became infinite or NaN in epoch {self.epoch}; the run "
                f"folder holds the metrics up to epoch {self.epoch - 1}. {advice}"
            )

    def evaluate(self, split: str) -> dict[str, float]:
        """Metrics on the "train" or "test" split."""
        data, model = self.problem.data, self.problem.model
        x, y = (data.x_train, data.y_train) if split == "train" else (data.x_test, data.y_test)
        training = model.training
        model.eval()
        try:
            copies = (
                self.problem.config.hyperparameters.aug_samples
                if self.problem.augment is not None
                else 1
            )
            return evaluate(self.method.outputs, x, y, max(1, 1000 // copies), self.ranks)
        finally:
            model.train(training)

    def state(self) -> dict[str, Any]:
        """Everything that determines the rest of the run."""
        problem = self.problem
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "seconds": self.seconds,
            "settings": problem.config.flat(),
            "model": problem.model.state_dict(),
            "prior": problem.prior.state_dict(),
            "augment": None if problem.augment is None else problem.augment.state_dict(),
            "weight_optimizer": self.weights.state_dict(),
            "prior_optimizer": self.prior.state_dict(),
            "augment_optimizer": None if self.augment is None else self.augment.state_dict(),
            "batches": self.batches.get_state(),
            "evidence": problem.generator.get_state(),
            "method": self.method.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a run where its checkpoint left it."""
        self.problem.config.refuse_other(state["settings"])
        problem = self.problem
        self.epoch = state["epoch"]
        self.steps = state["steps"]
        self.seconds = state["seconds"]
        problem.model.load_state_dict(state["model"])
        problem.prior.load_state_dict(state["prior"])
        self.weights.load_state_dict(state["weight_optimizer"])
        self.prior.load_state_dict(state["prior_optimizer"])
        if problem.augment is not None:
            problem.augment.load_state_dict(state["augment"])
        if self.augment is not None:
            self.augment.load_state_dict(state["augment_optimizer"])
        self.batches.set_state(state["batches"])
        problem.generator.set_state(state["evidence"])
        self.method.restore(state.get("method", {}))


def _described(evidence: Evidence, problem: Problem) -> Metrics:
    n = problem.data.n_data
    return {
        "log_marglik": evidence.total.item() / n,
        "log_marglik_error": None
        if evidence.standard_error is None
        else evidence.standard_error / n,
        "log_marglik_status": evidence.status,
        "evidence_log_likelihood": evidence.log_likelihood.item() / n,
        "evidence_scatter": evidence.scatter.item() / n,
        "evidence_log_det_ratio": evidence.log_det_ratio.item() / n,
        "prior_precision": {
            name: p.mean().item() for name, p in problem.prior.precisions().items()
        },
    }


def _numbers(metrics: Metrics) -> Iterator[float]:
    """All numbers of metrics, those in lists and by name included."""
    for value in metrics.values():
        parts = (
            value
            if isinstance(value, dict)
            else dict(enumerate(value))
            if isinstance(value, list)
            else {"": value}
        )
        yield from (part for part in parts.values() if isinstance(part, float))


def _augmentation(problem: Problem) -> Metrics:
    eta = getattr(problem.augment, "eta", None)
    return {"augmentation": eta.detach().tolist()} if isinstance(eta, Tensor) else {}
