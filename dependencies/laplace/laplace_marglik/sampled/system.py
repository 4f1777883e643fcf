"""The linear systems whose solutions are posterior samples.

M = J^T Lambda J summed over all data, A the prior precision (times a `factor`), H = M + A. With xi, n standard normal

    H z = b,   b = A^{1/2} n + u,   u = J^T U xi,   Cov(b) = A + M = H,   so that z ~ N(0, H^-1),

the minimum of either of two objectives (Antoran et al. 2023):

    L(z)  = 1/2 sum_i |eps_i - J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n|^2_A          (noise in the data)
    L'(z) = 1/2 sum_i |J_i z|^2_Lambda + 1/2 |z - A^{-1/2} n - A^-1 u|^2_A         (noise in the prior)

with Lambda_i eps_i = U_i xi_i, so that no inverse of Lambda is needed. They differ by a constant; their
minibatch gradients differ in variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        self, out: Tensor, z: Tensor, batch: tuple[Any, Tensor], weight: float = 1.0, outputs: Tensor | None = None
    ) -> Tensor:
        """out += weight M_batch z; the curvature is that at the network's outputs, unless others are given.

        Returns J z [k, n, ...].
        """
        x, y = batch
        f, pushed = self.linear.jvp(x, z)
        point = f if outputs is None else outputs
        cotangents = self.curvature_scale * self.likelihood.hessian_product(point, y, pushed)
        self.linear.vjp_(x, lambda _: cotangents, out, weight)
        return pushed

    def curvature(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """M z [k, P] over all data; `outputs`: of each batch, where the curvature is not at the network's own."""
        out = torch.zeros_like(z)
        for number, batch in enumerate(self.batches()):
            self.add_curvature_(out, z, batch, outputs=None if outputs is None else outputs[number])
        return out

    def product(self, z: Tensor, outputs: list[Tensor] | None = None) -> Tensor:
        """H z [k, P] over all data."""
        return self.layout.add_(self.curvature(z, outputs), z, self.precision)

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
        xi = torch.randn(self.samples, *f.shape, generator=generator, dtype=f.dtype).to(f.device)
        return self.curvature_scale**0.5 * self.likelihood.root_product(f, y, xi)

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
            self.add_curvature_(out, z, batch, weight)
        else:
            f, pushed = self.linear.jvp(x, z)
            noise = self._root_noise(y, number, f)[samples.start : samples.stop]
            cotangents = self.curvature_scale * self.likelihood.hessian_product(f, y, pushed) - noise
            self.linear.vjp_(x, lambda _: cotangents, out, weight)
        return self.layout.add_(out, z, self.precision).sub_(target)
