"""Where the data points are in an activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The batch sits on `axis`, possibly flattened together with other positions that vary slower
    (`fast` batch) or faster.

    `[T, batch, D]` has axis 1; `[batch * T, D]` axis 0; `[T * batch, D]`, as attention flattens it,
    axis 0 and fast.
    """

    axis: int
    fast: bool = False
    # found on one position per datum, where slow and fast are the same: for no more than one
    single: bool = False

    def standard(self, t: Tensor, batch: int, n: int) -> Tensor:
        """[..., batch * m, ...] -> [n, Q, ...] with Q = (batch / n) * m repetitions per datum."""
        t = t.movedim(self.axis, 0)
        m = t.shape[0] // batch
        t = t.unflatten(0, (m, batch)).transpose(0, 1) if self.fast else t.unflatten(0, (batch, m))
        return t.reshape(n, (batch // n) * m, *t.shape[2:])


def find_layout(joint: Tensor, singles: tuple[Tensor, Tensor]) -> Layout | None:
    """The layout of an output of two data points, from the outputs of each alone; None: it does not
    carry the batch.
    """
    shape, single = joint.shape, singles[0].shape
    if len(shape) != len(single) or singles[1].shape != single:
        return None
    axes = [i for i, (two, one) in enumerate(zip(shape, single, strict=True)) if two != one]
    if len(axes) != 1 or shape[axes[0]] != 2 * single[axes[0]]:
        return None
    for layout in (Layout(axes[0]), Layout(axes[0], fast=True)):
        parts = layout.standard(joint, 2, 2)
        alone = torch.stack([s.movedim(layout.axis, 0) for s in singles])
        if torch.allclose(parts, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max())):
            return Layout(layout.axis, layout.fast, single=parts.shape[1] == 1)
    return None
