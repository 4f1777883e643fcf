"""Steps of hyperparameters: by Adam, or, for the precisions of a prior, by their fixed point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood
from laplace_marglik.schedule import cosine, set_rate

LARGEST_STEP = 5.0  # of a log precision at rate 1: that of a weight at its mean is infinite
# log precisions end here: their prior is a point, or flat, in single precision
LARGEST_LOG_PRECISION = 30.0


class Moves(ABC):
    """Hyperparameters that move together, down the gradients that are left in them.

    Args:
        parameters: which.
        steps: in a round.
        rate: of the first step.
        last_rate: of the last step in the whole training; None for a tenth.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], steps: int, rate: float, last_rate: float | None
    ):
        self.parameters = list(parameters)
        self.steps = steps if self.parameters else 0
        self.rate = rate
        self.last_rate = rate / 10 if last_rate is None else last_rate
        self.taken = 0

    def moves_at(self, step: int) -> bool:
        """Whether they take this step of a round.

        Args:
            step: of the round, from 0 on.
        """
        return step < self.steps

    def step(self, rounds: int | None) -> None:
        """One step.

        Args:
            rounds: in the whole training, over which the rate falls along a cosine; None for a
                constant rate.
        """
        rate = self.rate
        if rounds is not None:
            rate = cosine(self.taken, self.steps * rounds, self.rate, self.last_rate)
        self._move(rate)
        self.taken += 1

    @abstractmethod
    def _move(self, rate: float) -> None:
        """A step of this rate."""

    def state_dict(self) -> dict[str, Any]:
        """What determines later steps, besides the parameters."""
        return {"taken": self.taken, "optimizer": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as those whose state it is.

        Args:
            state: from `state_dict`.
        """
        self.taken = state["taken"]


class AdamMoves(Moves):
    """Any hyperparameters, by Adam; arguments as of all moves."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], steps: int, rate: float, last_rate: float | None
    ):
        super().__init__(parameters, steps, rate, last_rate)
        self.optimizer = torch.optim.Adam(self.parameters, rate) if self.parameters else None

    def _move(self, rate: float) -> None:
        assert self.optimizer is not None
        set_rate(self.optimizer, rate)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return {"taken": self.taken, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])


class FixedPointMoves(Moves):
    """Precisions of a prior, towards where the evidence is largest (MacKay 1992).

        gamma = delta |w - mean|^2 + 2 d evidence / d log delta
        log delta  +=  rate * log(gamma / (delta |w - mean|^2))

    Gamma is how many weights the data determine; at the largest evidence the ratio is 1. Where
    gamma hardly depends on delta, few steps go anywhere, whatever the precision at the start.

    Args:
        ml: whose prior.
        steps: in a round.
        rate: of the first step: its share of the way.
        last_rate: of the last step in the whole training; None for a tenth.
    """

    def __init__(self, ml: MarginalLikelihood, steps: int, rate: float, last_rate: float | None):
        super().__init__([ml.prior.log_precision], steps, rate, last_rate)
        self.ml = ml

    @torch.no_grad()
    def _move(self, rate: float) -> None:
        (log_precision,) = self.parameters
        assert log_precision.grad is not None  # of minus the evidence per datum
        pull = log_precision.double().exp() * self.ml.prior.squares(self.ml.weights)
        gamma = pull - 2 * self.ml.n_data * log_precision.grad.double()
        log_precision.add_(rate * _log_ratio(gamma, pull).to(log_precision))
        log_precision.clamp_(-LARGEST_LOG_PRECISION, LARGEST_LOG_PRECISION)


def _log_ratio(gamma: Tensor, pull: Tensor) -> Tensor:
    """log(gamma / pull), limited; 0 where both vanish, of weights that do nothing and are zero."""
    logs = gamma.clamp_min(0).log() - pull.log()
    return logs.nan_to_num(0.0).clamp(-LARGEST_STEP, LARGEST_STEP)
