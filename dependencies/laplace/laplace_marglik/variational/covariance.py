"""Covariances of pretrained weights: a diagonal and a low-rank factor, inverted by Woodbury's
formula.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError


class LowRankCovariance:
    """Sigma = D + U U^T of some weights, with D a positive diagonal and U [d, K].

        C = I + U^T D^-1 U,     log|Sigma| = sum log D + log|C|
        x^T Sigma^-1 x = x^T D^-1 x - |L^-1 U^T D^-1 x|^2        (C = L L^T)
        [Sigma^-1]_jj  = 1/D_jj - |L^-1 U_j / D_jj|^2

    diagonal: weight name -> tensor shaped as the weight. factor: weight name -> tensor [*shape, K];
    None for U = 0.
    """

    def __init__(self, diagonal: Mapping[str, Tensor], factor: Mapping[str, Tensor] | None = None):
        if not diagonal:
            raise MarglikError("a covariance needs the diagonal of at least one weight, got none")
        for name, d in diagonal.items():
            if not (d.isfinite().all() and (d > 0).all()):
                raise MarglikError(
                    f"the diagonal of a covariance must be positive and finite; that of {name!r} "
                    "is not"
                )
        self.diagonal = {name: d.detach().double() for name, d in diagonal.items()}
        self._scaled = self._checked(factor or {})  # D^-1 U
        self.rank = next(iter(self._scaled.values())).shape[1] if self._scaled else 0
        inner = torch.eye(
            self.rank, dtype=torch.float64, device=next(iter(self.diagonal.values())).device
        )
        for name, scaled in self._scaled.items():
            inner = inner + scaled.mT @ (self.diagonal[name].flatten().unsqueeze(1) * scaled)
        self._root = torch.linalg.cholesky(inner)
        self.log_det = torch.stack([d.log().sum() for d in self.diagonal.values()]).sum()
        self.log_det = self.log_det + 2 * self._root.diagonal().log().sum()
        self.inverse_diagonal = {name: self._inverse_diagonal(name) for name in self.diagonal}

    @classmethod
    def swag(
        cls, variance: Mapping[str, Tensor], deviations: Mapping[str, Tensor], jitter: float = 0.1
    ) -> LowRankCovariance:
        """Sigma = diag(variance)/2 + jitter I + Q Q^T / (2K - 2), from the variances of the weights
        along a training run and K of their deviations Q [*shape, K] (Maddox et al. 2019; as prior:
        Shwartz-Ziv et al. 2022).
        """
        ranks = {q.shape[-1] for q in deviations.values()}
        if len(ranks) != 1 or min(ranks) < 2:
            raise MarglikError(
                "deviations need a last axis of the same length K >= 2, got lengths "
                f"{sorted(ranks)}"
            )
        scale = (2 * ranks.pop() - 2) ** -0.5
        return cls(
            {name: s.double() / 2 + jitter for name, s in variance.items()},
            {name: scale * q.double() for name, q in deviations.items()},
        )

    def quadratic(self, x: Mapping[str, Tensor]) -> Tensor:
        """x^T Sigma^-1 x, in float64."""
        plain = torch.stack(
            [(x[name].double().square() / d).sum() for name, d in self.diagonal.items()]
        ).sum()
        if not self.rank:
            return plain
        inner = torch.stack(
            [s.mT @ x[name].double().flatten() for name, s in self._scaled.items()]
        ).sum(0)
        return (
            plain
            - torch.linalg.solve_triangular(self._root, inner.unsqueeze(1), upper=False)
            .square()
            .sum()
        )

    def trace(self, variance: Mapping[str, Tensor]) -> Tensor:
        """tr(Sigma^-1 diag(variance)), each variance a number or one per element."""
        return torch.stack(
            [(d * variance[name].double()).sum() for name, d in self.inverse_diagonal.items()]
        ).sum()

    def _checked(self, factor: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if factor and set(factor) != set(self.diagonal):
            raise MarglikError(
                f"factor and diagonal must name the same weights, got {sorted(factor)} and "
                f"{sorted(self.diagonal)}"
            )
        scaled = {}
        for name, u in factor.items():
            d = self.diagonal[name]
            if u.shape[:-1] != d.shape or u.shape[-1] != next(iter(factor.values())).shape[-1]:
                raise MarglikError(
                    f"the factor of {name!r} must be {(*d.shape, 'K')}, K common, got "
                    f"{tuple(u.shape)}"
                )
            scaled[name] = (u.detach().to(d) / d.unsqueeze(-1)).reshape(-1, u.shape[-1])
        return scaled

    def _inverse_diagonal(self, name: str) -> Tensor:
        d = self.diagonal[name]
        if not self.rank:
            return 1 / d
        rows = torch.linalg.solve_triangular(self._root, self._scaled[name].mT, upper=False)
        return 1 / d - rows.square().sum(0).reshape(d.shape)
