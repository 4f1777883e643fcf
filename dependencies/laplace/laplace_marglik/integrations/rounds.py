"""What the callbacks of all libraries share: a round for every epoch, once, and what is logged."""

from __future__ import annotations

from typing import Any

import torch

from laplace_marglik.checks import positive_integer
from laplace_marglik.learner import EvidenceLearner, Round

LOGGED = 100  # precisions that are logged one by one, at most


class LearnerRounds:
    """Learned weight decay in every step, and a round of the learner for every epoch, exactly once.

    A checkpoint may be written when an epoch's last step is done and its round is not; a run
    that goes on from there takes the round first.

    Args:
        learner: of the model that is trained.
        every_steps: steps of the optimiser from round to round; None for epochs.
        decoupled: as in `EvidenceLearner.attach`.
        also_decays: as in `EvidenceLearner.attach`.
    """

    def __init__(
        self,
        learner: EvidenceLearner,
        *,
        every_steps: int | None = None,
        decoupled: bool = False,
        also_decays: bool = False,
    ):
        if every_steps is not None:
            positive_integer("every_steps", every_steps)
        self.learner = learner
        self.every_steps = every_steps
        self.decoupled = decoupled
        self.also_decays = also_decays
        self.epochs = 0  # with their round

    def _attach(self, optimizer: Any) -> None:
        self.learner.attach(optimizer, decoupled=self.decoupled, also_decays=self.also_decays)

    def _complete(self, epochs: int) -> Round | None:
        """Take the round of the last of some complete epochs, unless it was taken."""
        if self.every_steps is not None or self.epochs >= epochs:
            return None
        self.epochs = epochs
        return self.learner.round()

    def _rounds_state(self) -> dict[str, Any]:
        """Everything that determines later rounds."""
        return {"learner": self.learner.state_dict(), "epochs": self.epochs}

    def _load_rounds(self, state: dict[str, Any]) -> None:
        """Continue bit for bit."""
        self.learner.load_state_dict(state["learner"])
        self.epochs = state["epochs"]


def logged(learner: EvidenceLearner, result: Round) -> dict[str, float]:
    """What a round has found, as named numbers for a logger.

    Args:
        learner: whose round.
        result: of the round.
    """
    ml = learner.ml
    n = ml.n_data
    evidence = result.evidence
    values = {
        "evidence/total": float(evidence.total) / n,
        "evidence/log_likelihood": float(evidence.log_likelihood) / n,
        "evidence/seconds": result.seconds,
    }
    if result.interval is not None:
        low, high = result.interval
        values |= {"evidence/low": low / n, "evidence/high": high / n}
    names = ml.prior.group_names
    if len(names) <= LOGGED:
        for name, precision in zip(names, ml.prior.precision.tolist(), strict=True):
            values[f"precision/{name}"] = precision
    for name in ml.likelihood.scale_parameters:
        parameter: torch.Tensor = getattr(ml.likelihood, name)
        if parameter.requires_grad:
            values[f"likelihood/{name.removeprefix('log_')}"] = parameter.detach().exp().item()
    return values
