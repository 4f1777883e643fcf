"""The posterior of the linearised network by samples (Antoran et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from asdl_marglik import Ranks, check_weights, map_inputs, trainable
from torch import Tensor, nn

from ..errors import MarglikError
from ..likelihood import Likelihood, likelihood_for
from ..prior import GaussianPrior
from .dimension import EffectiveDimension, Space, mackay
from .ladder import LadderEvidence, bracket, integral, rungs
from .layout import Layout, included
from .linearised import Linearised
from .mode import LinearModel, Mode, descend, newton
from .precondition import RowPreconditioner, root_rows
from .predictive import joint_log_prob, monte_carlo, probit
from .solve import (
    RATE,
    ConjugateGradients,
    Product,
    Solver,
    conjugate_gradients,
    nesterov,
    solver_for,
)
from .system import Loader, System

LEAST_CURVATURE = 1e-6  # of a feature, for its scale: a weight that the data do not see is not scaled up without end
AVERAGED_FITS = 3  # of a first fit with averaged curvature: each averages over the samples of the one before
LARGEST_STEP = math.log(1000)  # of a log precision: weights at their prior mean would have an infinite one


class SampledLaplace:
    """k samples z_j ~ N(0, H^-1) of the linearised network's posterior around its weights, H = J^T Lambda J + A.

    Every product with J is a forward- or reverse-mode pass over batches: no matrix is formed. Memory: at most
    (3 k + 2) P numbers, by count, besides a training step (k >= 5, `together` <= k / 5; with `rows` as many more).

    likelihood: "classification", "regression", a `Likelihood` or a function log_prob(f, y). samples: k. solver: "cg",
    "sgd", or a `ConjugateGradients` or `Sgd` with its settings. scaling: "none", or "g-prior" for features divided by
    the root of their curvature, so that the precision means the same whatever the scale of a weight; the precisions of
    `prior` are then those of the scaled weights. exclude: name patterns of weights that stay fixed, as those of
    normalisation layers may. offset: whether the linear model keeps the network's outputs, f + J (theta - w), or is
    J theta. curvature: Lambda at the network's "outputs", as in the Laplace approximation, or "averaged" over the
    outputs of the samples before. Where the network is sure of its training data Lambda almost vanishes there, and
    samples of the former do not fit the data that the network fits; those of the latter do. It keeps k N C outputs.
    together: samples in one vectorised pass; more is faster for small networks and needs the activations of as many.
    ranks: processes that share every batch; all are given the same loader and hold all samples.
    """

    def __init__(
        self, model: nn.Module, likelihood: str | Likelihood | Callable[[Tensor, Tensor], Tensor], *, n_data: int,
        prior: GaussianPrior, samples: int = 8, solver: str | Solver = "cg",
        scaling: Literal["none", "g-prior"] = "none", exclude: Iterable[str] = (), hyper: Iterable[str] = (),
        curvature: Literal["outputs", "averaged"] = "outputs", offset: bool = True, together: int = 1,
        generator: torch.Generator | None = None, ranks: Ranks | None = None,
    ):  # fmt: skip
        for name, number in (("n_data", n_data), ("samples", samples), ("together", together)):
            if number < 1:
                raise MarglikError(f"{name} must be at least 1, got {number}")
        if scaling not in ("none", "g-prior"):
            raise MarglikError(f"scaling must be none or g-prior, got {scaling!r}")
        if curvature not in ("outputs", "averaged"):
            raise MarglikError(f"curvature must be outputs or averaged, got {curvature!r}")
        self.model, self.likelihood, self.prior = model, likelihood_for(likelihood), prior
        self.n_data, self.samples, self.solver, self.scaling, self.offset = (
            n_data, samples, solver_for(solver), scaling, offset
        )  # fmt: skip
        self.averaged = curvature == "averaged"
        self.generator = generator or torch.Generator().manual_seed(torch.initial_seed())
        self.ranks = ranks
        weights = included(trainable(model, hyper), list(exclude))
        prior.deviations(weights)  # refuses a prior for another model
        self.layout = Layout(weights, prior.groups, prior.log_precision.numel())
        self.linear = Linearised(model, self.layout, together)
        self._like = next(iter(weights.values())).detach().flatten()[:1]
        self._z: Tensor | None = None
        self._mode: Mode | None = None
        self._deviations: dict[int, Tensor] | None = None
        self._seed = 0

    # ---------------------------------------------------------------------------------------------------- inference

    def fit(self, loader: Loader) -> SampledLaplace:
        """Draw new noise and solve for the samples and for the linear model's mode at the network's present weights.

        loader: all data in batches; with "cg", noise in the data or averaged curvature the same batches every time
        (shuffle=False).
        """
        self._seed = int(torch.randint(2**40, (), generator=self.generator))
        self._z = self._mode = self._deviations = None
        for _ in range(AVERAGED_FITS if self.averaged else 1):
            self.refit(loader)
        return self

    def refit(self, loader: Loader) -> SampledLaplace:
        """The same with the noise of before, from where the samples were: for weights or a prior that have moved."""
        check_weights(self.model)
        if self.averaged and self._z is not None:
            self._deviations = self.system(loader).pushed(self._z)
        old = self.linear.scale
        self.linear.scale = None
        system = self.system(loader)
        if self.scaling == "g-prior":
            diagonal = system.diagonal(self._like)
            self.linear.scale = diagonal.clamp_min_(LEAST_CURVATURE).rsqrt_()
        self._u = system.data_noise(self._like)
        rows = self.solver.rows if isinstance(self.solver, ConjugateGradients) else 0
        self._rows = root_rows(system, rows, self._like) if rows else None
        if self._z is None:
            self._z = system.prior_noise(range(self.samples), self._like)
            self.layout.divided_(self._z, system.precision)
        elif old is not None and self.linear.scale is not None:
            self._z.mul_(old / self.linear.scale)
            if self._mode is not None:
                self._mode = replace(self._mode, theta=self._mode.theta * old / self.linear.scale)
        self._versions = self._present_versions()
        self._solve(system)
        return self

    def update_prior(self, loader: Loader, space: Space = "function") -> Tensor:
        """One EM step: the precision of each group from the samples and the mode, then both anew; returns it [G]."""
        gamma, counts = self.effective_dimension(space), self.layout.counts.to(self._like.device)
        new = mackay(gamma.groups, LinearModel(self.system(loader), self.offset).squares(self.mode), counts)
        with torch.no_grad():
            known = self.prior.log_precision
            step = (new.log().to(known.dtype) - known).clamp(-LARGEST_STEP, LARGEST_STEP)
            known.add_(torch.where(counts > 0, step, 0.0))
        self.refit(loader) if self.averaged else self._solve(self.system(loader))
        return self.prior.precision.detach()

    def system(self, loader: Loader) -> System:
        """The linear system of the samples, at the present weights and precision."""
        return System(
            self.linear, self.likelihood, self.prior, loader, self.n_data, self.samples, self._seed,
            deviations=self._deviations, ranks=self.ranks,
        )  # fmt: skip

    def _solve(self, system: System) -> None:
        """Samples, their effective dimensions and residuals, and the mode, at the present precision."""
        z = self._samples
        found = [self._solve_group(system, group, z[group.start : group.stop]) for group in self._groups()]
        functions, weights, residuals, errors, steps = zip(*found, strict=True)
        self._function, self._weight, self._steps = torch.cat(functions), torch.cat(weights), max(steps)
        self._residuals, self._errors = torch.cat(residuals), torch.cat(errors)
        model = LinearModel(system, self.offset)
        start = model.origin if self._mode is None else self._mode.theta
        if isinstance(self.solver, ConjugateGradients):
            self._mode = newton(model, start, self.solver, self._preconditioner(system))
        else:
            self._mode = descend(model, start, self.solver)

    def _groups(self) -> list[range]:
        """Samples that are solved for at once: a fifth of them, which keeps the solver's vectors below k in number."""
        size = min(self.samples, max(self.linear.together, self.samples // 5, 1))
        return [range(s, min(s + size, self.samples)) for s in range(0, self.samples, size)]

    def _preconditioner(self, system: System) -> Product | None:
        return None if self._rows is None else RowPreconditioner(system, self._rows)

    def _solve_group(self, system: System, group: range, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Move z [g, P] to the solutions; gamma in function and in weight space [g, G], residuals, errors [g], steps.

        With r = H z - b the error is at most |r|_{A^-1} / |z|_H, since |H^-1 r|_H <= |r|_{A^-1}.
        """
        solver, data = self.solver, self._u[group.start : group.stop]
        noise = system.prior_noise(group, self._like)
        if isinstance(solver, ConjugateGradients):
            steps = conjugate_gradients(system.product, noise.add_(data), z, solver, self._preconditioner(system))
        else:
            target = noise.add_(data) if solver.noise_in == "prior" else noise
            bound = solver.clip * data.norm(dim=1, keepdim=True).double()
            steps = nesterov(
                lambda v, batch: system.gradient(v, batch, group, target, solver.noise_in),
                system.steps, z, solver, solver.rate or RATE / system.steepest(self._like), bound,
            )  # fmt: skip
        image = system.curvature(z)
        function, decay = self.layout.dots(z, image), system.precision * self.layout.dots(z, z)
        target = system.prior_noise(group, self._like).add_(data)
        residual = self.layout.add_(image, z, system.precision).sub_(target)
        error = (self.layout.dots(residual, residual) / system.precision).sum(1) / (function + decay).sum(1)
        weight = self.layout.counts.to(z.device) - decay
        return function, weight, residual.norm(dim=1) / target.norm(dim=1), error.sqrt(), steps

    # ------------------------------------------------------------------------------------------------------ results

    @property
    def _samples(self) -> Tensor:
        if self._z is None:
            raise MarglikError("there are no samples yet; call fit(loader) first")
        return self._z

    @property
    def weight_samples(self) -> Tensor:
        """Samples of the weights' deviation from the mean [k, P], in the order of the network's parameters."""
        return self._samples if self.linear.scale is None else self._samples * self.linear.scale

    @property
    def mode(self) -> Tensor:
        """The linear model's own mode [P], divided by the feature scales where there are any."""
        if self._mode is None:
            raise MarglikError("there is no mode yet; call fit(loader) first")
        return self._mode.theta

    def effective_dimension(self, space: Space = "function") -> EffectiveDimension:
        """How many weights the data determine, with standard errors over samples."""
        if space not in ("function", "weight"):
            raise MarglikError(f"space must be function or weight, got {space!r}")
        _ = self._samples
        return EffectiveDimension.of(self._function if space == "function" else self._weight)

    def log_evidence(self, loader: Loader, at: Literal["mode", "weights"] = "mode", rungs_: int = 13) -> LadderEvidence:
        """The log marginal likelihood, its determinant integrated over a ladder of `rungs_` precisions.

        at: log-likelihood and scatter of the linear model's mode, or of the network's weights as in
        `MarginalLikelihood`. Standard error over samples; the bracket is that of the rule of integration. With averaged
        curvature it is the variational bound of the linear model's evidence: in place of log p at the centre it has
        E_q log p + gamma / 2, the same number where log p is quadratic.
        """
        self._check_weights_of_fit()
        system, model = self.system(loader), LinearModel(self.system(loader), self.offset)
        whitened = self.layout.dots(self._u, self._u) / system.precision  # E |A^{-1/2} u|^2 = tr A^-1 M
        traces = whitened.sum(1).tolist()
        trace = sum(traces) / len(traces)
        factors = rungs(trace, rungs_)
        gammas: list[list[float]] = []  # of each sample on each rung
        for group in self._groups():
            z = self._samples[group.start : group.stop].clone()
            own = [self._function[group.start : group.stop].sum(1)]
            own += [self._solve_group(system.at(t), group, z)[0].sum(1) for t in factors[1:]]
            gammas += torch.stack(own, 1).tolist()
        means = torch.tensor(gammas, dtype=torch.float64).mean(0).tolist()
        each = torch.tensor([integral(factors, g, t) for g, t in zip(gammas, traces, strict=True)], dtype=torch.float64)
        theta = self.mode if at == "mode" else model.origin
        outputs = model.outputs(theta)
        log_likelihoods = model.log_likelihood(outputs).expand(self.samples)
        if self.averaged:
            log_likelihoods = model.log_likelihoods(outputs, self._samples) + 0.5 * self._function.sum(1)
        log_likelihood = log_likelihoods.mean()
        scatter, log_det = (system.precision * model.squares(theta)).sum(), each.mean().to(self._like.device)
        known = (log_likelihood - 0.5 * scatter).item()
        low, high = bracket(factors, means, trace)
        totals = log_likelihoods.cpu() - 0.5 * each
        error = totals.std().item() / self.samples**0.5 if self.samples > 1 else None
        return LadderEvidence(
            log_likelihood, scatter, log_det, 1.0, "approximation", error, (known - 0.5 * high, known - 0.5 * low)
        )

    def diagnostics(self) -> dict[str, Any]:
        """How far the samples and the mode are from solving their equations."""
        function, weight = self.effective_dimension("function"), self.effective_dimension("weight")
        assert self._mode is not None
        return {
            "residuals": self._residuals.tolist(),  # |H z - b| / |b| of each sample: mostly of the steepest directions
            "errors": self._errors.tolist(),  # |z - H^-1 b|_H / |z|_H at most: in posterior standard deviations
            "steps": self._steps,
            "mode_steps": self._mode.steps,
            "mode_error": self._mode.error,
            "effective_dimension": (function.total, function.standard_error),
            "effective_dimension_weight_space": (weight.total, weight.standard_error),
        }

    # -------------------------------------------------------------------------------------------------- predictions

    def sample_logits(self, x: Any) -> Tensor:
        """Outputs f + J z_j [k, n, ...] of each sample; their mean is the network's own."""
        f, pushed = self._pushed(x)
        return f + pushed

    def predict(self, x: Any, kind: Literal["mc", "probit"] = "mc") -> Tensor:
        """Class probabilities, or mean predictions [n, ...]: averaged over samples, or from their variance."""
        return self.predictions(x, [kind])[0]

    def predictions(self, x: Any, kinds: Sequence[Literal["mc", "probit"]] = ("mc", "probit")) -> list[Tensor]:
        """Predictions of several kinds from one pass."""
        unknown = [kind for kind in kinds if kind not in ("mc", "probit")]
        if unknown:
            raise MarglikError(f"kind must be mc or probit, got {unknown[0]!r}")
        f, pushed = self._pushed(x)
        return [
            monte_carlo(self.likelihood, f + pushed)
            if kind == "mc"
            else probit(self.likelihood, f, pushed.square().mean(0))
            for kind in kinds
        ]

    def _pushed(self, x: Any) -> tuple[Tensor, Tensor]:
        """Outputs f and the deviations J z_j of each sample from them."""
        self._check_weights_of_fit()
        return self.linear.jvp(self._placed(x), self._samples)

    def joint_log_prob(self, x: Any, y: Tensor) -> Tensor:
        """log p of all targets together, given all inputs: how well samples agree about several inputs at once."""
        return joint_log_prob(self.likelihood, self.sample_logits(x), self._placed(y))

    def covariance(self, x: Any) -> Tensor:
        """Covariance of each input's outputs under the samples [n, C, C]."""
        pushed = self._pushed(x)[1].flatten(2)
        return torch.einsum("knc,knd->ncd", pushed, pushed) / self.samples

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What `refit` starts from: the samples, the mode, the scales and the seed of their noise."""
        mode = None if self._mode is None else self._mode.theta
        return {"samples": self._z, "mode": mode, "scale": self.linear.scale, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a stored state; `refit(loader)` completes it."""
        z, mode, device = state["samples"], state["mode"], self._like.device
        if z is not None and z.shape != (self.samples, self.layout.size):
            raise MarglikError(
                f"expected {self.samples} samples of {self.layout.size} weights, got a state of {tuple(z.shape)}; "
                "build the posterior for the same model, samples and exclude"
            )
        self._z = None if z is None else z.to(device)
        self._mode = None if mode is None else Mode(mode.to(device), 0, float("inf"))
        self.linear.scale = None if state["scale"] is None else state["scale"].to(device)
        self._seed, self._versions = state["seed"], []

    def _present_versions(self) -> list[int]:
        return [p._version for p in self.model.parameters()]

    def _check_weights_of_fit(self) -> None:
        _ = self._samples
        if self._versions != self._present_versions():
            raise MarglikError("the network's weights have changed since the samples were drawn; call refit(loader)")

    def _placed(self, x: Any) -> Any:
        return map_inputs(lambda t: t.to(self._like.device), x)
