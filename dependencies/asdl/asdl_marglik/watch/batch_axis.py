"""Where the data points are in an activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Activations of a datum in a batch and alone agree to rounding, which in float32 and a deep network
# is far below these tolerances; activations of another datum or position are far above.
SAME_ENTRY = 1e-3  # relative to the entry
SAME_ZERO = 1e-4  # relative to the largest entry, for entries close to zero


@dataclass(frozen=True)
class Layout:
    """The axis of an activation that holds the data points.

    They may be flattened together with positions. `[T, batch, D]` has axis 1; `[batch * T, D]` has
    axis 0; `[T * batch, D]`, as attention flattens it, has axis 0 and a fast batch.

    Args:
        axis: the axis that holds the data points.
        fast: whether the data points vary faster than the positions flattened together with them.
        single: whether the layout was seen with one position per datum only, where fast and slow
            are the same; then it holds for one position, not for more.
    """

    axis: int
    fast: bool = False
    single: bool = False

    def standard(self, t: Tensor, batch: int, n: int) -> Tensor:
        """[..., batch * m, ...] -> [n, Q, ...] with Q = (batch / n) * m repetitions per datum.

        Args:
            t: an activation, with batch * m entries on `axis`.
            batch: number of inputs of the network, augmented copies included.
            n: number of data points.
        """
        t = t.movedim(self.axis, 0)
        m = t.shape[0] // batch
        if self.fast:
            t = t.unflatten(0, (m, batch)).transpose(0, 1)
        else:
            t = t.unflatten(0, (batch, m))
        return t.reshape(n, (batch // n) * m, *t.shape[2:])


def find_layout(joint: Tensor, singles: tuple[Tensor, Tensor]) -> Layout | None:
    """The layout of an activation; None if it does not carry the batch.

    Args:
        joint: the activation for two data points.
        singles: the same activation for each of them alone.
    """
    axis = _doubled_axis(joint, singles)
    if axis is None:
        return None
    alone = torch.stack([single.movedim(axis, 0) for single in singles])
    atol = SAME_ZERO * float(alone.abs().max())
    for fast in (False, True):
        parts = Layout(axis, fast).standard(joint, 2, 2)
        if torch.allclose(parts, alone, rtol=SAME_ENTRY, atol=atol):
            return Layout(axis, fast, single=parts.shape[1] == 1)
    return None


def _doubled_axis(joint: Tensor, singles: tuple[Tensor, Tensor]) -> int | None:
    """The one axis that is twice as long for two data points as for one, if there is one."""
    first, second = singles
    if joint.dim() != first.dim() or first.shape != second.shape:
        return None
    sizes = zip(joint.shape, first.shape, strict=True)
    axes = [axis for axis, (two, one) in enumerate(sizes) if two != one]
    if len(axes) != 1:
        return None
    axis = axes[0]
    return axis if joint.shape[axis] == 2 * first.shape[axis] else None
