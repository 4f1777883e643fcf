"""One fit: the weights from their pretrained values to the end of a learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from laplace_marglik.schedule import cosine, set_rate
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.inputs import Part, changed
from ntkmarglik.programs.finetune.plan import PLANS, Candidate
from ntkmarglik.programs.finetune.pretrained import Classifier
from ntkmarglik.programs.finetune.priors import PriorFamily

MOMENTUM = 0.9
NOISE_SEED = 2**31  # added to the seed: draws of the objective are independent of batches


class Fit:
    """Training of a model on a part of the data; its weights must be the pretrained ones.

    priors: from which the candidate's decays choose one. number: of the fit in its run.
    """

    def __init__(
        self,
        model: Classifier,
        priors: PriorFamily,
        candidate: Candidate,
        part: Part,
        config: FinetuneConfig,
        number: int,
    ):
        self.model = model
        self.candidate = candidate
        self.part = part
        self.config = config
        n = len(part)
        prior = priors.at(model, candidate.backbone_decay * n, candidate.head_decay * n)
        seed = 1000 * config.run.seed + number
        noise = torch.Generator(part.y.device).manual_seed(NOISE_SEED + seed)
        objective = PLANS[config.search.method].objective
        self.objective = objective(model, prior, n, config.search, noise)
        self.batches = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)  # dropout draws from torch's own generator
        self.groups = _groups(model, self.objective.parameters())
        factor = config.search.sigma_rate / candidate.rate if config.search.sigma_rate else 1.0
        self.optimizer = torch.optim.SGD(
            [
                {"params": group, "factor": factor if i == 2 else 1.0}
                for i, group in enumerate(self.groups)
            ],
            candidate.rate,
            momentum=MOMENTUM,
            nesterov=True,
        )
        self.step = 0
        self.losses: list[float] = []  # since they were last asked for
        self._order = torch.empty(0, dtype=torch.long)

    @property
    def finished(self) -> bool:
        return self.step >= self.config.training.steps or self.diverged

    @property
    def diverged(self) -> bool:
        return any(not math.isfinite(loss) for loss in self.losses[-1:])

    @torch.no_grad()
    def check(self) -> None:
        """Look at the weights, which may be lost though the last loss was not."""
        sums = torch.stack([p.sum() for p in self.model.parameters()])
        if not sums.sum().isfinite():
            self.losses.append(math.nan)

    @property
    def batch_size(self) -> int:
        return min(self.config.training.batch_size, len(self.part))

    def advance(self) -> None:
        """One step of the weights, and of what is learned at the end of an epoch."""
        training, search = self.config.training, self.config.search
        self.model.train()
        x, y = self.part.batch(self._next_index())
        x = changed(x, self.config.task.augment, self.batches)
        set_rate(self.optimizer, cosine(self.step, training.steps, self.candidate.rate, 0.0))
        self.optimizer.zero_grad()
        loss = self.objective.loss(x, y)
        loss.backward()
        if training.clip:
            for group in self.groups:
                nn.utils.clip_grad_norm_(group, training.clip)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.step += 1
        every = search.laplace_every or len(self.part) // self.batch_size
        if self.step % every == 0 and not self.diverged:
            self.objective.learn(self.part)

    def mean_loss(self) -> float:
        """The mean loss since the last call."""
        mean = sum(self.losses) / max(1, len(self.losses))
        self.losses = self.losses[-1:] if self.diverged else []
        return mean

    def _next_index(self) -> Tensor:
        """Batches of equal size in a random order; the rest at the end of an epoch is dropped."""
        if len(self._order) < self.batch_size:
            self._order = torch.randperm(len(self.part), generator=self.batches)
        index = self._order[: self.batch_size]
        self._order = self._order[self.batch_size :]
        return index

    def state(self) -> dict[str, Any]:
        """Everything that determines the rest of the fit."""
        cuda = self.part.y.device.type == "cuda"
        return {
            "model": self.model.state_dict(),
            "objective": self.objective.state(),
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.get_state(),
            "order": self._order,
            "losses": self.losses,
            "dropout": torch.cuda.get_rng_state() if cuda else torch.get_rng_state(),
            "candidate": vars(self.candidate),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a fit where its state left it."""
        self.model.load_state_dict(state["model"])
        self.objective.restore(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.set_state(state["batches"])
        self._order = state["order"]
        self.losses = state["losses"]
        self.step = state["step"]
        if self.part.y.device.type == "cuda":
            torch.cuda.set_rng_state(state["dropout"])
        else:
            torch.set_rng_state(state["dropout"])


def _groups(model: Classifier, others: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Weights of the backbone, of the head, and the rest: each has its own gradient limit."""
    backbone: list[nn.Parameter] = []
    head: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = backbone if name.startswith(f"{model.backbone}.") else head
            group.append(parameter)
    return [group for group in (backbone, head, others) if group]
