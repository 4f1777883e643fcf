"""The mode of the linear model, which the network's weights need not be.

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

from laplace_marglik.posterior.sampled.rounds import Plan, Residual, Sgd, descend
from laplace_marglik.posterior.sampled.solve import ConjugateGradients, conjugate_gradients, norms
from laplace_marglik.posterior.sampled.system import Portion, Seen, System

# relative residual of a Newton system: the next step corrects its error
INEXACT = 0.1
# share of the loss's decrease along its slope that a step must reach: Armijo's usual constant
SUFFICIENT_DECREASE = 1e-4
# of a Newton step: if not even such a short one lowers the loss, rounding hides the gain
SHORTEST_STEP = 1e-6
# of the data's noise, to which a gradient is compared at least: a mode at the prior's mean has none
LEAST_SIGNAL = 1e-3
LEAST_NORM = 1e-300  # against a division by zero; near the least number in float64


@dataclass
class LinearModel:
    """The convex loss of a system's data.

    theta and mu [P] are in the system's coordinates: weights divided by the feature scales s.

    Args:
        system: data, likelihood and prior.
        offset: whether h(theta) has the network's outputs f.
    """

    system: System
    offset: bool

    def __post_init__(self) -> None:
        layout = self.system.layout
        weights = {name: w.detach() for name, w in self.system.linear.model.named_parameters()}
        self.origin = self._scaled(layout.flat(weights))
        self.mean = torch.zeros(()).to(self.origin)  # a number, where no mean needs a vector
        means = {name: self.system.prior.mean_of(name) for name in layout.pieces}
        if any(isinstance(mean, Tensor) or mean != 0 for mean in means.values()):
            tensors = {name: _filled(mean, weights[name]) for name, mean in means.items()}
            self.mean = self._scaled(layout.flat(tensors))

    def _scaled(self, vector: Tensor) -> Tensor:
        scale = self.system.linear.scale
        return vector if scale is None else vector / scale

    def squares(self, theta: Tensor) -> Tensor:
        """|theta - mu|^2 of each group [G]."""
        deviation = (theta - self.mean).unsqueeze(0)
        return self.system.layout.dots(deviation, deviation)[0]

    def log_likelihood(self, outputs: list[Tensor]) -> Tensor:
        """sum_i log p(y_i | h_i) / tau, in float64.

        Args:
            outputs: h [n, ...] of each batch.
        """
        likelihood = self.system.likelihood
        total = torch.zeros((), dtype=torch.float64, device=self.mean.device)
        with torch.no_grad():
            for h, batch in zip(outputs, self.system.batches(), strict=True):
                total += likelihood.tempered_log_prob(h.double(), batch.y).sum()
        return self.system.over_ranks_(total, "log-likelihood of the linear model")

    def log_likelihoods(self, outputs: list[Tensor], z: Tensor) -> Tensor:
        """sum_i log p(y_i | h_i + J_i z_j) / tau of each deviation z_j [k]; one pass.

        Args:
            outputs: h [n, ...] of each batch.
            z: k deviations of theta [k, P].
        """
        pushed = self.system.pushed(z).values()
        moved = [h + d for h, d in zip(outputs, pushed, strict=True)]
        return torch.stack([self.log_likelihood([h[j] for h in moved]) for j in range(len(z))])

    def outputs(self, theta: Tensor) -> list[Tensor]:
        """h(theta) [n, ...] of each batch; one pass, which refuses values that are not finite."""
        outputs = []
        seen = Seen(self.system)
        for batch in self.system.batches():
            f, pushed = self._pushed(theta, batch.x)
            seen.add(batch, f, pushed)
            outputs.append(f + pushed)
        seen.check()
        return outputs

    def _pushed(self, theta: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        """The two terms of h(theta): f and J (theta - w), or 0 and J theta."""
        vector = theta - self.origin if self.offset else theta
        f, pushed = self.system.linear.jvp(x, vector.unsqueeze(0))
        if not self.offset:
            f = torch.zeros_like(f)
        return f, pushed[0]

    def directional(
        self, theta: Tensor, direction: Tensor, outputs: list[Tensor], pushed: list[Tensor]
    ) -> float:
        """The slope of the loss at theta along a direction, without a pass over the network.

        Args:
            theta: where [P].
            direction: [P].
            outputs: h(theta) of each batch.
            pushed: J direction of each batch.
        """
        deviation = (theta - self.mean).unsqueeze(0)
        products = self.system.layout.dots(deviation, direction.unsqueeze(0))[0]
        of_prior = (self.system.precision * products).sum()
        of_data = torch.zeros((), dtype=torch.float64, device=theta.device)
        for h, p, batch in zip(outputs, pushed, self.system.batches(), strict=True):
            of_data += (self.slope(h, batch.y).double() * p.double()).sum()
        self.system.over_ranks_(of_data, "slope of the linear model")
        return (of_data + of_prior).item()

    def slope(self, h: Tensor, y: Tensor) -> Tensor:
        """- d log p / dh / tau [n, ...] at outputs h [n, ...]."""
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            log_prob = self.system.likelihood.tempered_log_prob(h, y).sum()
            (slope,) = torch.autograd.grad(log_prob, h)
        return -slope

    def gradient(self, theta: Tensor, outputs: list[Tensor]) -> Tensor:
        """Gradient [1, P] of the loss over all data, by the outputs h(theta) of each batch."""
        return self._with_prior(self._data_gradient(theta, outputs), theta)

    def _data_gradient(self, theta: Tensor, outputs: list[Tensor]) -> Tensor:
        """Gradient [1, P] of the loss of this rank's data, without the prior."""
        out = torch.zeros_like(theta).unsqueeze(0)
        for h, batch in zip(outputs, self.system.batches(), strict=True):
            slope = self.slope(h, batch.y).unsqueeze(0)
            self.system.linear.vjp_(batch.x, lambda _, slope=slope: slope, out)  # type: ignore[misc]
        return out

    def pulled_squares(self, theta: Tensor) -> Tensor:
        """|theta - mu|^2 of each group [G] by the mode's equation A (theta - mu) = - gradient.

        Where the prior dominates a group, its deviation is smaller than the solver's tolerance; its
        gradient is exact.
        """
        gradient = self._data_gradient(theta, self.outputs(theta))
        self.system.over_ranks_(gradient, "gradient of the linear model")
        return self.system.layout.dots(gradient, gradient)[0] / self.system.precision.square()

    def loss(self, theta: Tensor, outputs: list[Tensor]) -> Tensor:
        """The loss at theta [P] by the outputs h(theta) of each batch, in float64."""
        penalty = (self.system.precision * self.squares(theta)).sum()
        return 0.5 * penalty - self.log_likelihood(outputs)

    def batch_change(self, theta: Tensor, d: Tensor, batch: Portion) -> Tensor:
        """An estimate [1, P] of the change of the gradient from theta [P] to theta + d [1, P].

        It is unbiased, and it vanishes with d.
        """
        out = torch.zeros_like(d)
        if len(batch.y):
            vector = theta - self.origin if self.offset else theta
            f, pushed = self.system.linear.jvp(batch.x, torch.cat([vector.unsqueeze(0), d]))
            h = f + pushed[0] if self.offset else pushed[0]
            change = self.slope(h + pushed[1], batch.y) - self.slope(h, batch.y)
            factor = float(self.system.n_batches)
            self.system.linear.vjp_(batch.x, lambda _: change.unsqueeze(0), out, factor)
        self.system.over_ranks_(out, "gradient of the linear model")
        return self.system.layout.add_(out, d, self.system.precision)

    def _with_prior(self, out: Tensor, theta: Tensor) -> Tensor:
        """The gradient [1, P] of the loss from that of this rank's data, in place."""
        self.system.over_ranks_(out, "gradient of the linear model")
        deviation = (theta - self.mean).unsqueeze(0)
        return self.system.layout.add_(out, deviation, self.system.precision)


