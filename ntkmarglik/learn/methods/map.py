"""The baseline: weights at the mode of the posterior under a fixed prior."""

from __future__ import annotations

from ntkmarglik.learn.methods.base import Method, Problem
from ntkmarglik.learn.methods.mode import MeasuredByBlocks


class Map(MeasuredByBlocks):
    """Fixed hyperparameters; the evidence has the curvature of the method it is compared with."""

    name = "map"
    label = "MAP"
    colour = "#777777"
    learns_by = "nothing"

    def baseline(self, fixed: Problem) -> Method:
        return Map(fixed, self.structure)
