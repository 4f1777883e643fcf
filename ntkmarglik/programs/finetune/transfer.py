"""A run: fits one after the other as the plan says, and the network of the best one."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from asdl_marglik import checksum
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.machine.interrupts import deferred_interrupts
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.fit import Fit
from ntkmarglik.programs.finetune.inputs import Data
from ntkmarglik.programs.finetune.plan import PLANS, Candidate, Result, best
from ntkmarglik.programs.finetune.pretrained import Classifier
from ntkmarglik.programs.finetune.priors import family
from ntkmarglik.programs.finetune.scores import conditional, evaluated
from ntkmarglik.programs.finetune.swag import Statistics
from ntkmarglik.runs.folder import NoFolder, RunFolder
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.resumable import Progress

EVALUATIONS = 5  # of the test set in a fit, when their spacing is not given
SPLIT_SEED = 7


class Transfer:
    """All fits of a method; call `run`.

    The model's weights must be the pretrained ones, and end as the chosen ones. statistics: of
    their pretraining, for a prior that needs them.
    """

    unit = "step"
    ranks = None  # one process

    def __init__(
        self,
        config: FinetuneConfig,
        model: Classifier,
        data: Data,
        statistics: Statistics | None = None,
    ):
        self.config = config
        self.model = model
        self.data = data
        self.priors = family(config.search, model, statistics)
        self._statistics = {} if statistics is None else statistics.tensors()
        self.plan = PLANS[config.search.method]
        self.n_fits = self.plan.n_fits(config.search)
        self.rest = data.train
        self.held_out = data.train
        if self.plan.holds_out:
            seed = SPLIT_SEED + config.run.seed
            self.rest, self.held_out = data.halves(config.search.held_out, seed)
        self.initial = _copied(model)
        # weights and description of the best fit so far, or of the last one
        self.chosen: dict[str, Any] = {}
        self.done: list[Result] = []
        self.fit: Fit | None = None
        self.steps = 0
        # of training and scores; evaluations on test data are not a part of a method
        self.seconds = {"total": 0.0, "cpu": 0.0}

    @cached_property
    def identity(self) -> dict[str, str]:
        sums = checksum([*self.initial.values(), *self._statistics.values()]).tolist()
        return {
            "data": f"{self.data.train.fingerprint()}-{self.data.test.fingerprint()}",
            "network": hashlib.sha256(str(sums).encode()).hexdigest()[:16],
        }

    @property
    def position(self) -> int:
        return self.steps

    @property
    def total(self) -> int:
        return self.n_fits * self.config.training.steps

    @property
    def place(self) -> str:
        return f"step {self.steps} of fit {len(self.done) + 1}"

    @property
    def finished(self) -> bool:
        return len(self.done) == self.n_fits

    def run(self, folder: RunFolder | NoFolder, progress: Progress | None = None) -> None:
        """Make all fits; an interrupt ends the run after its step, with a checkpoint."""
        saved = time.monotonic()
        with deferred_interrupts("step") as interrupted, torch.random.fork_rng():
            while not self.finished:
                self.fit = self.fit or self.next_fit()
                while not self.fit.finished:
                    self._step(self.fit, folder)
                    if progress is not None:
                        progress({}, f"fit {len(self.done) + 1} of {self.n_fits}")
                    due = time.monotonic() - saved >= self.config.run.checkpoint_seconds
                    if due or interrupted():
                        folder.save(self.state())
                        saved = time.monotonic()
                    if interrupted():
                        raise KeyboardInterrupt
                self._close(self.fit)
            folder.save(self.state())
        self.model.load_state_dict(self.chosen["model"])
        self.model.eval()

    def _step(self, fit: Fit, folder: RunFolder | NoFolder) -> None:
        """A step of a fit, and an evaluation where one is due."""
        with self._timed():
            fit.advance()
        self.steps += 1
        if fit.step % self.eval_every == 0 or fit.finished:
            fit.check()
            folder.log(self._line(fit))

    @property
    def eval_every(self) -> int:
        return self.config.run.eval_every or -(-self.config.training.steps // EVALUATIONS)

    def next_fit(self) -> Fit:
        """The fit that follows the finished ones, from the pretrained weights."""
        candidate = self.plan.next(self.config.search, self.done, self.config.run.seed)
        assert candidate is not None
        return self._fit(candidate)

    def _fit(self, candidate: Candidate) -> Fit:
        self.model.load_state_dict(self.initial)
        part = self.data.train if self._last else self.rest
        return Fit(self.model, self.priors, candidate, part, self.config, len(self.done))

    @property
    def _last(self) -> bool:
        """Whether the present fit follows the search, with all data."""
        return self.plan.holds_out and len(self.done) == self.n_fits - 1

    def _close(self, fit: Fit) -> None:
        """Score a finished fit, and keep its weights if they are the best."""
        with self._timed():
            score = -math.inf if fit.diverged else self._score(fit)
            if not math.isfinite(score):
                score = -math.inf
            highest = max((result.score for result in self.done), default=-math.inf)
            is_best = not self.plan.holds_out and score > highest
            if self._last or is_best:
                self.chosen = {
                    "model": _copied(self.model),
                    "fit": len(self.done),
                    **fit.objective.describe(),
                }
            self.done.append(Result(fit.candidate, score))
            self.fit = None
        if self.finished and (self.plan.holds_out and score == -math.inf):
            raise NtkMarglikError(
                f"The last fit diverged, though with fewer data it did not: {fit.candidate}."
            )
        if self.finished:
            best(self.done)  # if none is any good, say so

    def _score(self, fit: Fit) -> float:
        if self._last:
            return fit.objective.score(self.data.train)
        if self.plan.scores == "objective":
            return fit.objective.score(fit.part)
        if self.plan.scores == "held-out":
            return evaluated(self.model, self.held_out)["log_likelihood"]
        return conditional(
            fit.objective,
            fit.part,
            self.held_out,
            draws=self.config.search.draws,
            generator=fit.objective.generator,
        )

    def _line(self, fit: Fit) -> Metrics:
        test = {} if fit.diverged else evaluated(self.model, self.data.test)
        return {
            "step": self.steps,
            "fit": len(self.done),
            "fit_step": fit.step,
            **vars(fit.candidate),
            "loss": fit.mean_loss(),
            **fit.objective.describe(),
            **{f"test_{name}": value for name, value in test.items()},
            "seconds": self.seconds["total"],
        }

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        cpu = time.process_time()
        yield
        self.seconds["total"] += time.perf_counter() - start
        self.seconds["cpu"] += time.process_time() - cpu

    def state(self) -> dict[str, Any]:
        """Everything that determines the rest of the run."""
        return {
            "settings": self.config.flat(),
            "done": [{**vars(r.candidate), "score": r.score} for r in self.done],
            "chosen": self.chosen,
            "fit": None if self.fit is None else self.fit.state(),
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a run where its checkpoint left it."""
        self.done = []
        for stored in state["done"]:
            settings = {name: value for name, value in stored.items() if name != "score"}
            self.done.append(Result(Candidate(**settings), stored["score"]))
        self.chosen = state["chosen"]
        self.steps = state["steps"]
        self.seconds = state["seconds"]
        if state["fit"] is not None:
            self.fit = self._fit(Candidate(**state["fit"]["candidate"]))
            self.fit.restore(state["fit"])
        elif self.finished:
            self.model.load_state_dict(self.chosen["model"])


def _copied(model: Classifier) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
