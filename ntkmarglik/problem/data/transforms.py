"""Fixed random transformations: the rotated, translated and scaled variants of a data set."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

VARIANTS = ("r90", "r180", "translated", "scaled")
MAX_SHIFT = 8.0
"""Largest translation in pixels on images of 28 pixels and more."""


def draw_transformations(variant: str, n: int, side: int, seed: int) -> Tensor:
    """Sampling matrices [n, 2, 3] of a variant, one per image, drawn with the split's own seed.

    They are drawn for the whole split, before any subset is taken: image i has the same angle in
    every run. Seeds and order of the draws are those of the public MNIST code of Immer et al.
    (2022), which gives the same angles and factors; shifts differ by 1/28, since here they are
    exact in pixels.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(limit: float) -> Tensor:
        signed = torch.rand(n, generator=generator) * 2 - 1
        return signed * limit

    zero = torch.zeros(n)
    one = torch.ones(n)
    if variant in ("r90", "r180"):
        degrees = float(variant[1:])
        angle = uniform(math.radians(degrees))
        cos = torch.cos(angle)
        sin = torch.sin(angle)
        rows = (cos, -sin, zero, sin, cos, zero)
    elif variant == "translated":
        # On smaller images 8 pixels would leave nothing to see: there the shift is the same
        # fraction, 8/28.
        pixels = min(MAX_SHIFT, side * MAX_SHIFT / 28)
        limit = 2 * pixels / (side - 1)
        right = uniform(limit)
        down = uniform(limit)
        rows = (one, zero, right, zero, one, down)
    elif variant == "scaled":
        factor = torch.exp(uniform(math.log(2)))
        rows = (factor, zero, zero, zero, factor, zero)
    else:
        raise ValueError(f"variant must be one of {VARIANTS}, not {variant!r}")
    return torch.stack(rows, 1).reshape(n, 2, 3)


def warp(x: Tensor, theta: Tensor) -> Tensor:
    """Images x [n, c, h, w] sampled bilinearly at affine grids theta [n, 2, 3]; 0 outside."""
    grid = F.affine_grid(theta.to(x), list(x.shape), align_corners=True)
    warped = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
    # Weights of the four neighbours may add up to a little more than 1 in floating point.
    return warped.clamp_(0, 1)
