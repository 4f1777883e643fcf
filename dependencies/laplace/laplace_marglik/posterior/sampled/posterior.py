"""The posterior of the linearised network by samples (Antoran et al. 2023)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from asdl_marglik import check_finite
from asdl_marglik.watch.model import finite
from laplace_marglik.errors import MarglikError
from laplace_marglik.posterior.sampled.dimension import (
    SMALL,
    EffectiveDimension,
    PriorStep,
    Space,
    mackay,
)
from laplace_marglik.posterior.sampled.ladder import LadderEvidence, bracket, integral, rungs
from laplace_marglik.posterior.sampled.mode import LinearModel
from laplace_marglik.posterior.sampled.predictive import joint_log_prob, monte_carlo
from laplace_marglik.posterior.sampled.samples import Samples
from laplace_marglik.posterior.sampled.system import Loader, System, check_derivatives


class SampledLaplace(Samples):
    """k samples z_j ~ N(0, H^-1) of the linearised network's posterior, H = J^T Lambda J + A.

    Every product with J is a forward- or reverse-mode pass over batches: no matrix is formed.
    Besides a training step, memory is for at most (3 k + 2) P numbers (k >= 5, `together` at most
    k / 5; with minibatch gradients k P / 5 more), and P more for each of the solver's `rows`.

    Args:
        model: the network; samples are around its weights.
        likelihood: "classification", "regression", a `Likelihood`, or a function log_prob(f, y).
        n_data: size N of the whole training set.
        prior: of the same model.
        samples: number k of samples.
        solver: "cg", "sgd", or a `ConjugateGradients` or `Sgd` with its settings.
        scaling: "none", or "g-prior" for features divided by the root of their curvature, so that
            the precision means the same whatever the scale of a weight; the precisions of `prior`
            are then those of the scaled weights.
        exclude: name patterns of weights that stay fixed, as those of normalisation layers may.
        hyper: name patterns of parameters that are not weights.
        curvature: Lambda at the network's "outputs", as in the Laplace approximation, or "averaged"
            over the outputs of the samples before. Where the network is sure of its training data
            Lambda almost vanishes, and samples of the former do not fit the data that the network
            fits; those of the latter do. It keeps k N C outputs.
        offset: whether the linear model is f + J (theta - w), with the network's outputs f, or
            J theta.
        together: samples in one vectorised pass; more is faster for small networks and needs the
            activations of as many.
        generator: source of the samples' noise.
        ranks: processes that share every batch; all have the same loader and hold all samples.
    """

    # --------------------------------------------------------------------------- prior and evidence

    def update_prior(self, loader: Loader, space: Space = "function") -> Tensor:
        """One EM step: a new precision of each group, then new samples and mode.

        Returns the precision [G]. Where the targets hold no signal for a group, the evidence rises
        with its precision without end; the precision then stops where more of it would be worth
        nothing, with a warning that names the group. A step that fails leaves the prior and the
        samples as they were, or, if some of the samples had moved, asks for a refit.

        Args:
            loader: all data in batches (x, y), as in `fit`.
            space: where effective dimensions are measured (see `dimension`): "function", "weight"
                or "pull"; with several groups "pull" varies least.
        """
        self._check_fit()
        with self._undone_by_failure():
            model = LinearModel(self.system(loader), self.offset)
            step = self._prior_step(model, space)
            with torch.no_grad():
                self.prior.log_precision.add_(step.change.to(self.prior.log_precision))
            if self.averaged:
                self._refit(loader)
            else:
                self._solve(self.system(loader))
        self._warn_unless_converged()
        if step.switched_off.any():
            warnings.warn(
                f"the targets hold no signal for {self._named(step.switched_off)}: their evidence "
                "rises with the prior precision without end, so that it was stopped where the "
                "group has no effect left; check the targets, exclude those weights, or let them "
                "share a group with others",
                stacklevel=2,
            )
        return self.prior.precision.detach()

    def _prior_step(self, model: LinearModel, space: Space) -> PriorStep:
        """MacKay's step; groups of small effective dimension are measured by the data's pull."""
        counts = self.layout.counts.to(self._like.device)
        gamma = self._gamma(space, counts)
        squares = model.squares(self.mode)
        pull = self._results.pull.mean(0)
        small = pull < SMALL
        if small.any():
            gamma = torch.where(small, pull, gamma)
            squares = torch.where(small, model.pulled_squares(self.mode), squares)
        precision = mackay(gamma, squares, counts)
        step = PriorStep.towards(precision, gamma, self.prior.log_precision.detach())
        unknown = ~(step.change.isfinite() & gamma.isfinite())
        if unknown.any():
            raise MarglikError(
                f"the next precision of {self._named(unknown)} is not finite; the prior and the "
                "samples are as they were: use a wider dtype, other solver settings or exclude "
                "those weights"
            )
        return step

    def _gamma(self, space: Space, counts: Tensor) -> Tensor:
        """Effective dimensions [G]; where noise carries one out of (0, P_l), another estimate."""
        estimate = self.effective_dimension(space).groups
        gamma = estimate
        for other in (self._results.weight.mean(0), self._results.pull.mean(0), estimate):
            inside = (gamma > 0) & (gamma < counts)
            gamma = torch.where(inside, gamma, other)
        return gamma

    def effective_dimension(self, space: Space = "function") -> EffectiveDimension:
        """The number of weights that the data determine, with standard errors over samples.

        Args:
            space: which of the three estimates of `dimension`: "function", "weight" or "pull".
        """
        if space not in ("function", "weight", "pull"):
            raise MarglikError(f"space must be function, weight or pull, got {space!r}")
        solved = self._results
        estimates = {"function": solved.function, "weight": solved.weight, "pull": solved.pull}
        return EffectiveDimension.of(estimates[space])

    def log_evidence(
        self, loader: Loader, at: Literal["mode", "weights"] = "mode", rungs_: int = 13
    ) -> LadderEvidence:
        """The log marginal likelihood, with its standard error over samples.

        Its `bracket` is that of the rule of integration alone, its `interval` has the sampling
        error too. With averaged curvature it is the variational bound of the linear model's
        evidence: in place of log p at the centre it has E_q log p + gamma / 2, which is the same
        where log p is quadratic.

        Args:
            loader: all data in batches (x, y), as in `fit`.
            at: log-likelihood and scatter at the linear model's "mode", or at the network's
                "weights" as in `MarginalLikelihood`.
            rungs_: number of precisions over which the log-determinant is integrated.
        """
        if at not in ("mode", "weights"):
            raise MarglikError(f"at must be mode or weights, got {at!r}")
        self._check_fit()
        system = self.system(loader)
        model = LinearModel(system, self.offset)
        theta = self.mode if at == "mode" else model.origin
        log_likelihoods = self._log_likelihoods(model, theta)
        log_likelihood = log_likelihoods.mean()
        scatter = (system.precision * model.squares(theta)).sum()
        log_dets, (low, high) = self._log_dets(system, rungs_)
        totals = log_likelihoods.cpu() - 0.5 * log_dets
        if not totals.isfinite().all():
            raise MarglikError(
                "the evidence is not finite although data, outputs and samples are; use a wider "
                "dtype or a precision nearer to 1"
            )
        error = totals.std().item() / self.samples**0.5 if self.samples > 1 else None
        log_det = log_dets.mean().to(self._like.device)
        known = (log_likelihood - 0.5 * scatter).item()
        ends = (known - 0.5 * high, known - 0.5 * low)
        return LadderEvidence(
            log_likelihood, scatter, log_det, 1.0, "approximation", error, bracket=ends
        )

    def _log_likelihoods(self, model: LinearModel, theta: Tensor) -> Tensor:
        """The data's part of the evidence [k]: the same for all samples, or averaged over them."""
        outputs = model.outputs(theta)  # first: it refuses data that are not finite
        if not self.averaged:
            return model.log_likelihood(outputs).expand(self.samples)
        gammas = self._results.function.sum(1)
        return model.log_likelihoods(outputs, self._samples) + 0.5 * gammas

    def _log_dets(self, system: System, count: int) -> tuple[Tensor, tuple[float, float]]:
        """log|I + A^-1 M| by each sample [k], on a ladder of precisions, and the mean's bracket."""
        assert self._u is not None
        # E |A^{-1/2} u|^2 = tr A^-1 M
        whitened = self.layout.dots(self._u, self._u) / system.precision
        traces = whitened.sum(1).tolist()
        trace = sum(traces) / len(traces)
        factors = rungs(trace, count)
        gammas = self._gammas_on(system, factors)
        log_dets = [integral(factors, g, t) for g, t in zip(gammas, traces, strict=True)]
        means = torch.tensor(gammas, dtype=torch.float64).mean(0).tolist()
        return torch.tensor(log_dets, dtype=torch.float64), bracket(factors, means, trace)

    def _gammas_on(self, system: System, factors: list[float]) -> list[list[float]]:
        """The effective dimension by each sample on each rung.

        On the first rung, the present precision, the samples are solved for already.
        """
        gammas: list[list[float]] = []
        for numbers in self._portions():
            portion = slice(numbers.start, numbers.stop)
            z = self._samples[portion].clone()
            rungs_of_portion = [self._results.function[portion].sum(1)]
            for factor in factors[1:]:
                solved = self._solve_portion(system.at(factor), numbers, z)
                rungs_of_portion.append(solved.function.sum(1))
            gammas += torch.stack(rungs_of_portion, 1).tolist()
        return gammas

    def diagnostics(self) -> dict[str, Any]:
        """How far the samples and the mode are from solving their equations."""
        function = self.effective_dimension("function")
        weight = self.effective_dimension("weight")
        assert self._mode is not None
        return {
            # |H z - b| / |b| of each sample, squares divided by the stiffness of their group; the
            # steepest directions make most of it
            "residuals": self._results.residuals.tolist(),
            # upper bound of |z - H^-1 b|_H / |z|_H: in posterior standard deviations
            "errors": self._results.errors.tolist(),
            "steps": self._results.steps,
            # whether residuals and mode_error are within the solver's tolerance
            "converged": self.converged,
            "mode_steps": self._mode.steps,
            "mode_error": self._mode.error,
            "effective_dimension": (function.total, function.standard_error),
            "effective_dimension_weight_space": (weight.total, weight.standard_error),
        }

    # ---------------------------------------------------------------------------------- predictions

    def sample_logits(self, x: Any) -> Tensor:
        """Outputs f + J z_j [k, n, ...] of each sample, around the network's outputs f.

        Args:
            x: inputs [n, ...].
        """
        f, pushed = self._pushed(x)
        return f + pushed

    def predict(self, x: Any, kind: Literal["mc", "probit"] = "mc") -> Tensor:
        """Class probabilities, or mean predictions [n, ...].

        Args:
            x: inputs [n, ...].
            kind: averaged over the samples ("mc"), or from their variance ("probit").
        """
        return self.predictions(x, [kind])[0]

    def predictions(
        self, x: Any, kinds: Sequence[Literal["mc", "probit"]] = ("mc", "probit")
    ) -> list[Tensor]:
        """Predictions of several kinds from one pass, each [n, ...].

        Args:
            x: inputs [n, ...].
            kinds: as in `predict`.
        """
        unknown = [kind for kind in kinds if kind not in ("mc", "probit")]
        if unknown:
            raise MarglikError(f"kind must be mc or probit, got {unknown[0]!r}")
        f, pushed = self._pushed(x)
        predictions = []
        for kind in kinds:
            if kind == "mc":
                predictions.append(monte_carlo(self.likelihood, f + pushed))
            else:
                variance = pushed.square().mean(0)
                predictions.append(self.likelihood.predict_probit(f, variance))
        return predictions

    def _pushed(self, x: Any) -> tuple[Tensor, Tensor]:
        """Outputs f [n, ...] and the deviations J z_j [k, n, ...] of each sample from them."""
        self._check_fit()
        x = self._placed(x)
        f, pushed = self.linear.jvp(x, self._samples)
        check_finite([finite(x)], _by_datum(f), self.model, lambda: [x])
        check_derivatives(_by_datum(pushed.transpose(0, 1)))
        return f, pushed

    def joint_log_prob(self, x: Any, y: Tensor) -> Tensor:
        """log p(y_1, ..., y_n | x_1, ..., x_n): how well samples predict several targets at once.

        Args:
            x: inputs [n, ...].
            y: targets, one per datum.
        """
        return joint_log_prob(self.likelihood, self.sample_logits(x), self._placed(y))

    def covariance(self, x: Any) -> Tensor:
        """Covariance of each input's outputs under the samples [n, C, C].

        Args:
            x: inputs [n, ...].
        """
        _, pushed = self._pushed(x)
        pushed = pushed.flatten(2)
        return torch.einsum("knc,knd->ncd", pushed, pushed) / self.samples


def _by_datum(values: Tensor) -> Tensor:
    """Values [n, ...] as [n, C]."""
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)
