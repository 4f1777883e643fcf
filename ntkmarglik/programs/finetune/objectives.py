"""What a fit minimises, what it learns besides the weights, and how good the result is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from asdl_marglik import evaluating, trainable
from laplace_marglik import (
    Categorical,
    DataEmphasizedELBO,
    DiagonalLaplace,
    Evidence,
    GaussianPrior,
)
from ntkmarglik.programs.finetune.config import Search
from ntkmarglik.programs.finetune.inputs import Inputs, Part
from ntkmarglik.runs.loggers import Metrics

LIKELIHOOD = "classification"


class Objective(ABC):
    """A loss for the weights of a model under a prior whose groups are backbone and head."""

    uses: ClassVar[tuple[str, ...]] = ()  # those of the search's settings that not all use
    closed_form: ClassVar[bool] = False  # whether the prior is found, wherever it starts

    def __init__(
        self,
        model: nn.Module,
        prior: GaussianPrior,
        n_data: int,
        search: Search,
        generator: torch.Generator,
    ):
        self.model = model
        self.prior = prior
        self.n_data = n_data
        self.search = search
        self.generator = generator

    def parameters(self) -> list[nn.Parameter]:
        """What is trained by the loss besides the weights."""
        return []

    @abstractmethod
    def loss(self, x: Inputs, y: Tensor) -> Tensor:
        """Of a batch, per datum."""

    def learn(self, part: Part) -> None:  # noqa: B027 - most learn by their loss, or nothing
        """Update what is not trained by the loss; called every `laplace_every` steps."""

    @abstractmethod
    def score(self, part: Part) -> float:
        """The objective of all training data, per datum; more is better."""

    def prior_variance(self) -> dict[str, float]:
        """The variances of backbone and head."""
        return dict(
            zip(self.prior.group_names, (1 / self.prior.precision.detach()).tolist(), strict=True)
        )

    def describe(self) -> Metrics:
        """What was learned."""
        return {"prior_variance": self.prior_variance()}

    def state(self) -> dict[str, Any]:
        """What a continued fit needs besides weights and optimiser."""
        return {"prior": self.prior.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prior.load_state_dict(state["prior"])


class Map(Objective):
    """The mode of the posterior under a fixed prior, with e = w_backbone - mean.

        loss = -mean log p(y | x, w) + alpha/2 e^T Sigma^-1 e + beta/2 |w_head|^2
        precision = alpha N

    L2-SP (Li et al. 2018) has Sigma = I and pretrained weights as mean, L2-zero mean zero.
    """

    _likelihood = Categorical()

    def loss(self, x: Inputs, y: Tensor) -> Tensor:
        return self._penalty() - self._likelihood.log_prob(self.model(x), y).mean()

    @torch.no_grad()
    def score(self, part: Part) -> float:
        with evaluating(self.model):
            sums = [
                self._likelihood.log_prob(self.model(x), y).double().sum()
                for x, y in part.batches()
            ]
        return (torch.stack(sums).sum() / len(part) - self._penalty()).item()

    def _penalty(self) -> Tensor:
        return self.prior.penalty(trainable(self.model, ())) / (2 * self.n_data)


class LaplaceEvidence(Map):
    """The mode, its prior learned by the evidence of a diagonal empirical-Fisher Laplace."""

    uses = ("laplace_every", "laplace_steps", "laplace_rate")

    def learn(self, part: Part) -> None:
        laplace = self._laplace(part)
        optimizer = torch.optim.Adam([self.prior.log_precision], self.search.laplace_rate)
        for _ in range(self.search.laplace_steps):
            optimizer.zero_grad()
            (-laplace.evidence().total / self.n_data).backward()
            optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def score(self, part: Part) -> float:
        return self._laplace(part).evidence().total.item() / self.n_data

    def _laplace(self, part: Part) -> DiagonalLaplace:
        return DiagonalLaplace(self.model, LIKELIHOOD, self.prior, part.batches())


class Elbo(Objective):
    """The ELBO of an isotropic Gaussian posterior; prior variances are optimal in closed form."""

    uses: ClassVar[tuple[str, ...]] = ("sigma", "sigma_rate", "draws")
    closed_form = True
    kappa: float | None = 1.0  # None: as configured

    def __init__(
        self,
        model: nn.Module,
        prior: GaussianPrior,
        n_data: int,
        search: Search,
        generator: torch.Generator,
    ):
        super().__init__(model, prior, n_data, search, generator)
        self.bound = DataEmphasizedELBO(
            model,
            LIKELIHOOD,
            n_data=n_data,
            prior=prior,
            sigma=search.sigma,
            generator=generator,
            kappa=self.kappa or search.kappa or "auto",
        )

    def parameters(self) -> list[nn.Parameter]:
        return self.bound.parameters()

    def loss(self, x: Inputs, y: Tensor) -> Tensor:
        return self.bound(x, y)

    def score(self, part: Part) -> float:
        bounds = self.bound.evaluate(part.batches(), samples=self.search.draws)
        return self._own(bounds.elbo, bounds.de_elbo).total.item() / self.n_data

    def _own(self, elbo: Evidence, de_elbo: Evidence) -> Evidence:
        return elbo

    def prior_variance(self) -> dict[str, float]:
        return {name: v.item() for name, v in self.bound.prior_variance().items()}

    def describe(self) -> Metrics:
        return {**super().describe(), "sigma": self.bound.sigma.item(), "kappa": self.bound.kappa}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "bound": self.bound.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.bound.load_state_dict(state["bound"])


class DataEmphasized(Elbo):
    """The data-emphasised ELBO (Harvey et al. 2025)."""

    uses = (*Elbo.uses, "kappa")
    kappa = None

    def _own(self, elbo: Evidence, de_elbo: Evidence) -> Evidence:
        return de_elbo
