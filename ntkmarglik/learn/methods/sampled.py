"""The prior learned by EM from samples of the linearised network's posterior (Antoran et al.
2023).
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from laplace_marglik.errors import NotConverged
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.config import Config, Sampling
from ntkmarglik.learn.distributed import in_turn
from ntkmarglik.learn.methods.base import ROUNDS, Learned, Method, Problem
from ntkmarglik.learn.methods.mode import AtMode
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.settings import warn_unused

if TYPE_CHECKING:
    from laplace_marglik import Evidence
    from laplace_marglik.posterior.sampled import ConjugateGradients, Sgd

# settings of the other solver
OTHER_SOLVER = {"cg": {"solver_steps"}, "sgd": {"solver_passes", "preconditioner_rows"}}
BATCH = 250  # inputs whose predictions are made at once


class SampledScore(AtMode):
    """Fixed hyperparameters, measured by samples: evidence, effective dimension and predictions."""

    measures_by = "samples"
    structure = "sampled"

    def __init__(self, problem: Problem):
        from laplace_marglik import GaussianPrior, SampledLaplace
        from laplace_marglik.posterior.sampled import ConjugateGradients, Sgd

        super().__init__(problem)
        sampling = problem.config.sampling
        solver: ConjugateGradients | Sgd = Sgd(
            sampling.solver_steps or None, sampling.solver_tolerance
        )
        if sampling.solver == "cg":
            solver = ConjugateGradients(
                sampling.solver_tolerance, sampling.solver_passes, sampling.preconditioner_rows
            )
        hyper = problem.config.hyperparameters
        # scaled features have precisions of their own, which say nothing about the decay of weights
        prior = (
            GaussianPrior(problem.model, hyper.prior, hyper.prior_precision)
            if sampling.g_prior
            else problem.prior
        )
        self.posterior = SampledLaplace(
            problem.model,
            problem.likelihood,
            n_data=problem.data.n_data,
            prior=prior,
            samples=sampling.samples,
            solver=solver,
            scaling="g-prior" if sampling.g_prior else "none",
            curvature=sampling.curvature,
            exclude=[pattern.strip() for pattern in sampling.exclude.split(",") if pattern.strip()],
            generator=problem.generator,
            ranks=problem.ranks,
        )
        self._fitted = False
        self._said = False  # that samples have not converged

    @classmethod
    def memory(cls, problem: Problem) -> int:
        """Samples with directions and residuals, rows of a preconditioner, two vectors besides."""
        sampling, data = problem.config.sampling, problem.data
        vectors = 3 * sampling.samples + sampling.preconditioner_rows + 2
        numbers = vectors * _n_parameters(problem)
        if sampling.curvature == "averaged":  # the outputs of samples
            numbers += sampling.samples * data.n_data * data.n_classes
        return numbers * data.x_train.element_size()

    @classmethod
    def check_memory(cls, problem: Problem, budget: float) -> None:
        needed = cls.memory(problem)
        if needed > budget:
            raise NtkMarglikError(
                f"{problem.config.sampling.samples} posterior samples of "
                f"{_n_parameters(problem):,} weights need about {needed / 1e9:.2g} GB, and "
                f"{budget / 1e9:.2g} GB may be used (--memory-budget). Use fewer --samples or "
                "--preconditioner-rows."
            )

    def baseline(self, fixed: Problem) -> Method:
        return SampledScore(fixed)

    def sample(self) -> None:
        """Samples at the present weights and precision: anew the first time, then from where they
        were.
        """
        with self._marked():
            if self._fitted:
                self.posterior.refit(self.batches())
            else:
                self.posterior.fit(self.batches())
        self._fitted = True

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """In place of a warning of each solution, one when the first is not converged.

        Every result says whether it is: in the record of the round, the summary and the table.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConverged)
            yield
        if not self.posterior.converged and not self._said:
            self._said = True
            found = self.describe()
            reached = f"residual {found['sample_residual']:.2g}, mode {found['mode_error']:.2g}"
            print(
                f"warning: the samples have not converged ({reached}; --solver-tolerance "
                f"{self.posterior.solver.tolerance:g}): give more --solver-passes (cg) or "
                "--solver-steps (sgd), or a larger --em-precision",
                file=sys.stderr,
            )

    def evidence(self) -> Evidence:
        self.sample()
        found = self.posterior.log_evidence(
            self.batches(), "weights", self.problem.config.sampling.ladder
        )
        n = self.problem.data.n_data
        self._bracket = [bound / n for bound in found.bracket]
        self._interval = None if found.interval is None else [bound / n for bound in found.interval]
        return found

    def extras(self) -> Metrics:
        """Test metrics of sampled predictions, and what the samples say about themselves."""
        import torch

        from ntkmarglik.learn.evaluate import metrics

        data = self.problem.data
        found: Metrics = self.joint()
        both = in_turn(
            lambda x: torch.cat(self.posterior.predictions(x), 1),
            data.x_test.split(BATCH),
            self.problem.ranks,
        )
        for name, p in zip(("sampled", "probit"), both.chunk(2, 1), strict=True):
            scores = metrics(p.double().clamp_min(1e-300).log(), data.y_test)
            found |= {f"{name}_test_{key}": value for key, value in scores.items()}
        return {
            **found,
            **self.describe(),
            "log_marglik_bracket": self._bracket,  # of the rule of integration alone
            # with two standard errors of sampling; None for one sample
            "log_marglik_interval": self._interval,
        }

    def joint(self) -> Metrics:
        """Log-likelihood of several test labels together, by samples and by the network, for the
        same inputs.
        """
        import torch

        from ntkmarglik.learn.evaluate import joint_log_likelihood

        data, found = self.problem.data, {}
        predictors = {
            "": lambda x: self.outputs(x).unsqueeze(0),
            "sampled_": self.posterior.sample_logits,
        }
        for name, outputs in predictors.items():
            with torch.no_grad():
                log_p = (
                    torch.cat([outputs(x) for x in data.x_test.split(BATCH)], 1)
                    .double()
                    .log_softmax(2)
                )
            own = log_p.gather(2, data.y_test.expand(len(log_p), -1).unsqueeze(2)).squeeze(2)
            generator = torch.Generator().manual_seed(self.problem.config.run.seed)
            found[f"{name}test_joint_log_likelihood"] = joint_log_likelihood(own, generator)
        return found

    def describe(self) -> Metrics:
        """Learned precisions, effective dimension and residuals."""
        diagnostics, precisions = self.posterior.diagnostics(), self.posterior.prior.precisions()
        gamma, error = diagnostics["effective_dimension"]
        return {
            "sampled_precision": {name: p.mean().item() for name, p in precisions.items()},
            "effective_dimension": gamma,
            "effective_dimension_error": error,
            "sample_residual": max(diagnostics["residuals"]),
            "sample_error": max(diagnostics["errors"]),
            "sample_steps": diagnostics["steps"],
            "mode_error": diagnostics["mode_error"],
            "samples_converged": diagnostics["converged"],
        }

    def state(self) -> dict[str, Any]:
        prior = (
            {} if self.posterior.prior is self.problem.prior else self.posterior.prior.state_dict()
        )
        return {**self.posterior.state_dict(), "fitted": self._fitted, "prior": prior}

    def restore(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self._fitted = state["fitted"]
        self.posterior.load_state_dict(state)
        if state["prior"]:
            self.posterior.prior.load_state_dict(state["prior"])


class Sampled(SampledScore):
    """Rounds of EM steps: samples and the linear model's mode give the precision of each group."""

    name = "sampled"
    label = "sampled"
    colour = "#882255"
    learns_by = "samples"

    @classmethod
    def run_name(cls, config: Config) -> str:
        return f"sampled-{config.sampling.samples}"

    @classmethod
    def uses(cls, config: Config) -> frozenset[str]:
        return ROUNDS | {setting.name for setting in fields(Sampling)}

    @classmethod
    def check(cls, config: Config) -> None:
        if config.hyperparameters.augment != "none":
            raise NtkMarglikError(
                "--method sampled learns the prior only; use --augment none, or --method ntk or "
                "kfac."
            )
        solver = config.sampling.solver
        warn_unused(config, OTHER_SOLVER[solver], f"--solver {solver}")

    def learn(self, epoch: int) -> Learned | None:
        import torch

        from laplace_marglik.schedule import is_due

        training = self.problem.config.training
        if not is_due(epoch, training.burnin, training.frequency):
            return None
        start = self.problem.config.sampling.em_precision
        if start and not self._fitted:
            with torch.no_grad():
                self.posterior.prior.log_precision.fill_(math.log(start))
        self.sample()
        steps = self.problem.config.sampling.em_steps
        start = time.perf_counter()
        for _ in range(steps):
            with self._marked():
                self.posterior.update_prior(self.batches())
        seconds = (time.perf_counter() - start) / steps
        precisions = self.problem.prior.precisions()
        metrics: Metrics = {
            "seconds_em_step": seconds,
            "prior_precision": {name: p.mean().item() for name, p in precisions.items()},
            **self.describe(),
        }
        return Learned(metrics=metrics)

    def round_seconds(self) -> float | None:
        """All passes of all samples, twice for the mode and the first solution, from one product on
        one batch.
        """
        import torch

        posterior = self.posterior
        batches = self.batches()
        sampling = self.problem.config.sampling
        system = posterior.system(batches)
        z = torch.randn(1, posterior.layout.size, generator=self.problem.generator).to(
            batches[0][0]
        )
        for _ in range(2):  # the first is a little slower
            start = time.perf_counter()
            system.add_curvature_(torch.zeros_like(z), z, next(system.whole_batches()))
            seconds = time.perf_counter() - start
        return seconds * self._batch_products() * (sampling.samples + 1) * (1 + sampling.em_steps)

    def _batch_products(self) -> int:
        """Products with the curvature of a batch for one sample, at most, but for sgd's residuals.

        Steps that only a spectrum would tell are taken for as many as passes of cg.
        """
        sampling = self.problem.config.sampling
        if sampling.solver == "sgd" and sampling.solver_steps:
            return sampling.solver_steps
        return sampling.solver_passes * len(self.batches())


def _n_parameters(problem: Problem) -> int:
    return sum(p.numel() for p in problem.model.parameters())
