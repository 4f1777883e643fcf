"""Weights as one flat vector, and the prior's groups as pieces of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from asdl_marglik import Groups, matches
from laplace_marglik.errors import MarglikError


class Layout:
    """The places of weights and prior groups in a flat vector of P numbers.

    Args:
        weights: tensors by parameter name.
        groups: the prior's group of each weight, a number or a slice of one number per element.
        n_groups: G.
    """

    def __init__(self, weights: Mapping[str, Tensor], groups: Groups, n_groups: int):
        self.shapes = {name: w.shape for name, w in weights.items()}
        self.pieces: dict[str, slice] = {}
        start = 0
        for name, w in weights.items():
            self.pieces[name] = slice(start, start + w.numel())
            start += w.numel()
        self.size = start
        self.groups = {name: groups[name] for name in weights}
        self.n_groups = n_groups

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector [P] of the weights' tensors."""
        return torch.cat([tensors[name].detach().flatten() for name in self.pieces])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors of each weight in a vector [P], as views."""
        return {name: vector[piece].view(self.shapes[name]) for name, piece in self.pieces.items()}

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Inner products [k, G] of vectors [k, P], group by group, in float64."""
        sums = torch.zeros(len(a), self.n_groups, dtype=torch.float64, device=a.device)
        for name, piece in self.pieces.items():
            group = self.groups[name]
            product = a[:, piece] * b[:, piece]
            if isinstance(group, int):
                sums[:, group] += product.sum(1, dtype=torch.float64)
            else:
                sums[:, group] += product.double()
        return sums

    def add_(self, out: Tensor, vectors: Tensor, factors: Tensor, sign: float = 1.0) -> Tensor:
        """out [k, P] += sign * factors [G] * vectors [k, P], group by group, in place."""
        for name, piece in self.pieces.items():
            factor = (sign * factors[self.groups[name]]).to(out)
            out[:, piece] += factor * vectors[:, piece]
        return out

    def divided_(self, vectors: Tensor, factors: Tensor) -> Tensor:
        """vectors [k, P] /= factors [G], group by group, in place."""
        for name, piece in self.pieces.items():
            vectors[:, piece] /= factors[self.groups[name]].to(vectors)
        return vectors

    @cached_property
    def counts(self) -> Tensor:
        """Weights in each group [G], in float64; 0 for a group of excluded weights."""
        counts = torch.zeros(self.n_groups, dtype=torch.float64)
        for name, piece in self.pieces.items():
            group = self.groups[name]
            counts[group] += piece.stop - piece.start if isinstance(group, int) else 1
        return counts


def included(weights: dict[str, nn.Parameter], exclude: list[str]) -> dict[str, nn.Parameter]:
    """The weights whose names fit none of the patterns; each pattern must fit some weight."""
    for pattern in exclude:
        if not any(matches(name, [pattern]) for name in weights):
            raise MarglikError(
                f"exclude pattern {pattern!r} fits no weight; there are {list(weights)}"
            )
    remaining = {name: w for name, w in weights.items() if not matches(name, exclude)}
    if not remaining:
        raise MarglikError(f"exclude={exclude} leaves no weights")
    return remaining
