"""The linear systems whose solutions are posterior samples.

M = J^T Lambda J summed over all data, A the prior precision (times a `factor`), H = M + A. With xi, n standard normal

    H z = b,   b = A^{1/2} n + u,   u = J^T U xi,   Cov(b) = A + M = H,   so that z ~ N(0, H^-1),

the minimum of either of two objectives (Antoran et al. 2023):

    L(z)  = 1/2 sum_i |eps_i - J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n|^2_A          (noise in the data)
    L'(z) = 1/2 sum_i |J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n - A^-1 u|^2_A         (noise in the prior)

with Lambda_i eps_i = U_i xi_i, so that no inverse of Lambda is needed. They differ by a constant; their
minibatch gradients differ in variance.

Lambda is that of the network's outputs f, or the mean over deviations of them, 1/m sum_j Lambda(f + d_j): with
d_j = J z_j of the samples themselves a fixed point is the Gaussian nearest to the linear model's posterior in
KL(q || p), among those centred where it is, for which H = A + J^T E_q[Lambda] J (Opper and Archambeau 2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from asdl_marglik import map_inputs
from torch import Tensor

from ..errors import MarglikError
from ..likelihood import Likelihood
from ..prior import GaussianPrior
from .layout import Layout
from .linearised import Linearised

NoiseIn = Literal["prior", "data"]
Loader = Iterable[tuple[Any, Tensor]]


@dataclass
class System:
    """H and b of the data in a loader, at the network's present weights and the prior's present precision."""

    linear: Linearised
    likelihood: Likelihood
    prior: GaussianPrior
    loader: Loader
    n_data: int
    samples: int  # k
    seed: int  # of all noise: the same seed gives the same n and xi whatever the precision
    factor: float = 1.0
    deviations: Sequence[Tensor] | None = None  # d of each batch [m, n, ...], over which the curvature is averaged

    def __post_init__(self) -> None:
        if iter(self.loader) is self.loader:
            raise MarglikError("the loader can be read only once; pass a DataLoader or a list of (x, y) batches")

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

    def at(self, factor: float) -> System:
        """The same system with the prior precision times `factor`."""
        return replace(self, factor=factor)

    def batches(self) -> Iterator[tuple[Any, Tensor]]:
        device = next(self.linear.model.parameters()).device
        for x, y in self.loader:
            yield map_inputs(lambda t: t.to(device), x), y.to(device)

    # ----------------------------------------------------------------------------------------------------- products

    def add_curvature_(
        self, out: Tensor, z: Tensor, batch: tuple[Any, Tensor], number: int, weight: float = 1.0,
        outputs: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out += weight M z of the batch with this number in the loader; outputs: where the curvature is, if given."""
        x, y = batch
        f, pushed = self.linear.jvp(x, z)
        points = self._points(f, number) if outputs is None else [outputs]
        cotangents = self._curved(points, y, pushed)
        self.linear.vjp_(x, lambda _: cotangents, out, weight)

    def _points(self, f: Tensor, number: int) -> list[Tensor]:
        """The outputs over which a batch's curvature is averaged."""
        return [f] if self.deviations is None else [f + d for d in self.deviations[number]]

    def _curved(self, points: list[Tensor], y: Tensor, pushed: Tensor) -> Tensor:
        """Lambda pushed [k, n, ...]."""
        total = torch.zeros_like(pushed)
        for point in points:
            total += self.likelihood.hessian_product(point, y, pushed)
        return self.curvature_scale / len(points) * total

    def curvature(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """M z [k, P] over all data; `outputs`: of each batch, where the curvature is not at the network's own."""
        out = torch.zeros_like(z)
        for number, batch in enumerate(self.batches()):
            self.add_curvature_(out, z, batch, number, outputs=None if outputs is None else outputs[number])
        return out

    def product(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """H z [k, P] over all data."""
        return self.layout.add_(self.curvature(z, outputs), z, self.precision)

    def pushed(self, z: Tensor) -> list[Tensor]:
        """J z of each batch [k, n, ...]: one pass."""
        return [self.linear.jvp(x, z)[1] for x, _ in self.batches()]

    # -------------------------------------------------------------------------------------------------------- noise

    def data_noise(self, like: Tensor) -> Tensor:
        """u [k, P]: one pass over the data."""
        u, count = torch.zeros(self.samples, self.layout.size).to(like), 0
        for number, (x, y) in enumerate(self.batches()):
            self.linear.vjp_(x, partial(self._root_noise, y, number), u)
            count += len(y)
        if count != self.n_data:
            raise MarglikError(f"the loader holds {count} data points, but n_data={self.n_data}; it must give all")
        return u

    def diagonal(self, like: Tensor) -> Tensor:
        """An unbiased estimate of the diagonal of M [P] from k noise vectors.

        M_jj = sum over batches of E [J_b^T U xi]_j^2, since the noise of different data is independent.
        """
        found = torch.zeros(self.layout.size).to(like)
        own = found.new_empty(self.samples, self.layout.size)
        for number, (x, y) in enumerate(self.batches()):
            self.linear.vjp_(x, partial(self._root_noise, y, number), own.zero_())
            found += own.square_().mean(0)
        return found

    def _root_noise(self, y: Tensor, number: int, f: Tensor) -> Tensor:
        """U xi [k, n, ...] of a batch with outputs f: noise of covariance Lambda."""
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * (number + 1))
        points, noise = self._points(f, number), torch.zeros(self.samples, *f.shape).to(f)
        for point in points:
            xi = torch.randn(noise.shape, generator=generator, dtype=f.dtype).to(f.device)
            noise += self.likelihood.root_product(point, y, xi)
        return (self.curvature_scale / len(points)) ** 0.5 * noise

    def prior_noise(self, samples: Iterable[int], like: Tensor) -> Tensor:
        """A^{1/2} n of the samples with these numbers, made anew from their seeds rather than kept."""
        rows = []
        for j in samples:
            generator = torch.Generator().manual_seed(self.seed + j)
            rows.append(torch.randn(self.layout.size, generator=generator, dtype=like.dtype).to(like.device))
        noise = torch.stack(rows)
        return self.layout.divided_(noise, self.precision.rsqrt())

    # ---------------------------------------------------------------------------------------------------- gradients

    def gradient(
        self, z: Tensor, batch: tuple[Any, Tensor], number: int, samples: range, target: Tensor, noise_in: NoiseIn
    ) -> Tensor:
        """An unbiased estimate [g, P] of H z - b from one batch, for some of the samples.

        number: of the batch in the loader. target: b, or A^{1/2} n where the noise is in the data; then the loader must
        give the same batches in every pass.
        """
        x, y = batch
        out, weight = torch.zeros_like(z), self.n_data / len(y)
        if noise_in == "prior":
            self.add_curvature_(out, z, batch, number, weight)
        else:
            f, pushed = self.linear.jvp(x, z)
            noise = self._root_noise(y, number, f)[samples.start : samples.stop]
            cotangents = self._curved(self._points(f, number), y, pushed) - noise
            self.linear.vjp_(x, lambda _: cotangents, out, weight)
        return self.layout.add_(out, z, self.precision).sub_(target)
