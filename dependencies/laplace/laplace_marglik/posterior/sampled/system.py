"""The linear systems whose solutions are posterior samples.

M = J^T Lambda J summed over all data, A the prior precision (times a `factor`), H = M + A. With
standard normal xi and n

    H z = b,   b = A^{1/2} n + u,   u = J^T U xi,   Cov(b) = A + M = H,   so that z ~ N(0, H^-1),

the minimum of either of two objectives (Antoran et al. 2023):

    L(z)  = 1/2 sum_i |eps_i - J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n|^2_A   (noise in the data)
    L'(z) = 1/2 sum_i |J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n - A^-1 u|^2_A   (noise in the prior)

with Lambda_i eps_i = U_i xi_i, so that no inverse of Lambda is needed. They differ by a constant;
their minibatch gradients differ in variance.

Lambda is that of the network's outputs f, or a mean over deviations from them,
1/m sum_j Lambda(f + d_j). With the samples' own deviations d_j = J z_j, a fixed point is the
Gaussian q nearest to the linear model's posterior p in KL(q || p), among those with its centre: for
it H = A + J^T E_q[Lambda] J (Opper and Archambeau 2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asdl_marglik import Ranks, check_finite, map_inputs, taken
from asdl_marglik.watch.model import finite
from laplace_marglik.batches import pairs
from laplace_marglik.checks import targets
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Likelihood
from laplace_marglik.posterior.sampled.layout import Layout
from laplace_marglik.posterior.sampled.linearised import Linearised
from laplace_marglik.posterior.sampled.rounds import NoiseIn
from laplace_marglik.posterior.sampled.solve import largest_eigenvalue
from laplace_marglik.prior import GaussianPrior

Loader = Iterable[tuple[Any, Tensor]]
# between the seeds of batches: larger than any number of samples, so that no two seeds are the same
BATCH_SEEDS = 1_000_003


class Portion(NamedTuple):
    """A batch, or the span of it that belongs to this rank."""

    x: Any
    y: Tensor
    number: int  # of the batch
    start: int  # number of the first datum in the batch
    total: int  # data in the whole batch

    @property
    def span(self) -> slice:
        """The data of this portion, in the whole batch."""
        return slice(self.start, self.start + len(self.y))


@dataclass
class Seen:
    """A record of which values in a pass over the data are finite, checked once at the end.

    Everything stays on the device: no batch waits for a check of the one before.
    """

    system: System
    inputs: list[Tensor] = field(default_factory=list)
    # [n, 1] of each batch: NaN where an output is not finite
    outputs: list[Tensor] = field(default_factory=list)
    # [n, 1] of each batch: NaN where a derivative is not finite
    derivatives: list[Tensor] = field(default_factory=list)
    # log p(y_i | f_i) [n] of each batch; 0 for other ranks' data
    targets: list[Tensor] = field(default_factory=list)

    def add(self, batch: Portion, f: Tensor, pushed: Tensor | None = None) -> None:
        """Record a batch.

        Args:
            batch: inputs and targets.
            f: outputs [n, ...].
            pushed: what the linear model adds to them [n, ...].
        """
        self.inputs.append(finite(batch.x))
        self.outputs.append(self._marks(batch, f))
        h = f.detach().double()
        if pushed is not None:
            self.derivatives.append(self._marks(batch, pushed))
            h = h + pushed.double()
        log_p = h.new_zeros(batch.total)
        finite_h = torch.where(h.isfinite(), h, 0.0)
        with torch.no_grad():
            log_p[batch.span] = self.system.likelihood.log_prob(finite_h, batch.y).double()
        self.targets.append(log_p)

    def _marks(self, batch: Portion, values: Tensor) -> Tensor:
        """Marks [n, 1] of the whole batch: NaN for a datum with values that are not finite."""
        marks = torch.zeros(batch.total, 1, dtype=torch.float64, device=values.device)
        is_finite = values.detach().isfinite().reshape(len(values), -1).all(1, keepdim=True)
        marks[batch.span] = torch.where(is_finite, 0.0, torch.nan).to(marks)
        return marks

    def check(self) -> None:
        """Raise an error that names the datum or parameter behind a value that is not finite."""
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
    """H and b of the data in a loader, at the present weights and the prior's present precision.

    With ranks, each takes a span of every batch, and sums over data are added up over ranks.
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
        """The places of weights and groups in a flat vector."""
        return self.linear.layout

    @property
    def precision(self) -> Tensor:
        """The prior precision of each group [G], in float64."""
        return self.factor * self.prior.log_precision.detach().double().exp()

    @property
    def curvature_scale(self) -> float:
        """The factor between the likelihood's `hessian` and Lambda."""
        return self.likelihood.curvature_scale().item()

    @cached_property
    def n_batches(self) -> int:
        """Batches of the loader: the factor that makes a sum over one of them unbiased.

        N / b would not be, where the last batch is shorter than the others.
        """
        return len(self.loader) if isinstance(self.loader, Sized) else sum(1 for _ in self.loader)

    @property
    def stiffness(self) -> Tensor:
        """delta_l + m of each group over the least of them [G], m the mean curvature of a weight.

        It is 1 where all precisions are the same. H divided by it is as well conditioned as H
        without its stiffest groups.
        """
        stiffness = self.precision + self.curvature_per_weight
        has_weights = self.layout.counts.to(stiffness.device) > 0
        return stiffness / stiffness[has_weights].min()

    def whitened_(self, vectors: Tensor) -> Tensor:
        """Divide vectors [k, P] by the stiffness of their groups, in place."""
        stiffness = self.stiffness
        return vectors if (stiffness == 1).all() else self.layout.divided_(vectors, stiffness)

    def whitened(self, vectors: Tensor) -> Tensor:
        """Vectors [k, P] divided by the stiffness of their groups."""
        return self.whitened_(vectors.clone())

    def norm(self, vectors: Tensor) -> Tensor:
        """Lengths [k, 1] of residuals [k, P], squares divided by stiffness.

        So a stiff group, with large entries, does not hide the residuals of others.
        """
        squares = self.layout.dots(vectors, vectors) / self.stiffness
        return squares.sum(1, keepdim=True).sqrt()

    def at(self, factor: float) -> System:
        """The same system with the prior precision times `factor`."""
        return replace(self, factor=factor)

    def batches(self) -> Iterator[Portion]:
        """All batches, or this rank's span of each, without empty ones."""
        return (batch for batch in self.steps() if len(batch.y))

    def steps(self) -> Iterator[Portion]:
        """All batches, or this rank's span of each: as many on every rank, some empty."""
        for batch in self.whole_batches():
            if self.ranks is None:
                yield batch
            else:
                span = self.ranks.spans(batch.total)[self.ranks.rank]
                x = taken(batch.x, span)
                yield batch._replace(x=x, y=batch.y[span], start=span.start)

    def whole_batches(self) -> Iterator[Portion]:
        """All batches, on every rank."""
        device = next(self.linear.model.parameters()).device
        for number, (x, y) in enumerate(pairs(self.loader)):
            x = map_inputs(lambda t: t.to(device), x)
            yield Portion(x, targets(y).to(device), number, start=0, total=len(y))

    def over_ranks_(self, values: Tensor, step: str) -> Tensor:
        """Add up sums over this rank's data to sums over all data, in place.

        Args:
            values: what to add up.
            step: its name, for the error of a rank that is somewhere else.
        """
        if self.ranks is not None:
            self.ranks.sum_([values], step)
        return values

    # ------------------------------------------------------------------------------------- products

    def add_curvature_(
        self,
        out: Tensor,
        z: Tensor,
        batch: Portion,
        factor: float = 1.0,
        outputs: Tensor | None = None,
    ) -> None:
        """out [k, P] += factor M z of a batch, in place.

        Args:
            out: k vectors to add to [k, P].
            z: k vectors [k, P].
            batch: over which M is a sum.
            factor: of what is added.
            outputs: [n, ...] at which Lambda is taken; None for those of the system.
        """
        f, pushed = self.linear.jvp(batch.x, z)
        points = self._points(f, batch) if outputs is None else [outputs]
        cotangents = self._curved(points, batch.y, pushed)
        self.linear.vjp_(batch.x, lambda _: cotangents, out, factor)

    def _points(self, f: Tensor, batch: Portion) -> list[Tensor]:
        """The outputs over which a batch's curvature is averaged."""
        if self.deviations is None:
            return [f]
        return [f + d for d in self.deviations[batch.number]]

    def _curved(self, points: list[Tensor], y: Tensor, pushed: Tensor) -> Tensor:
        """Lambda pushed [k, n, ...]."""
        total = torch.zeros_like(pushed)
        for point in points:
            total += self.likelihood.hessian_product(point, y, pushed)
        return self.curvature_scale / len(points) * total

    def curvature(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """M z [k, P] over all data.

        Args:
            z: k vectors [k, P].
            outputs: [n, ...] of each batch at which Lambda is taken; None for those of the system.
        """
        out = torch.zeros_like(z)
        for number, batch in enumerate(self.batches()):
            point = None if outputs is None else outputs[number]
            self.add_curvature_(out, z, batch, outputs=point)
        return self.over_ranks_(out, "product with the curvature")

    def product(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """H z [k, P] over all data.

        Args:
            z: k vectors [k, P].
            outputs: as in `curvature`.
        """
        return self.layout.add_(self.curvature(z, outputs), z, self.precision)

    def steepest(self, like: Tensor) -> float:
        """The largest eigenvalue of the whitened H of the first batch, which limits a step."""
        batch = next(self.steps())

        def product(v: Tensor) -> Tensor:
            out = torch.zeros_like(v)
            if len(batch.y):
                self.add_curvature_(out, v, batch, self.n_batches)
            self.over_ranks_(out, "steepest curvature")
            self.layout.add_(out, v, self.precision)
            return self.whitened_(out)

        return largest_eigenvalue(product, like.expand(self.layout.size))

    @property
    def flattest(self) -> float:
        """A lower bound of the eigenvalues of the whitened H: the prior's share of them."""
        has_weights = self.layout.counts.to(self.precision.device) > 0
        return (self.precision / self.stiffness)[has_weights].min().item()

    def pushed(self, z: Tensor) -> dict[int, Tensor]:
        """J z [k, n, ...] of this rank's data, by the number of their batch; one pass."""
        return {batch.number: self.linear.jvp(batch.x, z)[1] for batch in self.batches()}

    # ---------------------------------------------------------------------------------------- noise

    def data_noise(self, like: Tensor) -> Tensor:
        """The data's noise u [k, P]; one pass, which refuses data that are not finite."""
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
        diagonal = torch.zeros(self.layout.size).to(like)
        noise = diagonal.new_empty(self.samples, self.layout.size)
        for batch in self.steps():
            noise.zero_()
            if len(batch.y):
                self.linear.vjp_(batch.x, partial(self._root_noise, batch), noise)
            self.over_ranks_(noise, "diagonal of the curvature")
            diagonal += noise.square_().mean(0)
        return diagonal

    def _root_noise(self, batch: Portion, f: Tensor) -> Tensor:
        """U xi [k, n, ...] of a batch with outputs f, noise of covariance Lambda.

        It is drawn for the whole batch, so that a datum has the same noise on whichever rank.
        """
        seed = self.seed + BATCH_SEEDS * (batch.number + 1)
        generator = torch.Generator().manual_seed(seed)
        points = self._points(f, batch)
        noise = torch.zeros(self.samples, *f.shape).to(f)
        shape = (self.samples, batch.total, *f.shape[1:])
        for point in points:
            xi = torch.randn(shape, generator=generator, dtype=f.dtype)
            xi = xi[:, batch.span].to(f.device)
            noise += self.likelihood.root_product(point, batch.y, xi)
        return (self.curvature_scale / len(points)) ** 0.5 * noise

    def prior_noise(self, samples: Iterable[int], like: Tensor) -> Tensor:
        """A^{1/2} n [g, P], drawn from the samples' seeds every time, which needs no memory.

        Args:
            samples: numbers of g samples.
            like: tensor of the noise's dtype and device.
        """
        draws = []
        for j in samples:
            generator = torch.Generator().manual_seed(self.seed + j)
            n = torch.randn(self.layout.size, generator=generator, dtype=like.dtype)
            draws.append(n.to(like.device))
        noise = torch.stack(draws)
        return self.layout.divided_(noise, self.precision.rsqrt())

    # ------------------------------------------------------------------------------------ gradients

    def gradient(
        self, z: Tensor, batch: Portion, samples: range, target: Tensor, noise_in: NoiseIn
    ) -> Tensor:
        """An unbiased estimate [g, P] of H z - b from one batch, for some of the samples.

        Args:
            z: g vectors [g, P].
            batch: the data of the estimate.
            samples: numbers of the g samples.
            target: b [g, P], or A^{1/2} n where the noise is in the data; then the loader must give
                the same batches in every pass.
            noise_in: "prior" (L') or "data" (L).
        """
        out = torch.zeros_like(z)
        factor = float(self.n_batches)
        if len(batch.y) and noise_in == "prior":
            self.add_curvature_(out, z, batch, factor)
        elif len(batch.y):
            f, pushed = self.linear.jvp(batch.x, z)
            noise = self._root_noise(batch, f)[samples.start : samples.stop]
            cotangents = self._curved(self._points(f, batch), batch.y, pushed) - noise
            self.linear.vjp_(batch.x, lambda _: cotangents, out, factor)
        self.over_ranks_(out, "gradient of the samples")
        return self.layout.add_(out, z, self.precision).sub_(target)
