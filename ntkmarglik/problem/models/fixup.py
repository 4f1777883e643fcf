"""Fixup: scalar shifts and scales in place of normalisation (Zhang, Dauphin and Ma, ICLR 2019)."""

import math

import torch
from torch import Tensor, nn


class Shift(nn.Module):
    """Adds one learned number, at first 0, to every entry."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Scale(nn.Module):
    """Multiplies every entry by one learned number, at first 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def conv(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Convolution without bias that keeps the size (or halves it, rounded up, with stride 2)."""
    return nn.Conv2d(n_in, n_out, kernel, stride, padding=kernel // 2, bias=False)


def init_conv_(layer: nn.Conv2d, factor: float = 1.0) -> None:
    """He start, N(0, 2 / (outputs x kernel area)), with the standard deviation times `factor`."""
    fan = layer.out_channels * math.prod(layer.kernel_size)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / fan) * factor)


def init_branch_(convs: list[nn.Conv2d], n_blocks: int) -> None:
    """Start of a branch of m convolutions among L blocks: He times L^(-1 / (2m - 2)), last 0."""
    for layer in convs[:-1]:
        init_conv_(layer, n_blocks ** (-1 / (2 * len(convs) - 2)))
    nn.init.zeros_(convs[-1].weight)


def zero_linear(n_in: int, n_out: int) -> nn.Linear:
    """Linear layer that starts at 0, so that the network first predicts all classes alike."""
    layer = nn.Linear(n_in, n_out)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
