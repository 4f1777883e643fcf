"""Weights, posterior width and prior learned together by the ELBO or the data-emphasised ELBO."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.methods.base import AUGMENT_RATES, BLOCKS, HYPER_RATES, Method, Problem
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.runs.loggers import Metrics

if TYPE_CHECKING:
    from torch import Tensor, nn

    from laplace_marglik import Bounds, Evidence

DRAWS = 2  # of the weights for an estimate during training
FINAL_DRAWS = 20  # and at the end


class Variational(Method):
    """One loss for everything: prior variances are in closed form, sigma follows the gradient
    (Harvey et al. 2025).

    Predictions are those of the mean weights. The evidence is the ELBO also where the
    data-emphasised one is maximised, since that is the larger bound.
    """

    learns_by = "loss"
    measures_by = "draws"
    evidence_kind = "ELBO"
    structure = "elbo"

    def __init__(self, problem: Problem):
        from laplace_marglik import DataEmphasizedELBO

        super().__init__(problem)
        estimator = problem.config.estimator
        self.objective = DataEmphasizedELBO(
            problem.model,
            problem.likelihood,
            n_data=problem.data.n_data,
            prior=problem.prior,
            kappa=self.emphasis(),
            posterior=estimator.posterior,
            antithetic=estimator.antithetic,
            sigma=problem.config.hyperparameters.sigma,
            augment=problem.augment,
            generator=problem.generator,
        )
        self._last: Bounds | None = None

    @classmethod
    def uses(cls, config: Config) -> frozenset[str]:
        own = HYPER_RATES | AUGMENT_RATES | {"posterior", "antithetic", "sigma"}
        return own | (BLOCKS if config.run.baseline else set())  # by which that is measured

    @classmethod
    def check(cls, config: Config) -> None:
        if config.hyperparameters.learn_temperature:
            raise NtkMarglikError(
                f"--learn-temperature: the bound of --method {cls.name} grows without limit in a "
                "learned temperature; give a fixed one, --temperature."
            )

    @abstractmethod
    def emphasis(self) -> float | Literal["auto"]:
        """The factor kappa of the log-likelihood."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.objective(x, y)

    def parameters_of_loss(self) -> list[nn.Parameter]:
        return self.objective.parameters()

    def outputs(self, x: Tensor) -> Tensor:
        return self.objective.outputs_of(x, seed=self.problem.config.run.seed)

    def hyperparameters(self) -> list[nn.Parameter]:
        return [self.objective.width.raw_sigma]

    def progress(self) -> Evidence:
        return self._bounds(DRAWS).elbo

    def evidence(self) -> Evidence:
        return self._bounds(FINAL_DRAWS).elbo

    def describe(self) -> Metrics:
        width, weights = self.objective.width, self.objective.weights
        sigma = {
            name: width.of(width.sigma.detach(), name, w).mean().item()
            for name, w in weights.items()
        }
        found: Metrics = {"sigma": sigma, "kappa": self.objective.kappa}
        if self._last is not None:
            found["emphasised_elbo"] = self._last.de_elbo.total.item() / self.objective.n_data
        return found

    def extras(self) -> Metrics:
        """Scores of predictions averaged over draws of the posterior."""
        import torch

        from ntkmarglik.learn.evaluate import BATCH, metrics

        found = super().extras()
        if self.problem.config.run.predict == "none":
            return found
        data = self.problem.data
        before = self.problem.generator.get_state()
        with torch.no_grad():
            p = [self.objective.predict(x, samples=FINAL_DRAWS) for x in data.x_test.split(BATCH)]
        self.problem.generator.set_state(before)
        scores = metrics(torch.cat(p).double().clamp_min(1e-300).log(), data.y_test)
        return found | {f"sampled_test_{name}": value for name, value in scores.items()}

    def baseline(self, fixed: Problem) -> Method:
        return Map(fixed)

    def state(self) -> dict[str, Any]:
        return {"raw_sigma": self.objective.width.raw_sigma.detach()}

    def restore(self, state: dict[str, Any]) -> None:
        self.objective.width.load_state_dict(state)

    def _bounds(self, draws: int) -> Bounds:
        """Both bounds at the present weights; the prior takes its closed form. Training draws are
        not affected.
        """
        data, size = self.problem.data, self.problem.config.training.batch_size
        self.objective.update_prior()
        before = self.problem.generator.get_state()
        try:
            batches = zip(data.x_train.split(size), data.y_train.split(size), strict=True)
            self._last = self.objective.evaluate(batches, samples=draws, ranks=self.problem.ranks)
        finally:
            self.problem.generator.set_state(before)
        return self._last


class Elbo(Variational):
    """The evidence lower bound itself."""

    name = "elbo"
    label = "ELBO"
    colour = "#E69F00"

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        kappa = config.estimator.kappa
        if kappa not in (0, 1):
            raise NtkMarglikError(
                f"--kappa {kappa:g} emphasises the data, which is --method de-elbo; that of elbo "
                "is 1."
            )

    def emphasis(self) -> float:
        return 1.0


class DataEmphasisedElbo(Variational):
    """The bound with its log-likelihood multiplied: by --kappa, or by parameters / data."""

    name = "de-elbo"
    label = "DE-ELBO"
    colour = "#8C564B"

    @classmethod
    def uses(cls, config: Config) -> frozenset[str]:
        return super().uses(config) | {"kappa"}

    def emphasis(self) -> float | Literal["auto"]:
        return self.problem.config.estimator.kappa or "auto"
