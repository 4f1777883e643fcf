"""Fixup Wide ResNet 16-k: pre-activation blocks in three wide stages, no normalisation layers."""

import torch.nn.functional as F
from torch import Tensor, nn

from ntkmarglik.problem.models.fixup import (
    Scale,
    Shift,
    conv,
    init_branch_,
    init_conv_,
    zero_linear,
)

# depth 16 = 3 stages of 2 blocks of 2 convolutions, 3 shortcuts and the first convolution
BLOCKS_PER_STAGE = 2


class WideBlock(nn.Module):
    """A rectifier before each of two 3x3 convolutions; a 1x1 shortcut where the width changes."""

    def __init__(self, n_in: int, width: int, stride: int, n_blocks: int) -> None:
        super().__init__()
        self.shift_before_conv1 = Shift()
        self.conv1 = conv(n_in, width, 3, stride)
        self.shift_after_conv1 = Shift()
        self.shift_before_conv2 = Shift()
        self.conv2 = conv(width, width, 3)
        self.scale = Scale()
        self.shift_after_conv2 = Shift()
        init_branch_([self.conv1, self.conv2], n_blocks)
        self.shortcut: nn.Conv2d | None = None
        if stride > 1 or n_in != width:
            self.shortcut = conv(n_in, width, 1, stride)
            init_conv_(self.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.shift_before_conv1(x))
        branch = self.shift_before_conv2(F.relu(self.shift_after_conv1(self.conv1(active))))
        branch = self.shift_after_conv2(self.scale(self.conv2(branch)))
        return branch + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """Channels 16, 16k, 32k, 64k; mean over pixels, and a linear layer that starts at 0.

    Shapes: [n, c, h, w] to [n, n_classes].
    """

    def __init__(self, n_channels: int, n_classes: int, widen: int) -> None:
        super().__init__()
        self.stem = conv(n_channels, 16, 3)
        self.shift_after_stem = Shift()
        init_conv_(self.stem)
        blocks, n_in = [], 16
        for stage in range(3):
            for i in range(BLOCKS_PER_STAGE):
                width = 16 * widen << stage
                blocks.append(
                    WideBlock(n_in, width, 2 if stage and i == 0 else 1, 3 * BLOCKS_PER_STAGE)
                )
                n_in = width
        self.stages = nn.Sequential(*blocks)
        self.shift_before_head = Shift()
        self.head = zero_linear(n_in, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.shift_after_stem(self.stem(x)))
        x = F.relu(x).mean((2, 3))
        return self.head(self.shift_before_head(x))


def wrn(input_shape: tuple[int, int, int], n_classes: int, width: int) -> nn.Module:
    """Fixup Wide ResNet 16-k, where `width` is the widening factor k, 4 if not set."""
    return WideResNet(input_shape[0], n_classes, width or 4)
