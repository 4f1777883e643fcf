"""Rows that are gradients of log-likelihoods: the empirical Fisher and the Fisher from samples.

    empirical   V^T V = sum_i g(y_i) g(y_i)^T,  g(y) the gradient of log p(y | f_i)
    sampled     V^T V = sum_i 1/R sum_r g(y_r) g(y_r)^T,  R targets y_r drawn from p(y | f_i)

The first has one row per datum and is another curvature than the GGN; the second has R of them, and
its mean over draws is the GGN. A datum counts 1 / tau times in both, as in the GGN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from laplace_marglik.likelihood import Likelihood
from laplace_marglik.likelihood.base import GradientRoot, Root

GRADIENT_ROOTS: tuple[str, ...] = get_args(GradientRoot)
# added to the seed of a pass: targets are drawn independently of augmentations
DRAWS = 2**33


def is_gradient(root: str | None) -> bool:
    """Whether rows are gradients of log-likelihoods instead of columns of a root of Lambda.

    Args:
        root: by name.
    """
    return root in GRADIENT_ROOTS


@dataclass
class GradientRows:
    """Rows of slopes at the targets, or at targets that are drawn.

    In the place of its columns a datum has the random numbers of its draws [K, n_uniforms].

    Args:
        likelihood: whose slopes.
        shape: of one datum's outputs.
        samples: R, draws of each datum; None for its target itself.
    """

    likelihood: Likelihood
    shape: torch.Size
    samples: int | None
    cotangents_follow_outputs = True

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        f = f.double().reshape(-1, *self.shape)
        if self.samples is None:
            return self.likelihood.slope(f, y).flatten(1).unsqueeze(1)
        n, k = columns.shape[:2]
        f, y = (t.repeat_interleave(k, 0) for t in (f, y))
        slopes = self.likelihood.drawn_slope(f, y, columns.flatten(0, 1))
        return slopes.reshape(n, k, -1) / self.samples**0.5

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return None

    def drawn(self, n: int, generator: torch.Generator) -> Tensor:
        """Random numbers of the draws of some data points [n, R, n_uniforms].

        Args:
            n: data points.
            generator: of the draws.
        """
        if self.samples is None:
            return torch.zeros(n, 1, dtype=torch.long)
        size = (n, self.samples, self.likelihood.n_uniforms(self.shape))
        return torch.rand(size, generator=generator, dtype=torch.float64)

    def drawn_for(self, rows: Tensor, seed: int) -> Tensor:
        """Random numbers of single rows [s, 1, n_uniforms], the same whenever a row comes again.

        Args:
            rows: (number of the datum, number of the draw) of each [s, 2].
            seed: of all of them.
        """
        generator = torch.Generator()
        if self.samples is None:
            return self.drawn(len(rows), generator)
        draws = []
        for datum, number in rows.tolist():
            generator.manual_seed(seed + DRAWS + datum)
            draws.append(self.drawn(1, generator)[0, number])
        return torch.stack(draws).unsqueeze(1)


def curvature_scale(likelihood: Likelihood, root: Root | GradientRoot | None) -> Tensor:
    """What products of rows are multiplied with.

    Args:
        likelihood: with its temperature and noise of now.
        root: that the rows are of.
    """
    return likelihood.slope_scale() if root == "empirical" else likelihood.curvature_scale()
