"""The linear systems whose solutions are posterior samples.

M = J^T Lambda J summed over all data, A the prior precision (times a `factor`), H = M + A. With xi,
n standard normal

    H z = b,   b = A^{1/2} n + u,   u = J^T U xi,   Cov(b) = A + M = H,   so that z ~ N(0, H^-1),

the minimum of either of two objectives (Antoran et al. 2023):

    L(z)  = 1/2 sum_i |eps_i - J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n|^2_A   (noise in the data)
    L'(z) = 1/2 sum_i |J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n - A^-1 u|^2_A   (noise in the prior)

with Lambda_i eps_i = U_i xi_i, so that no inverse of Lambda is needed. They differ by a constant;
their minibatch gradients differ in variance.

Lambda is that of the network's outputs f, or the mean over deviations of them, 1/m sum_j Lambda(f +
d_j): with d_j = J z_j of the samples themselves a fixed point is the Gaussian nearest to the linear
model's posterior in KL(q || p), among those centred where it is, for which H = A + J^T E_q[Lambda]
J (Opper and Archambeau 2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asdl_marglik import Ranks, check_finite, map_inputs, taken
from asdl_marglik.watch.model import finite
from laplace_marglik.checks import pairs, targets
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Likelihood
from laplace_marglik.posterior.sampled.layout import Layout
from laplace_marglik.posterior.sampled.linearised import Linearised
from laplace_marglik.posterior.sampled.solve import NoiseIn, largest_eigenvalue
from laplace_marglik.prior import GaussianPrior

Loader = Iterable[tuple[Any, Tensor]]


class Portion(NamedTuple):
    """A batch, or what a rank has of it: its data from number `start` on, of `total`."""

    x: Any
    y: Tensor
    number: int  # of the batch
    start: int
    total: int


@dataclass
class Seen:
    """Whether all that a pass over the data has met is finite: noted batch by batch, asked once, at
    the end.
    """

    system: System
    inputs: list[Tensor] = field(default_factory=list)
    # [n, 1] of each batch: NaN where an output is not finite
    outputs: list[Tensor] = field(default_factory=list)
    # log p(y_i | f_i) [n]; all are 0 for other ranks' data
    targets: list[Tensor] = field(default_factory=list)

    derivatives: list[Tensor] = field(default_factory=list)  # as the outputs

    def add(self, batch: Portion, f: Tensor, pushed: Tensor | None = None) -> None:
        """A batch, its outputs, and those of the linear model, less a constant."""
        self.inputs.append(finite(batch.x))
        self.outputs.append(self._marks(batch, f))
        h = f.detach().double()
        if pushed is not None:
            self.derivatives.append(self._marks(batch, pushed))
            h = h + pushed.double()
        log_p = h.new_zeros(batch.total)
        with torch.no_grad():
            own = self.system.likelihood.log_prob(torch.where(h.isfinite(), h, 0.0), batch.y)
        log_p[batch.start : batch.start + len(f)] = own.double()
        self.targets.append(log_p)

    def _marks(self, batch: Portion, values: Tensor) -> Tensor:
        """NaN for a datum with values that are not finite, else 0."""
        marks = torch.zeros(batch.total, 1, dtype=torch.float64, device=values.device)
        good = values.detach().isfinite().reshape(len(values), -1).all(1, keepdim=True)
        marks[batch.start : batch.start + len(values)] = torch.where(good, 0.0, torch.nan).to(marks)
        return marks

    def check(self) -> None:
        """Raise an error that names the datum, or the parameter, behind a value that is not
        finite.
        """
        if not self.inputs:
            return
        model = self.system.linear.model
        check_finite(
            self.inputs,
            torch.cat(self.outputs),
            model,
            lambda: (b.x for b in self.system.whole_batches()),
        )
        if self.derivatives:
            check_derivatives(torch.cat(self.derivatives))
        targets = torch.cat(self.targets)
        if not targets.isfinite().all():
            datum = int((~targets.isfinite()).nonzero()[0])
            raise MarglikError(
                f"the log-likelihood of datum {datum} is not finite; check its target"
            )


def check_derivatives(pushed: Tensor) -> None:
    """Raise an error that names a datum with products J z [n, C] that are not finite."""
    if pushed.isfinite().all():
        return
    datum = int((~pushed.isfinite().all(1)).nonzero()[0])
    raise MarglikError(
        f"the derivative of the network's output for datum {datum} is not finite although the "
        "output is; use operations that are differentiable there, or a wider dtype"
    )


@dataclass
class System:
    """H and b of the data in a loader, at the network's present weights and the prior's present
    precision.

    ranks: each takes its part of every batch, and what is a sum over data is added up.
    """

    linear: Linearised
    likelihood: Likelihood
    prior: GaussianPrior
    loader: Loader
    n_data: int
    samples: int  # k
    seed: int  # of all noise: the same seed gives the same n and xi whatever the precision
    factor: float = 1.0
    curvature_per_weight: float = 0.0  # tr(M) / P, where it is known
    # d [m, n, ...] by batch, over which the curvature is averaged
    deviations: Mapping[int, Tensor] | None = None
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        if iter(self.loader) is self.loader:
            raise MarglikError(
                "the loader can be read only once; pass a DataLoader or a list of (x, y) batches"
            )

    @property
    def layout(self) -> Layout:
        return self.linear.layout

    @property
    def precision(self) -> Tensor:
        """The prior precision of each group [G], in float64."""
        return self.factor * self.prior.log_precision.detach().double().exp()

    @property
    def curvature_scale(self) -> float:
        return self.likelihood.curvature_scale().item()

    @property
    def stiffness(self) -> Tensor:
        """delta_l + m of each group, m the mean curvature of a weight, over the least of them [G].

        1 where all precisions are the same. H over it is as well conditioned as H without its
        stiffest groups.
        """
        stiffness = self.precision + self.curvature_per_weight
        return stiffness / stiffness[self.layout.counts.to(stiffness.device) > 0].min()

    def whitened_(self, vectors: Tensor) -> Tensor:
        """Vectors [k, P] over the stiffness of their groups, in place."""
        stiffness = self.stiffness
        return vectors if (stiffness == 1).all() else self.layout.divided_(vectors, stiffness)

    def whitened(self, vectors: Tensor) -> Tensor:
        """The same, as a copy."""
        return self.whitened_(vectors.clone())

    def norm(self, vectors: Tensor) -> Tensor:
        """Lengths [k, 1] of residuals, their squares over the stiffness: so that a stiff group
        hides no other.
        """
        return (self.layout.dots(vectors, vectors) / self.stiffness).sum(1, keepdim=True).sqrt()

    def at(self, factor: float) -> System:
        """The same system with the prior precision times `factor`."""
        return replace(self, factor=factor)

    def batches(self) -> Iterator[Portion]:
        """All batches, or this rank's part of each, if it has any."""
        return (batch for batch in self.steps() if len(batch.y))

    def steps(self) -> Iterator[Portion]:
        """The same, empty parts included: every rank takes a step for every batch."""
        for batch in self.whole_batches():
            if self.ranks is None:
                yield batch
            else:
                own = self.ranks.spans(batch.total)[self.ranks.rank]
                x = taken(batch.x, own)
                yield batch._replace(x=x, y=batch.y[own], start=own.start)

    def whole_batches(self) -> Iterator[Portion]:
        """All batches, on every rank."""
        device = next(self.linear.model.parameters()).device
        for number, (x, y) in enumerate(pairs(self.loader)):
            yield Portion(
                map_inputs(lambda t: t.to(device), x), targets(y).to(device), number, 0, len(y)
            )

    def over_ranks_(self, own: Tensor, step: str) -> Tensor:
        """A sum over own data, made one over all data."""
        if self.ranks is not None:
            self.ranks.sum_([own], step)
        return own

    # ------------------------------------------------------------------------------------- products

    def add_curvature_(
        self,
        out: Tensor,
        z: Tensor,
        batch: Portion,
        weight: float = 1.0,
        outputs: Tensor | None = None,
    ) -> None:
        """out += weight M z of a batch; outputs: where the curvature is, if given."""
        f, pushed = self.linear.jvp(batch.x, z)
        points = self._points(f, batch) if outputs is None else [outputs]
        cotangents = self._curved(points, batch.y, pushed)
        self.linear.vjp_(batch.x, lambda _: cotangents, out, weight)

    def _points(self, f: Tensor, batch: Portion) -> list[Tensor]:
        """The outputs over which a batch's curvature is averaged."""
        return [f] if self.deviations is None else [f + d for d in self.deviations[batch.number]]

    def _curved(self, points: list[Tensor], y: Tensor, pushed: Tensor) -> Tensor:
        """Lambda pushed [k, n, ...]."""
        total = torch.zeros_like(pushed)
        for point in points:
            total += self.likelihood.hessian_product(point, y, pushed)
        return self.curvature_scale / len(points) * total

    def curvature(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """M z [k, P] over all data; `outputs`: of each batch, where the curvature is not at the
        network's own.
        """
        out = torch.zeros_like(z)
        for number, batch in enumerate(self.batches()):
            self.add_curvature_(out, z, batch, outputs=None if outputs is None else outputs[number])
        return self.over_ranks_(out, "product with the curvature")

    def product(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """H z [k, P] over all data."""
        return self.layout.add_(self.curvature(z, outputs), z, self.precision)

    def steepest(self, like: Tensor) -> float:
        """The largest eigenvalue of the whitened H of the first batch: what limits a minibatch
        step.
        """
        batch = next(self.steps())

        def product(v: Tensor) -> Tensor:
            out = torch.zeros_like(v)
            if len(batch.y):
                self.add_curvature_(out, v, batch, self.n_data / batch.total)
            out = self.layout.add_(self.over_ranks_(out, "steepest curvature"), v, self.precision)
            return self.whitened_(out)

        return largest_eigenvalue(product, like.expand(self.layout.size))

    def pushed(self, z: Tensor) -> dict[int, Tensor]:
        """J z [k, n, ...] of own data, by the number of their batch: one pass."""
        return {batch.number: self.linear.jvp(batch.x, z)[1] for batch in self.batches()}

    # ---------------------------------------------------------------------------------------- noise

    def data_noise(self, like: Tensor) -> Tensor:
        """u [k, P]: one pass over the data."""
        u = torch.zeros(self.samples, self.layout.size).to(like)
        count = 0
        seen = Seen(self)

        def noise(batch: Portion, f: Tensor) -> Tensor:
            seen.add(batch, f)
            return self._root_noise(batch, f)

        for batch in self.steps():
            if len(batch.y):
                self.linear.vjp_(batch.x, partial(noise, batch), u)
            count += batch.total
        seen.check()
        if count != self.n_data:
            raise MarglikError(
                f"the loader holds {count} data points, but n_data={self.n_data}; it must give all"
            )
        return self.over_ranks_(u, "noise of the data")

    def diagonal(self, like: Tensor) -> Tensor:
        """An unbiased estimate of the diagonal of M [P] from k noise vectors.

        M_jj = sum over batches of E [J_b^T U xi]_j^2, since the noise of different data is
        independent.
        """
        found = torch.zeros(self.layout.size).to(like)
        own = found.new_empty(self.samples, self.layout.size)
        for batch in self.steps():
            own.zero_()
            if len(batch.y):
                self.linear.vjp_(batch.x, partial(self._root_noise, batch), own)
            found += self.over_ranks_(own, "diagonal of the curvature").square_().mean(0)
        return found

    def _root_noise(self, batch: Portion, f: Tensor) -> Tensor:
        """U xi [k, n, ...] of a batch with outputs f: noise of covariance Lambda, whoever has the
        datum.
        """
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * (batch.number + 1))
        points, noise = self._points(f, batch), torch.zeros(self.samples, *f.shape).to(f)
        for point in points:
            xi = torch.randn(
                self.samples, batch.total, *f.shape[1:], generator=generator, dtype=f.dtype
            )
            xi = xi[:, batch.start : batch.start + len(f)].to(f.device)
            noise += self.likelihood.root_product(point, batch.y, xi)
        return (self.curvature_scale / len(points)) ** 0.5 * noise

    def prior_noise(self, samples: Iterable[int], like: Tensor) -> Tensor:
        """A^{1/2} n of the samples with these numbers, made anew from their seeds rather than
        kept.
        """
        rows = []
        for j in samples:
            generator = torch.Generator().manual_seed(self.seed + j)
            rows.append(
                torch.randn(self.layout.size, generator=generator, dtype=like.dtype).to(like.device)
            )
        noise = torch.stack(rows)
        return self.layout.divided_(noise, self.precision.rsqrt())

    # ------------------------------------------------------------------------------------ gradients

    def gradient(
        self, z: Tensor, batch: Portion, samples: range, target: Tensor, noise_in: NoiseIn
    ) -> Tensor:
        """An unbiased estimate [g, P] of H z - b from one batch, for some of the samples.

        target: b, or A^{1/2} n where the noise is in the data; then the loader must give the same
        batches in every pass.
        """
        out, weight = torch.zeros_like(z), self.n_data / batch.total
        if len(batch.y) and noise_in == "prior":
            self.add_curvature_(out, z, batch, weight)
        elif len(batch.y):
            f, pushed = self.linear.jvp(batch.x, z)
            noise = self._root_noise(batch, f)[samples.start : samples.stop]
            cotangents = self._curved(self._points(f, batch), batch.y, pushed) - noise
            self.linear.vjp_(batch.x, lambda _: cotangents, out, weight)
        self.over_ranks_(out, "gradient of the samples")
        return self.layout.add_(out, z, self.precision).sub_(target)
