"""A residual network with norm layers, of the widths of the Fixup one, to show they are handled.

Groups, not batches, are normalised: with batch norm in training mode an output depends on the other
inputs of the batch, and the Jacobian of one data point, on which the evidence rests, is not
defined.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ntkmarglik.problem.models.fixup import conv, init_conv_
from ntkmarglik.problem.models.resnet import blocks_per_stage

MAX_GROUPS = 8


def group_norm(width: int) -> nn.GroupNorm:
    """Group norm with as many groups, up to 8, as divide the width."""
    return nn.GroupNorm(math.gcd(MAX_GROUPS, width), width)


class NormBlock(nn.Module):
    """Two normalised 3x3 convolutions; the shortcut is a 1x1 one where the shape changes."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(n_in, width, 3, stride)
        self.norm1 = group_norm(width)
        self.conv2 = conv(width, width, 3)
        self.norm2 = group_norm(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or n_in != width:
            self.shortcut = nn.Sequential(conv(n_in, width, 1, stride), group_norm(width))

    def forward(self, x: Tensor) -> Tensor:
        branch = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(branch)) + self.shortcut(x))


class NormResNet(nn.Module):
    """Four stages of `n` blocks of widths w, 2w, 4w, 8w; mean over pixels, linear.

    Shapes: [n, c, h, w] to [n, C].
    """

    def __init__(self, n_channels: int, n_classes: int, n: int, width: int) -> None:
        super().__init__()
        self.stem = conv(n_channels, width, 3)
        self.norm = group_norm(width)
        blocks, n_in = [], width
        for stage in range(4):
            for i in range(n):
                blocks.append(NormBlock(n_in, width << stage, 2 if stage and i == 0 else 1))
                n_in = width << stage
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(n_in, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                init_conv_(module)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(self.stages(x).mean((2, 3)))


def resnet_norm(
    input_shape: tuple[int, int, int], n_classes: int, depth: int, width: int
) -> nn.Module:
    """ResNet of depth 8n + 2 (18 if not set) with group norm; first-stage width 16 if not set."""
    return NormResNet(input_shape[0], n_classes, blocks_per_stage(depth), width or 16)
