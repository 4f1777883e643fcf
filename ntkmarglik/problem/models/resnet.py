"""Fixup residual networks: basic blocks (`resnet`) and bottleneck blocks (`resnet50`)."""

import torch.nn.functional as F
from torch import Tensor, nn

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.models.fixup import (
    Scale,
    Shift,
    conv,
    init_branch_,
    init_conv_,
    zero_linear,
)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions.

    The shortcut of a wider block takes every second pixel and pads channels with zeros.
    """

    def __init__(self, n_in: int, width: int, stride: int, n_blocks: int) -> None:
        super().__init__()
        self.stride = stride
        self.n_new = width - n_in
        self.shift_before_conv1 = Shift()
        self.conv1 = conv(n_in, width, 3, stride)
        self.shift_after_conv1 = Shift()
        self.shift_before_conv2 = Shift()
        self.conv2 = conv(width, width, 3)
        self.scale = Scale()
        self.shift_after_conv2 = Shift()
        init_branch_([self.conv1, self.conv2], n_blocks)

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.shift_before_conv1(x)
        branch = F.relu(self.shift_after_conv1(self.conv1(shifted)))
        branch = self.shift_after_conv2(self.scale(self.conv2(self.shift_before_conv2(branch))))
        if self.stride > 1 or self.n_new:
            x = F.pad(shifted[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.n_new))
        return F.relu(branch + x)


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1 with four times as many outputs.

    The shortcut of a first block is a 1x1 convolution.
    """

    expansion = 4

    def __init__(self, n_in: int, width: int, stride: int, n_blocks: int) -> None:
        super().__init__()
        n_out = self.expansion * width
        self.shift_before_conv1 = Shift()
        self.conv1 = conv(n_in, width, 1)
        self.shift_after_conv1 = Shift()
        self.shift_before_conv2 = Shift()
        self.conv2 = conv(width, width, 3, stride)
        self.shift_after_conv2 = Shift()
        self.shift_before_conv3 = Shift()
        self.conv3 = conv(width, n_out, 1)
        self.scale = Scale()
        self.shift_after_conv3 = Shift()
        init_branch_([self.conv1, self.conv2, self.conv3], n_blocks)
        self.shortcut: nn.Conv2d | None = None
        if stride > 1 or n_in != n_out:
            self.shortcut = conv(n_in, n_out, 1, stride)
            init_conv_(self.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.shift_before_conv1(x)
        branch = F.relu(self.shift_after_conv1(self.conv1(shifted)))
        branch = F.relu(self.shift_after_conv2(self.conv2(self.shift_before_conv2(branch))))
        branch = self.shift_after_conv3(self.scale(self.conv3(self.shift_before_conv3(branch))))
        return F.relu(branch + (x if self.shortcut is None else self.shortcut(shifted)))


class FixupResNet(nn.Module):
    """A 3x3 convolution, stages of residual blocks, mean over pixels, linear.

    Each stage doubles the width and halves the size.

    Shapes: [n, c, h, w] to [n, n_classes]. With the last linear layer, the blocks' branches start
    at 0.
    """

    def __init__(
        self, stem: nn.Conv2d, stages: nn.Sequential, n_features: int, n_classes: int
    ) -> None:
        super().__init__()
        self.stem = stem
        self.shift_after_stem = Shift()
        self.stages = stages
        self.shift_before_head = Shift()
        self.head = zero_linear(n_features, n_classes)
        init_conv_(self.stem)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.shift_after_stem(self.stem(x)))
        x = self.stages(x).mean((2, 3))
        return self.head(self.shift_before_head(x))


def blocks_per_stage(depth: int) -> int:
    """Number n of basic blocks in each of four stages of a network of depth 8n + 2."""
    n = max(1, round((depth - 2) / 8))
    if depth != 8 * n + 2:
        raise NtkMarglikError(
            f"depth must be 8n + 2 (10, 18, 26, ..., 50), but is {depth}. Nearest is {8 * n + 2}."
        )
    return n


def resnet(input_shape: tuple[int, int, int], n_classes: int, depth: int, width: int) -> nn.Module:
    """Fixup ResNet of depth 8n + 2: four stages of n basic blocks of widths w (16), 2w, 4w, 8w."""
    width, n = width or 16, blocks_per_stage(depth)
    blocks, n_in = [], width
    for stage in range(4):
        for i in range(n):
            blocks.append(BasicBlock(n_in, width << stage, 2 if stage and i == 0 else 1, 4 * n))
            n_in = width << stage
    return FixupResNet(conv(input_shape[0], width, 3), nn.Sequential(*blocks), n_in, n_classes)


def resnet50(input_shape: tuple[int, int, int], n_classes: int, width: int) -> nn.Module:
    """Fixup ResNet-50 of 3, 4, 6, 3 bottleneck blocks of inner widths w (64), 2w, 4w, 8w.

    The first layer has w/4 = 16 channels: that is how the paper's "16 first-layer channels" and
    "about 23 million parameters" hold at once. Its kernel is 3x3 without stride, for images of 32
    to 64 pixels.
    """
    width = width or 64
    blocks, n_in = [], max(1, width // 4)
    stem = conv(input_shape[0], n_in, 3)
    for stage, n in enumerate((3, 4, 6, 3)):
        for i in range(n):
            blocks.append(Bottleneck(n_in, width << stage, 2 if stage and i == 0 else 1, 16))
            n_in = Bottleneck.expansion * (width << stage)
    return FixupResNet(stem, nn.Sequential(*blocks), n_in, n_classes)
