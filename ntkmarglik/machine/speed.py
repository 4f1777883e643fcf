"""How fast this machine is, to estimate what takes long from what does not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asdl_marglik import STRUCTURES

SIDE = 1000  # of matrices that are timed


def seconds(function: Callable[[], object], patience: float = math.inf) -> float:
    """The shorter of two timings, or the first if it takes long.

    Of one thread it is that thread's own time, whatever else runs.
    """
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    timings: list[float] = []
    for _ in range(2):
        start = clock()
        function()
        timings.append(clock() - start)
        if timings[0] > patience:
            break
    return min(timings)


@dataclass(frozen=True)
class Speed:
    """Seconds per elementary operation on matrices."""

    decompose: float  # an n x n matrix, divided by n^3
    multiply: float  # two n x n matrices, divided by n^3
    copy: float  # an n x n matrix, divided by n^2

    @staticmethod
    def measured(like: Tensor, decompose: Callable[[Tensor], object]) -> Speed:
        """Speed of products in the dtype of `like`, and of decompositions in double."""
        a = torch.rand(SIDE, SIDE, dtype=torch.float64, device=like.device)
        a = a @ a.mT + torch.eye(SIDE, dtype=a.dtype, device=like.device)
        b = a.to(like.dtype)
        return Speed(
            seconds(lambda: decompose(a)) / SIDE**3,
            seconds(lambda: b @ b) / SIDE**3,
            seconds(lambda: a.mT + 1) / SIDE**2,
        )

    def algebra(self, structure: str, rows: int, modules: tuple[int, ...]) -> float:
        """Seconds for the kernels or weight-space matrices of a block; 0 for sums over data.

        modules: parameters of each.
        """
        if STRUCTURES[structure].additive:
            return 0.0
        exact = STRUCTURES[structure].guarantee == "exact"
        blocks = (sum(modules),) if exact else modules
        total = 0.0
        for parameters in blocks:
            # the kernel is square in rows also where there are more of them than parameters
            side = rows if structure == "ntk" else min(rows, parameters)
            # half of a kernel is the mirror image of the other
            mirrored = 0.5 if side == rows else 1.0
            total += mirrored * self.multiply * rows * parameters * side
            total += self.decompose * side**3
        return total
