"""Which fits a method makes: the next follows from those finished, so a resumed search repeats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.finetune.config import Search
from ntkmarglik.programs.finetune.objectives import (
    DataEmphasized,
    Elbo,
    LaplaceEvidence,
    Map,
    Objective,
)
from ntkmarglik.programs.finetune.pretrained import INSTALL


@dataclass(frozen=True)
class Candidate:
    """The settings of a fit: learning rate, and weight decays of backbone and head."""

    rate: float
    backbone_decay: float
    head_decay: float


@dataclass(frozen=True)
class Result:
    """A finished fit and its score, -inf if it diverged."""

    candidate: Candidate
    score: float


@dataclass(frozen=True)
class Plan:
    """How a method searches.

    scores: by its objective on the training data ("objective"), or on held-out data by their
    log-likelihood ("held-out") or their conditional evidence ("clml"); then a last fit on all data
    follows. candidates: learning rates, a grid with weight decays, or proposals of Bayesian
    optimisation.
    """

    objective: type[Objective]
    scores: Literal["objective", "held-out", "clml"] = "objective"
    candidates: Literal["rates", "grid", "optimised"] = "rates"

    @property
    def holds_out(self) -> bool:
        """Whether fits of the search leave some data out."""
        return self.scores != "objective"

    @property
    def takes_covariance(self) -> bool:
        """Whether the prior may have a covariance: Laplace approximations are diagonal."""
        return self.objective is not LaplaceEvidence and self.scores != "clml"

    @property
    def learns(self) -> bool:
        """Whether the prior is learned, or searched for."""
        return self.objective is not Map or self.candidates != "rates"

    def uses(self) -> set[str]:
        """The settings of the search that it uses."""
        used = {"method", "prior", "rates", *self.objective.uses}
        if self.candidates == "rates" and not self.objective.closed_form:
            used |= {"backbone_decay", "head_decay"}
        if self.candidates != "rates":
            used |= {"backbone_decays", "head_decays"}
        if self.candidates == "optimised":
            used.add("trials")
        if self.holds_out:
            used.add("held_out")
        if self.scores == "clml":
            used.add("draws")
        return used

    def n_fits(self, search: Search) -> int:
        """All fits, the last one on all data included."""
        fits = len(search.rates)
        if self.candidates == "grid":
            fits *= len(search.backbone_decays) * len(search.head_decays)
        elif self.candidates == "optimised":
            fits = search.trials
        return fits + 1 if self.holds_out else fits

    def next(self, search: Search, done: Sequence[Result], seed: int) -> Candidate | None:
        """The candidate of the next fit; None after the last one."""
        if len(done) == self.n_fits(search):
            return None
        if self.holds_out and len(done) == self.n_fits(search) - 1:
            return best(done).candidate
        if self.candidates == "optimised":
            return _proposed(search, done, seed)
        decays = [(search.backbone_decay, search.head_decay)]
        if self.candidates == "grid":
            decays = list(itertools.product(search.backbone_decays, search.head_decays))
        candidates = [
            Candidate(rate, backbone_decay, head_decay)
            for rate in search.rates
            for backbone_decay, head_decay in decays
        ]
        return candidates[len(done)]


def best(done: Sequence[Result]) -> Result:
    """The fit with the highest score, the first of equals."""
    highest = max(done, key=lambda result: result.score)
    if highest.score == -math.inf:
        rates = sorted({result.candidate.rate for result in done})
        shown = " ".join(f"{rate:g}" for rate in rates)
        raise NtkMarglikError(
            f"Each of the {len(done)} fits diverged; try smaller learning rates (--rates, now "
            f"{shown})."
        )
    return highest


def _proposed(search: Search, done: Sequence[Result], seed: int) -> Candidate:
    """What a tree-structured Parzen estimator proposes after the finished fits."""
    optuna = _optuna()

    def between_ends(decays: Sequence[float]) -> Any:
        return optuna.distributions.FloatDistribution(min(decays), max(decays), log=True)

    distributions = {
        "rate": optuna.distributions.CategoricalDistribution(search.rates),
        "backbone_decay": between_ends(search.backbone_decays),
        "head_decay": between_ends(search.head_decays),
    }
    # built anew for every fit: the finished fits are all its state
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=2**16 * seed + len(done), n_startup_trials=5),
    )
    worst = min((r.score for r in done if r.score > -math.inf), default=0.0)
    for result in done:
        score = max(result.score, worst - abs(worst) - 1)  # the estimator takes no infinities
        trial = optuna.trial.create_trial(
            params=vars(result.candidate), distributions=distributions, value=score
        )
        study.add_trial(trial)
    return Candidate(**study.ask(distributions).params)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise NtkMarglikError(f"--method map-bo needs the optuna library: {INSTALL}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


PLANS = {
    "map": Plan(Map),
    "map-gs": Plan(Map, "held-out", "grid"),
    "map-bo": Plan(Map, "held-out", "optimised"),
    "la-lml": Plan(LaplaceEvidence),
    "la-clml": Plan(Map, "clml", "grid"),
    "elbo": Plan(Elbo),
    "de-elbo": Plan(DataEmphasized),
}
