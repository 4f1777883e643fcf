"""The mode of the linear model: its own, for the network's weights need not be one.

With h(theta) = f + J (theta - w) (or J theta, without the offset) the convex loss

    loss(theta) = - sum_i log p(y_i | h_i(theta)) / tau + 1/2 |theta - mu|^2_A

is minimised by Newton steps whose systems are solved by conjugate gradients, or by minibatch
gradients. Outputs are linear in theta, so that a line search needs no further pass over the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_marglik.posterior.sampled.solve import (
    RATE,
    ConjugateGradients,
    Sgd,
    conjugate_gradients,
    largest_eigenvalue,
    nesterov,
)
from laplace_marglik.posterior.sampled.system import Portion, Seen, System

INEXACT = 0.1  # relative residual of a Newton system: its error is mended by the next step


@dataclass
class LinearModel:
    """The convex loss of a system's data; theta and mu are in the system's coordinates, weights
    divided by s.
    """

    system: System
    offset: bool

    def __post_init__(self) -> None:
        layout, prior = self.system.layout, self.system.prior
        weights = {name: w.detach() for name, w in self.system.linear.model.named_parameters()}
        self.origin = self._scaled(layout.flat(weights))
        means = {name: prior.mean_of(name) for name in layout.pieces}
        self.mean = torch.zeros(()).to(self.origin)  # mostly: no vector is kept for it
        if any(isinstance(mean, Tensor) or mean != 0 for mean in means.values()):
            self.mean = self._scaled(
                layout.flat({name: _filled(means[name], weights[name]) for name in means})
            )

    def _scaled(self, vector: Tensor) -> Tensor:
        scale = self.system.linear.scale
        return vector if scale is None else vector / scale

    def squares(self, theta: Tensor) -> Tensor:
        """|theta - mu|^2 of each group [G]."""
        deviation = (theta - self.mean).unsqueeze(0)
        return self.system.layout.dots(deviation, deviation)[0]

    def log_likelihood(self, outputs: list[Tensor]) -> Tensor:
        """sum_i log p(y_i | h_i) / tau of the outputs of each batch, in float64."""
        likelihood = self.system.likelihood
        total = torch.zeros((), dtype=torch.float64, device=self.mean.device)
        with torch.no_grad():
            for h, batch in zip(outputs, self.system.batches(), strict=True):
                total += likelihood.log_prob(h.double(), batch.y).sum()
            self.system.over_ranks_(total, "log-likelihood of the linear model")
            return total * likelihood.inverse_temperature

    def log_likelihoods(self, outputs: list[Tensor], z: Tensor) -> Tensor:
        """sum_i log p(y_i | h_i + J_i z_j) / tau of each deviation z [k, P] of the weights [k]; one
        pass.
        """
        moved = [h + d for h, d in zip(outputs, self.system.pushed(z).values(), strict=True)]
        return torch.stack([self.log_likelihood([h[j] for h in moved]) for j in range(len(z))])

    def outputs(self, theta: Tensor) -> list[Tensor]:
        """h(theta) of each batch; one pass, which refuses data, outputs and targets that are not
        finite.
        """
        outputs, seen = [], Seen(self.system)
        for batch in self.system.batches():
            f, pushed = self._pushed(theta, batch.x)
            seen.add(batch, f, pushed)
            outputs.append(f + pushed)
        seen.check()
        return outputs

    def _outputs(self, theta: Tensor, x: Any) -> Tensor:
        f, pushed = self._pushed(theta, x)
        return f + pushed

    def _pushed(self, theta: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        """The linear model's constant, the network's outputs or 0, and what it adds to them."""
        vector = theta - self.origin if self.offset else theta
        f, pushed = self.system.linear.jvp(x, vector.unsqueeze(0))
        return f if self.offset else torch.zeros_like(f), pushed[0]

    def directional(
        self, theta: Tensor, direction: Tensor, outputs: list[Tensor], pushed: list[Tensor]
    ) -> float:
        """Slope of the loss at theta along a direction with J direction = pushed: no pass, and no
        gradient is kept.
        """
        prior = self.system.layout.dots((theta - self.mean).unsqueeze(0), direction.unsqueeze(0))[0]
        total = torch.zeros((), dtype=torch.float64, device=theta.device)
        for h, p, batch in zip(outputs, pushed, self.system.batches(), strict=True):
            total += (self.slope(h, batch.y).double() * p.double()).sum()
        self.system.over_ranks_(total, "slope of the linear model")
        return (total + (self.system.precision * prior).sum()).item()

    def slope(self, h: Tensor, y: Tensor) -> Tensor:
        """- d log p / dh / tau."""
        likelihood = self.system.likelihood
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad(likelihood.log_prob(h, y).sum(), h)
        return -slope * likelihood.inverse_temperature.detach().to(h.dtype)

    def gradient(self, theta: Tensor, outputs: list[Tensor]) -> Tensor:
        """Gradient [1, P] of the loss over all data."""
        return self._with_prior(self._data_gradient(theta, outputs), theta)

    def _data_gradient(self, theta: Tensor, outputs: list[Tensor]) -> Tensor:
        """Gradient [1, P] of the loss of own data without the prior."""
        out = torch.zeros_like(theta).unsqueeze(0)
        for h, batch in zip(outputs, self.system.batches(), strict=True):
            slope = self.slope(h, batch.y).unsqueeze(0)
            self.system.linear.vjp_(batch.x, lambda _, slope=slope: slope, out)  # type: ignore[misc]
        return out

    def pulled_squares(self, theta: Tensor) -> Tensor:
        """|theta - mu|^2 of each group [G] by the mode's equation A (theta - mu) = - gradient.

        A solver's tolerance hides deviations of groups that the prior dominates; their gradient is
        as it is.
        """
        gradient = self._data_gradient(theta, self.outputs(theta))
        self.system.over_ranks_(gradient, "gradient of the linear model")
        return self.system.layout.dots(gradient, gradient)[0] / self.system.precision.square()

    def batch_gradient(self, theta: Tensor, batch: Portion) -> Tensor:
        """An unbiased estimate [1, P] of the gradient from one batch."""
        out = torch.zeros_like(theta)
        if len(batch.y):
            slope = self.slope(self._outputs(theta[0], batch.x), batch.y).unsqueeze(0)
            self.system.linear.vjp_(batch.x, lambda _: slope, out, self.system.n_data / batch.total)
        return self._with_prior(out, theta[0])

    def _with_prior(self, out: Tensor, theta: Tensor) -> Tensor:
        self.system.over_ranks_(out, "gradient of the linear model")
        return self.system.layout.add_(out, (theta - self.mean).unsqueeze(0), self.system.precision)


@dataclass(frozen=True)
class Mode:
    """Where the loss is least, and how near to it the search ended."""

    theta: Tensor
    steps: int
    # relative: |last step| / |theta - mu| for Newton steps, |gradient| / |first gradient| for
    # others
    error: float


def newton(
    model: LinearModel, theta: Tensor, settings: ConjugateGradients, precondition: Any = None
) -> Mode:
    """Newton steps until one is shorter than the tolerance, in units of the prior.

    All their systems together take as many passes over the data, at most, as those of one sample
    may.
    """
    system = model.system
    outputs = model.outputs(theta)
    error = float("inf")
    steps = 0
    left = settings.max_iterations
    while error > settings.tolerance and left > 0:
        steps += 1
        inner = replace(settings, tolerance=max(settings.tolerance, INEXACT), max_iterations=left)
        target = model.gradient(theta, outputs).neg_()
        direction = torch.zeros_like(target)
        left -= 1 + conjugate_gradients(
            lambda v: system.product(v, outputs),  # noqa: B023
            target,
            direction,
            inner,
            precondition,
            system.norm,
        )
        del target
        pushed = [p[0] for p in system.pushed(direction).values()]
        slope = model.directional(theta, direction[0], outputs, pushed)
        length = _line_search(model, theta, direction[0], outputs, pushed, slope)
        theta = theta + length * direction[0]
        outputs = [h + length * p for h, p in zip(outputs, pushed, strict=True)]
        size = (system.precision * model.squares(theta)).sum().item()
        error = (length * abs(slope) ** 0.5) / max(size, 1e-300) ** 0.5
        if length == 0:
            break
    return Mode(theta, steps, error)


def _line_search(
    model: LinearModel,
    theta: Tensor,
    direction: Tensor,
    outputs: list[Tensor],
    pushed: list[Tensor],
    slope: float,
) -> float:
    """The longest of 1, 1/2, 1/4, ... that lowers the loss as its slope promises; 0 where rounding
    hides the gain.
    """
    precision = model.system.precision

    def loss(length: float) -> float:
        moved = [h + length * p for h, p in zip(outputs, pushed, strict=True)]
        penalty = (precision * model.squares(theta + length * direction)).sum()
        return (0.5 * penalty - model.log_likelihood(moved)).item()

    start, length = loss(0.0), 1.0
    while length > 1e-6:
        if loss(length) <= start + 1e-4 * length * slope:
            return length
        length /= 2
    return 0.0


def descend(model: LinearModel, theta: Tensor, settings: Sgd) -> Mode:
    """Nesterov steps on minibatches; the curvature that limits their size is that of undecided
    outputs too.
    """
    system = model.system
    batch = next(system.whole_batches())
    weight, f = system.n_data / batch.total, system.linear.outputs(batch.x)

    def product(v: Tensor, point: Tensor) -> Tensor:
        out = torch.zeros_like(v)
        system.add_curvature_(out, v, batch, weight, point)
        return system.whitened_(system.layout.add_(out, v, system.precision))

    def gradient(at: Tensor) -> float:
        return system.whitened_(model.gradient(at, model.outputs(at))).norm().item()

    points = (f, torch.zeros_like(f))
    steepest = max(largest_eigenvalue(lambda v, p=p: product(v, p), theta) for p in points)  # type: ignore[misc]
    rate = settings.rate or RATE / steepest
    first, moved = gradient(theta), theta.unsqueeze(0).clone()
    bound = torch.full((1, 1), settings.clip * first, dtype=torch.float64, device=theta.device)
    steps = nesterov(
        lambda at, part: system.whitened_(model.batch_gradient(at, part)),
        system.steps,
        moved,
        settings,
        rate,
        bound,
    )
    last = gradient(moved[0])
    return Mode(moved[0], steps, last / max(first, 1e-300))


def _filled(mean: Tensor | float, like: Tensor) -> Tensor:
    return (
        mean.to(like).expand_as(like) if isinstance(mean, Tensor) else torch.full_like(like, mean)
    )
