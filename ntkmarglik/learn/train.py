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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from asdl_marglik import CurvatureError, check_weights
from laplace_marglik import Evidence
from laplace_marglik.schedule import cosine, set_rate
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.distributed import named
from ntkmarglik.learn.evaluate import BATCH, evaluate
from ntkmarglik.learn.methods import Learned, Method, Problem
from ntkmarglik.learn.schedule import weight_optimizer
from ntkmarglik.learn.shared_loss import SharedLoss
from ntkmarglik.machine.device import peak_memory
from ntkmarglik.machine.interrupts import deferred_interrupts
from ntkmarglik.runs.folder import NoFolder, RunFolder
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.resumable import Progress

EVALUATIONS = 50  # of the test set in a run, when their spacing is not given


class Trainer:
    """One run of one method; call `run`."""

    unit = "epoch"

    def __init__(self, problem: Problem, method: Method):
        self.problem = problem
        self.method = method
        self.training = problem.config.training
        self.ranks = problem.ranks
        self.loss = method.loss if self.ranks is None else SharedLoss(problem, method, self.ranks)
        self.batches = torch.Generator().manual_seed(problem.config.run.seed)
        self.weights = weight_optimizer(problem.model, self.training)
        method.attach(self.weights)
        # of hyperparameters that follow the loss; those that follow the evidence are the method's
        self.prior = torch.optim.Adam(method.hyperparameters(), self.training.lr_hyp)
        self.augment = self._augment_optimizer()
        self.epoch = 0
        self.steps = {"weights": 0, "prior": 0, "augment": 0}
        self.seconds = {"total": 0.0, "weights": 0.0, "hyper": 0.0}

    def _augment_optimizer(self) -> torch.optim.Optimizer | None:
        if self.problem.augment is None:
            return None
        parameters = list(self.problem.augment.parameters())
        if not parameters:
            return None
        return torch.optim.Adam(parameters, self.training.lr_aug)

    @property
    def config(self) -> Config:
        return self.problem.config

    @property
    def identity(self) -> dict[str, str]:
        return {"data": self.problem.data.fingerprint}

    @property
    def position(self) -> int:
        return self.epoch

    @property
    def total(self) -> int:
        return self.training.epochs

    @property
    def place(self) -> str:
        return f"epoch {self.epoch}"

    @property
    def finished(self) -> bool:
        return self.epoch >= self.training.epochs

    def run(self, folder: RunFolder | NoFolder, progress: Progress | None = None) -> None:
        """Train to the last epoch; an interrupt ends the run after the epoch it falls in, with a
        checkpoint.
        """
        saved = -math.inf
        with deferred_interrupts() as interrupted:
            while not self.finished:
                with self.timed("total"):
                    metrics = self._epoch()
                folder.log(metrics)
                if progress is not None:
                    progress(metrics)
                due = time.monotonic() - saved >= self.config.run.checkpoint_seconds
                stop = interrupted()
                if self.ranks is not None:  # an interrupt of one rank stops all of them
                    stop = bool(self.ranks.largest(stop, self._step("end")))
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
        with self.timed("hyper"):
            metrics |= self._hyper_round()
        if self.method.learns():
            metrics |= _augmentation(self.problem)
        if self.epoch % self._eval_every == 0 or self.finished:
            metrics |= self._evaluations()
        metrics["seconds_weights"] = self.seconds["weights"]
        metrics["seconds_hyper"] = self.seconds["hyper"]
        metrics["peak_memory_bytes"] = self.peak_memory()
        return metrics

    def _evaluations(self) -> Metrics:
        """The evidence, where it is not known from hyperparameter steps, and both splits."""
        metrics: Metrics = {}
        evidence = self.method.progress()
        if evidence is not None:
            metrics |= _described(evidence, self.problem)
            metrics |= self.method.describe()
        for split in ("train", "test"):
            for name, value in self.evaluate(split).items():
                metrics[f"{split}_{name}"] = value
        return metrics

    def peak_memory(self) -> int:
        """Most bytes that a process has used at one time."""
        peak = peak_memory(self.problem.data.x_train.device)
        if self.ranks is None:
            return peak
        return int(self.ranks.largest(peak, self._step("end")))

    def _step(self, what: str) -> str:
        """A name for a part of the run, for errors."""
        return f"{what} of epoch {self.epoch}"

    @property
    def _eval_every(self) -> int:
        return self.config.run.eval_every or max(1, self.training.epochs // EVALUATIONS)

    def _weight_steps(self) -> Metrics:
        n_data = self.problem.data.n_data
        order = torch.randperm(n_data, generator=self.batches)
        parameters = list(self.problem.model.parameters())
        gradient = [torch.zeros_like(p) for p in parameters]  # mean over the epoch
        losses: list[Tensor] = []
        self.problem.model.train()
        for number, index in enumerate(order.split(self.training.batch_size), 1):
            loss = self._weight_step(index, self._step(f"weight step {number}"))
            pairs = zip(gradient, parameters, strict=True)
            present = [(mean, p.grad) for mean, p in pairs if p.grad is not None]
            torch._foreach_add_(*zip(*present, strict=True), alpha=len(index) / n_data)
            losses.append(loss * len(index))
        self.weights.zero_grad()
        gradient_norms = torch.stack([mean.norm() for mean in gradient])
        return {
            "loss": self._mean_loss(losses),
            "map_gradient_norm": gradient_norms.norm().item(),
        }

    def _weight_step(self, index: Tensor, name: str) -> Tensor:
        """A step of the weights down the loss of a batch; the gradient is left in them."""
        data = self.problem.data
        training = self.training
        total = training.epochs * -(-data.n_data // training.batch_size)
        rate = cosine(self.steps["weights"], total, training.lr, training.lr_min)
        set_rate(self.weights, rate)
        self.weights.zero_grad()
        with named(self.ranks, name):
            loss = self.loss(data.x_train[index], data.y_train[index])
            loss.backward()
        self.weights.step()
        if self.method.learns_by == "loss":
            self._follow_the_loss(total)
        self.steps["weights"] += 1
        return loss.detach()

    def _mean_loss(self, losses: list[Tensor]) -> float:
        """Mean over the data of the batches' summed losses, with the prior's part as it is now;
        refused if it is not finite.
        """
        total = torch.stack(losses).sum()
        if self.ranks is not None:
            total = self.ranks.sum(total, self._step("loss")) / self.ranks.size
        mean_loss = total.item() / self.problem.data.n_data + float(self.method.prior_loss())
        self._check_weights()
        if not math.isfinite(mean_loss):
            raise NtkMarglikError(
                f"The training loss became {mean_loss} in epoch {self.epoch}. "
                f"{self._what_is_left()} A smaller --lr (now {self.training.lr:g}) usually helps."
            )
        return mean_loss

    def _follow_the_loss(self, total: int) -> None:
        """A step of each hyperparameter down the gradient that the weights' loss has left in it."""
        training = self.training
        for name, optimizer, start, end in (
            ("prior", self.prior, training.lr_hyp, training.lr_hyp_min),
            ("augment", self.augment, training.lr_aug, training.lr_aug_min),
        ):
            if optimizer is not None and _has_gradient(optimizer):
                set_rate(optimizer, cosine(self.steps[name], total, start, end))
                optimizer.step()
                optimizer.zero_grad()
                self.steps[name] += 1
        self.problem.project()

    def _hyper_round(self) -> Metrics:
        """The hyperparameter steps that are due now."""
        training = self.problem.model.training
        self.problem.model.eval()
        try:
            learned = self.method.learn(self.epoch)
        finally:
            self.problem.model.train(training)
        if learned is None:
            return {}
        self._check_learned(learned)
        if learned.evidence is None:
            return learned.metrics
        return _described(learned.evidence, self.problem) | learned.metrics

    def _check_learned(self, learned: Learned) -> None:
        """Refuse to go on with hyperparameters, or with an evidence, that are not finite."""
        finite_metrics = all(map(math.isfinite, _numbers(learned.metrics)))
        finite_evidence = learned.evidence is None or bool(learned.evidence.total.isfinite())
        finite_prior = bool(self.problem.prior.log_precision.isfinite().all())
        if finite_metrics and finite_evidence and finite_prior:
            return
        self._check_weights()
        advice = f"A smaller --lr-hyp (now {self.training.lr_hyp:g}) usually helps."
        if self.method.learns_by == "samples":
            advice = (
                "Another --prior-precision to start from, more --solver-passes or --solver-steps, "
                "or fewer --em-steps may help."
            )
        raise NtkMarglikError(
            f"The evidence or the prior became infinite or NaN in epoch {self.epoch}. "
            f"{self._what_is_left()} {advice}"
        )

    def _check_weights(self) -> None:
        """Refuse to go on with weights that are not finite, which everything else follows from."""
        try:
            check_weights(self.problem.model)
        except CurvatureError as error:
            raise NtkMarglikError(
                f"The weights are not finite after epoch {self.epoch} ({error}). "
                f"{self._what_is_left()} A smaller --lr (now {self.training.lr:g}) usually helps."
            ) from error

    def _what_is_left(self) -> str:
        return f"The run folder holds the metrics up to epoch {self.epoch - 1}."

    def evaluate(self, split: str) -> dict[str, float]:
        """Metrics on the "train" or "test" split."""
        data = self.problem.data
        x, y = data.x_test, data.y_test
        if split == "train":
            x, y = data.x_train, data.y_train
        copies = 1
        if self.problem.augment is not None:
            copies = self.config.hyperparameters.aug_samples
        batch = max(1, BATCH // copies)
        model = self.problem.model
        training = model.training
        model.eval()
        try:
            return evaluate(self.method.outputs, x, y, batch, self.ranks)
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
            "likelihood": problem.likelihood.state_dict(),
            "weight_optimizer": self.weights.state_dict(),
            "prior_optimizer": self.prior.state_dict(),
            "augment_optimizer": None if self.augment is None else self.augment.state_dict(),
            "batches": self.batches.get_state(),
            "evidence": problem.generator.get_state(),
            "method": self.method.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a run where its checkpoint left it."""
        problem = self.problem
        self.epoch = state["epoch"]
        self.steps = state["steps"]
        self.seconds = state["seconds"]
        problem.model.load_state_dict(state["model"])
        check_weights(problem.model)
        problem.prior.load_state_dict(state["prior"])
        problem.likelihood.load_state_dict(state["likelihood"])
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
    error = evidence.standard_error
    precisions = problem.prior.precisions()
    log_temperature = problem.likelihood.log_temperature
    learned = {"temperature": log_temperature.exp().item()} if log_temperature.requires_grad else {}
    return {
        **learned,
        "log_marglik": evidence.total.item() / n,
        "log_marglik_error": None if error is None else error / n,
        "log_marglik_status": evidence.status,
        "evidence_log_likelihood": evidence.log_likelihood.item() / n,
        "evidence_scatter": evidence.scatter.item() / n,
        "evidence_log_det_ratio": evidence.log_det_ratio.item() / n,
        "prior_precision": {name: p.mean().item() for name, p in precisions.items()},
    }


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is a gradient for any of an optimiser's parameters."""
    for group in optimizer.param_groups:
        if any(parameter.grad is not None for parameter in group["params"]):
            return True
    return False


def _numbers(metrics: Metrics) -> Iterator[float]:
    """All numbers of metrics, those in lists and by name included."""
    for value in metrics.values():
        entries = [value]
        if isinstance(value, dict):
            entries = list(value.values())
        elif isinstance(value, list):
            entries = value
        for entry in entries:
            if isinstance(entry, float):
                yield entry


def _augmentation(problem: Problem) -> Metrics:
    eta = getattr(problem.augment, "eta", None)
    if not isinstance(eta, Tensor):
        return {}
    return {"augmentation": eta.detach().tolist()}
