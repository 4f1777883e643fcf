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
    Memory: at most (3 k + 2) P numbers, by count, besides a training step (k >= 5, `together` at
    most k / 5; with `rows` as many more).

    Args:
        model: the network, around whose weights the samples are.
        likelihood: "classification", "regression", a `Likelihood`, or a function log_prob(f, y).
        n_data: size N of the whole training set.
        prior: of the same model.
        samples: k.
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
        offset: whether the linear model keeps the network's outputs, f + J (theta - w), or is
            J theta.
        together: samples in one vectorised pass; more is faster for small networks and needs the
            activations of as many.
        generator: source of the samples' noise.
        ranks: processes that share every batch; all are given the same loader and hold all samples.
    """

    # --------------------------------------------------------------------------- prior and evidence

    def update_prior(self, loader: Loader, space: Space = "function") -> Tensor:
        """One EM step: the precision of each group from the samples and the mode, then both anew;
        returns it [G].

        Targets without signal for a group make its evidence rise with its precision without end;
        the precision then stops where more of it would be worth nothing, with a warning that names
        the group. A step that fails leaves the prior and the samples as they were, or, if some of
        the samples had moved, asks for a refit.

        space: where effective dimensions are measured (see `dimension`); with several groups "pull"
        varies least.
        """
        self._check_fit()
        with self._undone_by_failure():
            step = self._prior_step(LinearModel(self.system(loader), self.offset), space)
            with torch.no_grad():
                self.prior.log_precision.add_(step.change.to(self.prior.log_precision))
            self.refit(loader) if self.averaged else self._solve(self.system(loader))
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
        """MacKay's step; a group of small effective dimension is measured by what the data pull
        at.
        """
        estimate = self.effective_dimension(space).groups
        counts = self.layout.counts.to(self._like.device)
        solved, squares = self._results, model.squares(self.mode)
        weight, pull = solved.weight.mean(0), solved.pull.mean(0)
        gamma = estimate
        # noise carries an estimate out of (0, P_l) where another is good
        for other in (weight, pull):
            gamma = torch.where((gamma > 0) & (gamma < counts), gamma, other)
        gamma = torch.where((gamma > 0) & (gamma < counts), gamma, estimate)
        small = pull < SMALL
        if small.any():
            gamma = torch.where(small, pull, gamma)
            squares = torch.where(small, model.pulled_squares(self.mode), squares)
        step = PriorStep.towards(
            mackay(gamma, squares, counts), gamma, self.prior.log_precision.detach()
        )
        unknown = ~(step.change.isfinite() & gamma.isfinite())
        if unknown.any():
            raise MarglikError(
                f"the next precision of {self._named(unknown)} is not finite; the prior and the "
                "samples are as they were: use a wider dtype, other solver settings or exclude "
                "those weights"
            )
        return step

    def effective_dimension(self, space: Space = "function") -> EffectiveDimension:
        """How many weights the data determine, with standard errors over samples."""
        if space not in ("function", "weight", "pull"):
            raise MarglikError(f"space must be function, weight or pull, got {space!r}")
        solved = self._results
        return EffectiveDimension.of(
            {"function": solved.function, "weight": solved.weight, "pull": solved.pull}[space]
        )

    def log_evidence(
        self, loader: Loader, at: Literal["mode", "weights"] = "mode", rungs_: int = 13
    ) -> LadderEvidence:
        """The log marginal likelihood, its determinant integrated over a ladder of `rungs_`
        precisions.

        at: log-likelihood and scatter of the linear model's mode, or of the network's weights as in
        `MarginalLikelihood`. Standard error over samples; `bracket` is that of the rule of
        integration alone, `interval` has the sampling error too. With averaged curvature it is the
        variational bound of the linear model's evidence: in place of log p at the centre it has E_q
        log p + gamma / 2, the same where log p is quadratic.
        """
        if at not in ("mode", "weights"):
            raise MarglikError(f"at must be mode or weights, got {at!r}")
        self._check_fit()
        system, model = self.system(loader), LinearModel(self.system(loader), self.offset)
        theta = self.mode if at == "mode" else model.origin
        outputs = model.outputs(theta)  # first: it refuses data that are not finite
        log_likelihoods = model.log_likelihood(outputs).expand(self.samples)
        if self.averaged:
            log_likelihoods = model.log_likelihoods(
                outputs, self._samples
            ) + 0.5 * self._results.function.sum(1)
        log_likelihood = log_likelihoods.mean()
        scatter = (system.precision * model.squares(theta)).sum()
        each, (low, high) = self._log_dets(system, rungs_)
        known = (log_likelihood - 0.5 * scatter).item()
        totals = log_likelihoods.cpu() - 0.5 * each
        if not totals.isfinite().all():
            raise MarglikError(
                "the evidence is not finite although data, outputs and samples are; use a wider "
                "dtype or a precision nearer to 1"
            )
        error = totals.std().item() / self.samples**0.5 if self.samples > 1 else None
        log_det, ends = each.mean().to(self._like.device), (known - 0.5 * high, known - 0.5 * low)
        return LadderEvidence(log_likelihood, scatter, log_det, 1.0, "approximation", error, ends)

    def _log_dets(self, system: System, count: int) -> tuple[Tensor, tuple[float, float]]:
        """log|I + A^-1 M| by each sample [k], on a ladder of `count` precisions, and the bracket of
        their mean.
        """
        assert self._u is not None
        # E |A^{-1/2} u|^2 = tr A^-1 M
        whitened = self.layout.dots(self._u, self._u) / system.precision
        traces = whitened.sum(1).tolist()
        trace = sum(traces) / len(traces)
        factors = rungs(trace, count)
        gammas: list[list[float]] = []  # of each sample on each rung
        for group in self._groups():
            z = self._samples[group.start : group.stop].clone()
            own = [self._results.function[group.start : group.stop].sum(1)]
            own += [self._solve_group(system.at(t), group, z).function.sum(1) for t in factors[1:]]
            gammas += torch.stack(own, 1).tolist()
        means = torch.tensor(gammas, dtype=torch.float64).mean(0).tolist()
        each = torch.tensor(
            [integral(factors, g, t) for g, t in zip(gammas, traces, strict=True)],
            dtype=torch.float64,
        )
        return each, bracket(factors, means, trace)

    def diagnostics(self) -> dict[str, Any]:
        """How far the samples and the mode are from solving their equations."""
        function, weight = self.effective_dimension("function"), self.effective_dimension("weight")
        assert self._mode is not None
        return {
            # |H z - b| / |b| of each sample, over the stiffness of groups: mostly of the steepest
            # directions
            "residuals": self._results.residuals.tolist(),
            # |z - H^-1 b|_H / |z|_H at most: in posterior standard deviations
            "errors": self._results.errors.tolist(),
            "steps": self._results.steps,
            "mode_steps": self._mode.steps,
            "mode_error": self._mode.error,
            "effective_dimension": (function.total, function.standard_error),
            "effective_dimension_weight_space": (weight.total, weight.standard_error),
        }

    # ---------------------------------------------------------------------------------- predictions

    def sample_logits(self, x: Any) -> Tensor:
        """Outputs f + J z_j [k, n, ...] of each sample; their mean is the network's own."""
        f, pushed = self._pushed(x)
        return f + pushed

    def predict(self, x: Any, kind: Literal["mc", "probit"] = "mc") -> Tensor:
        """Class probabilities, or mean predictions [n, ...]: averaged over samples, or from their
        variance.
        """
        return self.predictions(x, [kind])[0]

    def predictions(
        self, x: Any, kinds: Sequence[Literal["mc", "probit"]] = ("mc", "probit")
    ) -> list[Tensor]:
        """Predictions of several kinds from one pass."""
        unknown = [kind for kind in kinds if kind not in ("mc", "probit")]
        if unknown:
            raise MarglikError(f"kind must be mc or probit, got {unknown[0]!r}")
        f, pushed = self._pushed(x)
        return [
            monte_carlo(self.likelihood, f + pushed)
            if kind == "mc"
            else self.likelihood.predict_probit(f, pushed.square().mean(0))
            for kind in kinds
        ]

    def _pushed(self, x: Any) -> tuple[Tensor, Tensor]:
        """Outputs f and the deviations J z_j of each sample from them."""
        self._check_fit()
        x = self._placed(x)
        f, pushed = self.linear.jvp(x, self._samples)
        check_finite([finite(x)], _rows(f), self.model, lambda: [x])
        check_derivatives(_rows(pushed.transpose(0, 1)))
        return f, pushed

    def joint_log_prob(self, x: Any, y: Tensor) -> Tensor:
        """log p of all targets together, given all inputs: how well samples agree about several
        inputs at once.
        """
        return joint_log_prob(self.likelihood, self.sample_logits(x), self._placed(y))

    def covariance(self, x: Any) -> Tensor:
        """Covariance of each input's outputs under the samples [n, C, C]."""
        pushed = self._pushed(x)[1].flatten(2)
        return torch.einsum("knc,knd->ncd", pushed, pushed) / self.samples


def _rows(values: Tensor) -> Tensor:
    """[n, ...] as [n, C]."""
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)
