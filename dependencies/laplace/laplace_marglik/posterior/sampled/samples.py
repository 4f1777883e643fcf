"""Samples of the linearised network's posterior: their solution, and checks that it is current."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from asdl_marglik import Ranks, check_weights, checksum, hyperparameters_in, map_inputs, trainable
from laplace_marglik.checks import one_of, positive_integer
from laplace_marglik.errors import MarglikError, NotConverged
from laplace_marglik.likelihood import Likelihood, likelihood_for
from laplace_marglik.posterior.sampled.layout import Layout, included
from laplace_marglik.posterior.sampled.linearised import Linearised
from laplace_marglik.posterior.sampled.mode import LinearModel, Mode, newton, settled
from laplace_marglik.posterior.sampled.precondition import RowPreconditioner, root_rows
from laplace_marglik.posterior.sampled.rounds import (
    Plan,
    Residual,
    Sgd,
    Solver,
    descend,
    solver_for,
)
from laplace_marglik.posterior.sampled.solve import (
    ConjugateGradients,
    Product,
    Solved,
    conjugate_gradients,
    norms,
)
from laplace_marglik.posterior.sampled.system import Loader, Portion, System
from laplace_marglik.prior import GaussianPrior

# of a feature, for its scale: limits the scale of a weight that the data do not see to 1000
LEAST_CURVATURE = 1e-6
# solves in a first fit with averaged curvature: each averages over the samples of the one before
AVERAGED_FITS = 3
# of the samples, solved one after the other: the solver's vectors are then fewer than the samples
PORTIONS = 5
NAMED = 5  # groups in a message, at most
# of the tolerance: how far residuals may be above it that conjugate gradients know by recurrence
RECURRENCE = 1.2
Self = TypeVar("Self", bound="Samples")


class Samples:
    """k solutions z_j of H z = b; the arguments are those of `SampledLaplace`, which uses them."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | Callable[[Tensor, Tensor], Tensor],
        *,
        n_data: int,
        prior: GaussianPrior,
        samples: int = 8,
        solver: str | Solver = "cg",
        scaling: Literal["none", "g-prior"] = "none",
        exclude: Iterable[str] = (),
        hyper: Iterable[str] = (),
        curvature: Literal["outputs", "averaged"] = "outputs",
        offset: bool = True,
        together: int = 1,
        generator: torch.Generator | None = None,
        ranks: Ranks | None = None,
    ):
        together = positive_integer("together", together)
        self.model = model
        self.likelihood = likelihood_for(likelihood)
        self.prior = prior
        self.n_data = positive_integer("n_data", n_data)
        self.samples = positive_integer("samples", samples)
        self.solver = solver_for(solver)
        self.scaling = one_of("scaling", scaling, ("none", "g-prior"))
        self.offset = offset
        self.averaged = one_of("curvature", curvature, ("outputs", "averaged")) == "averaged"
        self.generator = generator or torch.Generator().manual_seed(torch.initial_seed())
        self.ranks = ranks
        weights = included(trainable(model, hyper), list(exclude))
        prior.check(weights, hyperparameters_in(model, hyper))
        prior.check_independent()
        self.layout = Layout(weights, prior.groups, prior.log_precision.numel())
        self.linear = Linearised(model, self.layout, together)
        self._like = next(iter(weights.values())).detach().flatten()[:1]
        self._forget()

    def _forget(self) -> None:
        """No samples yet."""
        self._z: Tensor | None = None
        self._mode: Mode | None = None
        self._deviations: dict[int, Tensor] | None = None  # J z of the samples before, by batch
        self._u: Tensor | None = None  # the data's noise
        self._curvature_per_weight = 0.0  # tr(M) / P
        self._rows: Tensor | None = None  # V of the preconditioner
        self._solved: Solved | None = None
        # of all that the samples depend on, when they were solved for
        self._fingerprint: Tensor | None = None
        self._seed = 0

    # ------------------------------------------------------------------------------------ inference

    def fit(self: Self, loader: Loader) -> Self:
        """Draw new noise, and solve for samples and mode at the network's present weights.

        Args:
            loader: all data in batches (x, y); with "cg", noise in the data or averaged curvature
                the same batches every time (shuffle=False).
        """
        self._seed = int(torch.randint(2**40, (), generator=self.generator))
        self._z = self._mode = self._deviations = None
        for _ in range(AVERAGED_FITS if self.averaged else 1):
            self._refit(loader)
        self._warn_unless_converged()
        return self

    def refit(self: Self, loader: Loader) -> Self:
        """Solve again with the same noise, from the last samples: the weights or the prior moved.

        Args:
            loader: as in `fit`.
        """
        self._refit(loader)
        self._warn_unless_converged()
        return self

    def _refit(self, loader: Loader) -> None:
        check_weights(self.model)
        with self._undone_by_failure():
            if self.averaged and self._z is not None:
                self._deviations = self.system(loader).pushed(self._z)
            old_scale = self.linear.scale
            self._prepare(loader)
            system = self.system(loader)
            rows = self.solver.rows
            self._rows = root_rows(system, rows, self._like) if rows else None
            rescale = None
            if self._z is None:
                self._z = system.prior_noise(range(self.samples), self._like)
                self.layout.divided_(self._z, system.precision)
            elif old_scale is not None and self.linear.scale is not None:
                rescale = old_scale / self.linear.scale
                if self._mode is not None:
                    self._mode = replace(self._mode, theta=self._mode.theta * rescale)
            self._solve(system, rescale)

    def _prepare(self, loader: Loader) -> None:
        """The feature scales and the data's noise u at the present weights."""
        self.linear.scale = None
        system = self.system(loader)
        if self.scaling == "g-prior":
            diagonal = system.diagonal(self._like)
            self.linear.scale = diagonal.clamp_min_(LEAST_CURVATURE).rsqrt_()
        self._u = system.data_noise(self._like)
        self._curvature_per_weight = self._u.square().mean().item()  # E |u|^2 = tr M

    def _named(self, chosen: Tensor) -> str:
        """Groups of the prior in words, by a mask [G]."""
        mask = chosen.tolist()
        names = [name for name, is_in in zip(self.prior.group_names, mask, strict=True) if is_in]
        # groups of single elements have the name of their weight
        names = list(dict.fromkeys(names))
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        plural = "s" if len(names) > 1 else ""
        shown = ", ".join(map(repr, names[:NAMED]))
        return f"the prior's group{plural} {shown}{more}"

    @contextmanager
    def _undone_by_failure(self) -> Iterator[None]:
        """Restore everything if the block fails; samples that have moved must be fitted again."""
        names = (
            "_z",
            "_mode",
            "_u",
            "_rows",
            "_curvature_per_weight",
            "_deviations",
            "_solved",
            "_fingerprint",
        )
        before = {name: getattr(self, name) for name in names}
        scale = self.linear.scale
        log_precision = self.prior.log_precision.detach().clone()
        try:
            yield
        except BaseException:
            moved = before["_z"] is not None and self._fingerprint is None
            for name, value in before.items():
                setattr(self, name, value)
            self._fingerprint = None if moved else before["_fingerprint"]
            self.linear.scale = scale
            with torch.no_grad():
                self.prior.log_precision.copy_(log_precision)
            raise

    def system(self, loader: Loader) -> System:
        """The linear system of the samples, at the present weights and precision.

        Args:
            loader: all data in batches (x, y), as in `fit`.
        """
        return System(
            self.linear,
            self.likelihood,
            self.prior,
            loader,
            self.n_data,
            self.samples,
            self._seed,
            curvature_per_weight=self._curvature_per_weight,
            deviations=self._deviations,
            ranks=self.ranks,
        )

    def _solve(self, system: System, rescale: Tensor | None = None) -> None:
        """Solve for the mode, then for the samples, at the present precision.

        The stored samples move last, and each only when the new one is known to be finite.

        Args:
            system: whose solutions they are.
            rescale: factors [P] of the samples before they start.
        """
        unknown = ~system.precision.isfinite()
        if unknown.any():
            raise MarglikError(
                f"the precision of {self._named(unknown)} is not finite; set the prior's "
                "log_precision to a finite value"
            )
        mode = self._solve_mode(system)
        z = self._samples
        parts = []
        for numbers in self._portions():
            portion = slice(numbers.start, numbers.stop)
            solution = z[portion].clone()
            if rescale is not None:
                solution.mul_(rescale)
            parts.append(self._solve_portion(system, numbers, solution))
            self._fingerprint = None
            z[portion] = solution
        self._mode = mode
        self._solved = Solved.all(parts)
        self._fingerprint = self._present()

    def _solve_mode(self, system: System) -> Mode:
        model = LinearModel(system, self.offset)
        start = model.origin if self._mode is None else self._mode.theta
        if isinstance(self.solver, ConjugateGradients):
            mode = newton(model, start, self.solver, self._preconditioner(system))
        else:
            mode = settled(model, start, self.solver)
        self._check_solution(mode.theta.unsqueeze(0), "mode")
        return mode

    def _check_solution(self, vectors: Tensor, what: str) -> None:
        """Raise an error that names a group with entries in vectors [k, P] that are not finite."""
        sizes = self.layout.dots(vectors, vectors).sum(0)
        if not sizes.isfinite().all():
            raise MarglikError(
                f"the {what} became infinite or NaN in {self._named(~sizes.isfinite())}; what was "
                "known before is kept: use a wider dtype, a precision nearer to 1 or other "
                "solver settings"
            )

    def _portions(self) -> list[range]:
        """The numbers of samples that are solved for together."""
        size = max(self.linear.together, self.samples // PORTIONS, 1)
        starts = range(0, self.samples, size)
        return [range(start, min(start + size, self.samples)) for start in starts]

    def _preconditioner(self, system: System) -> Product | None:
        """By root rows, if the solver has any; by stiffness, if precisions differ; or none."""
        if self._rows is not None:
            return RowPreconditioner(system, self._rows)
        return None if (system.stiffness == 1).all() else system.whitened

    def _solve_portion(self, system: System, numbers: range, z: Tensor) -> Solved:
        """Move z [g, P] to the solutions with these numbers, and measure them.

        With r = H z - b the error is at most |r|_{A^-1} / |z|_H, since |H^-1 r|_H <= |r|_{A^-1}.
        """
        assert self._u is not None
        u = self._u[numbers.start : numbers.stop]
        steps = self._move(system, numbers, z, u)
        self._check_solution(z, "samples")
        image = system.curvature(z)  # M z
        function = self.layout.dots(z, image)
        decay = system.precision * self.layout.dots(z, z)
        weight = self.layout.counts.to(z.device) - decay
        pull = self._weighted_squares(u - image, system)
        target = system.prior_noise(numbers, self._like).add_(u)
        residual = self.layout.add_(image, z, system.precision).sub_(target)
        squared_error = self._weighted_squares(residual, system).sum(1)
        squared_length = (function + decay).sum(1)  # |z|_H^2
        error = (squared_error / squared_length).sqrt()
        relative = (system.norm(residual) / system.norm(target)).squeeze(1)
        return Solved(function, weight, pull, relative, error, steps)

    def _weighted_squares(self, vectors: Tensor, system: System) -> Tensor:
        """|v|^2_{A^-1} of each group [k, G] for vectors v [k, P]."""
        return self.layout.dots(vectors, vectors) / system.precision

    def _move(self, system: System, numbers: range, z: Tensor, u: Tensor) -> int:
        """Move z [g, P] to the solutions with these numbers; returns the solver's steps."""
        solver = self.solver
        if isinstance(solver, ConjugateGradients):
            target = system.prior_noise(numbers, self._like).add_(u)
            precondition = self._preconditioner(system)
            return conjugate_gradients(system.product, target, z, solver, precondition, system.norm)
        plan = Plan.of(solver, system.steepest(self._like), system.flattest, system.n_batches)
        residual = partial(self._residual, system, numbers, u)
        first = residual
        if solver.noise_in == "data":
            first = partial(self._residual_by_data, system, numbers, u)
        return descend(residual, system.steps, z, solver, plan, first).steps

    def _residual(self, system: System, numbers: range, u: Tensor, z: Tensor) -> Residual:
        """How far z [g, P] is from the solutions with these numbers."""
        b = system.prior_noise(numbers, self._like).add_(u)  # anew: it is not needed in a round
        r = system.product(z).sub_(b)
        relative = (system.norm(r) / system.norm(b)).max().item()
        objectives = 0.5 * self.layout.dots(z, r - b).sum(1)  # z . H z / 2 - z . b
        target = r.neg()

        def gradient(d: Tensor, batch: Portion) -> Tensor:
            return system.whitened_(system.gradient(d, batch, numbers, target, "prior"))

        return Residual(gradient, norms(system.whitened_(r)), relative, objectives)

    def _residual_by_data(self, system: System, numbers: range, u: Tensor, z: Tensor) -> Residual:
        """The same with gradients of L, whose noise does not vanish with the correction."""
        start = z.clone()
        noise = system.prior_noise(numbers, self._like)

        def gradient(d: Tensor, batch: Portion) -> Tensor:
            return system.whitened_(system.gradient(start + d, batch, numbers, noise, "data"))

        return self._residual(system, numbers, u, z)._replace(gradient=gradient)

    # -------------------------------------------------------------------------------------- results

    @property
    def _samples(self) -> Tensor:
        """z [k, P], in the coordinates of the system."""
        self._check_drawn()
        assert self._z is not None
        return self._z

    @property
    def _results(self) -> Solved:
        """Effective dimensions and residuals of the samples."""
        self._check_solved()
        assert self._solved is not None
        return self._solved

    def _check_drawn(self) -> None:
        if self._z is None:
            raise MarglikError("there are no samples yet; call fit(loader) first")

    def _check_solved(self) -> None:
        self._check_drawn()
        if self._solved is None:
            raise MarglikError("the samples of a stored state are not complete; call refit(loader)")

    @property
    def converged(self) -> bool:
        """Whether samples and mode solve their equations to the solver's tolerance."""
        assert self._mode is not None
        error = max(self._results.residuals.max().item(), self._mode.error)
        return error <= RECURRENCE * self.solver.tolerance

    def _warn_unless_converged(self) -> None:
        if self.converged:
            return
        assert self._mode is not None
        more = "ConjugateGradients more max_iterations"
        if isinstance(self.solver, Sgd):
            more = "Sgd more steps or use solver='cg'"
        warnings.warn(
            f"the samples have not converged: after {self._results.steps} steps the largest "
            f"residual is {self._results.residuals.max().item():.2g} and the error of the mode "
            f"{self._mode.error:.2g}, above the tolerance {self.solver.tolerance:g}, so that "
            f"effective dimension, precision and predictions are off; give {more}, or start from "
            "a larger prior precision",
            NotConverged,
            stacklevel=3,
        )

    @property
    def weight_samples(self) -> Tensor:
        """Samples of w minus its posterior mean [k, P], in the order of the model's parameters."""
        return self._samples if self.linear.scale is None else self._samples * self.linear.scale

    @property
    def mode(self) -> Tensor:
        """The linear model's mode [P], divided by the feature scales where there are any."""
        if self._mode is None:
            raise MarglikError("there is no mode yet; call fit(loader) first")
        return self._mode.theta

    # ---------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The samples, their mode, feature scales and seed: what `refit` starts from."""
        mode = None if self._mode is None else self._mode.theta
        return {"samples": self._z, "mode": mode, "scale": self.linear.scale, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state; `refit(loader)` completes it.

        Args:
            state: from `state_dict`.
        """
        z = state["samples"]
        mode = state["mode"]
        device = self._like.device
        if z is not None and z.shape != (self.samples, self.layout.size):
            raise MarglikError(
                f"expected {self.samples} samples of {self.layout.size} weights, got a state of "
                f"{tuple(z.shape)}; build the posterior for the same model, samples and exclude"
            )
        self._z = None if z is None else z.to(device)
        self._mode = None if mode is None else Mode(mode.to(device), 0, float("inf"))
        self.linear.scale = None if state["scale"] is None else state["scale"].to(device)
        self._seed = state["seed"]
        self._fingerprint = None
        self._solved = None

    def _present(self) -> Tensor:
        """A fingerprint of everything that the samples depend on besides the data."""
        return checksum(p for module in self._modules() for p in module.parameters())

    def _modules(self) -> tuple[nn.Module, ...]:
        return self.model, self.likelihood, self.prior

    def _check_fit(self) -> None:
        """Raise an error that names what has changed since the samples were solved for."""
        self._check_solved()
        known = self._fingerprint
        if known is None:
            raise MarglikError(
                "the samples do not belong to the present weights and prior; call refit(loader)"
            )
        words = ("network's weights", "likelihood's parameters", "prior's precisions")
        present = self._present()
        counts = [sum(1 for _ in module.parameters()) for module in self._modules()]
        if len(known) != len(present):
            raise MarglikError(
                "the network has other parameters than when the samples were drawn; call "
                "refit(loader)"
            )
        for word, now, then in zip(words, present.split(counts), known.split(counts), strict=True):
            if not torch.equal(now, then):
                raise MarglikError(
                    f"the {word} have changed since the samples were drawn; call refit(loader)"
                )

    def _placed(self, x: Any) -> Any:
        """Inputs on the weights' device."""
        return map_inputs(lambda t: t.to(self._like.device), x)