@dataclass(frozen=True)
class Mode:
    """The minimum of the loss, and how near to it the search ended."""

    theta: Tensor  # [P]
    steps: int
    # |last step| / |theta - mu| of Newton steps, |gradient| / |A (theta - mu)| of others
    error: float


def newton(
    model: LinearModel, theta: Tensor, settings: ConjugateGradients, precondition: Any = None
) -> Mode:
    """Newton steps until one is shorter than the tolerance, in units of the prior.

    Args:
        model: whose loss is minimised.
        theta: start [P].
        settings: tolerance, and the largest number of iterations of all steps together.
        precondition: an approximate inverse of H, of vectors [k, P].
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
        squared_size = (system.precision * model.squares(theta)).sum().item()
        step_size = length * abs(slope) ** 0.5
        error = step_size / max(squared_size, LEAST_NORM) ** 0.5
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
    """The longest of 1, 1/2, 1/4, ... that lowers the loss as its slope promises; 0 for none."""

    def loss(length: float) -> float:
        moved = [h + length * p for h, p in zip(outputs, pushed, strict=True)]
        return model.loss(theta + length * direction, moved).item()

    start = loss(0.0)
    length = 1.0
    while length > SHORTEST_STEP:
        if loss(length) <= start + SUFFICIENT_DECREASE * length * slope:
            return length
        length /= 2
    return 0.0


def settled(model: LinearModel, theta: Tensor, settings: Sgd) -> Mode:
    """Rounds of minibatch gradients (see `rounds`).

    Args:
        model: whose loss is minimised.
        theta: start [P].
        settings: of the steps.
    """
    system = model.system
    noise = (system.curvature_per_weight * system.layout.size) ** 0.5

    def residual(at: Tensor) -> Residual:
        point = at[0].clone()
        outputs = model.outputs(point)
        r = model.gradient(point, outputs)
        decay = (point - model.mean).unsqueeze(0)
        decay = system.layout.add_(torch.zeros_like(decay), decay, system.precision)
        size = max(system.norm(decay).item(), LEAST_SIGNAL * noise, LEAST_NORM)

        def gradient(d: Tensor, batch: Portion) -> Tensor:
            return system.whitened_(model.batch_change(point, d, batch).add_(r))

        relative = system.norm(r).item() / size
        loss = model.loss(point, outputs).unsqueeze(0)
        return Residual(gradient, norms(system.whitened(r)), relative, loss)

    plan = Plan.of(settings, system.steepest(theta), system.flattest, system.n_batches)
    moved = theta.unsqueeze(0).clone()
    reached = descend(residual, system.steps, moved, settings, plan)
    return Mode(moved[0], *reached)


def _filled(mean: Tensor | float, like: Tensor) -> Tensor:
    """A mean as a tensor shaped as the weight."""
    if isinstance(mean, Tensor):
        return mean.to(like).expand_as(like)
    return torch.full_like(like, mean)
