"""Covariances of pretrained weights, diagonal plus low rank, inverted by Woodbury's formula."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError


class LowRankCovariance:
    """Sigma = D + F F^T of d weights, with D a positive diagonal and F [d, K] a factor.

        C = I + F^T D^-1 F,     log|Sigma| = sum log D + log|C|
        x^T Sigma^-1 x = x^T D^-1 x - |L^-1 F^T D^-1 x|^2        (C = L L^T)
        [Sigma^-1]_jj  = 1/D_jj - |L^-1 F_j / D_jj|^2

    Args:
        diagonal: D of each weight by name, shaped as the weight.
        factor: F of each weight by name, [*shape, K] with the same K; None for F = 0.
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
        self._scaled = self._scaled_factor(factor or {})  # D^-1 F
        self.rank = next(iter(self._scaled.values())).shape[1] if self._scaled else 0
        device = next(iter(self.diagonal.values())).device
        C = torch.eye(self.rank, dtype=torch.float64, device=device)
        for name, scaled in self._scaled.items():
            D = self.diagonal[name].flatten().unsqueeze(1)
            C = C + scaled.mT @ (D * scaled)
        self._L = torch.linalg.cholesky(C)
        log_det_diagonal = torch.stack([d.log().sum() for d in self.diagonal.values()]).sum()
        self.log_det = log_det_diagonal + 2 * self._L.diagonal().log().sum()
        self.inverse_diagonal = {name: self._inverse_diagonal(name) for name in self.diagonal}

    @classmethod
    def swag(
        cls, variance: Mapping[str, Tensor], deviations: Mapping[str, Tensor], jitter: float = 0.1
    ) -> LowRankCovariance:
        """Sigma = diag(variance)/2 + jitter I + Q Q^T / (2K - 2), from a training run.

        SWAG (Maddox et al. 2019); as a prior: Shwartz-Ziv et al. 2022.

        Args:
            variance: variances along the run, by weight name, shaped as the weight.
            deviations: K deviations Q from their mean, by weight name, [*shape, K].
            jitter: added to the diagonal.
        """
        ranks = {q.shape[-1] for q in deviations.values()}
        if len(ranks) != 1 or min(ranks) < 2:
            raise MarglikError(
                "deviations need a last axis of the same length K >= 2, got lengths "
                f"{sorted(ranks)}"
            )
        scale = (2 * ranks.pop() - 2) ** -0.5
        diagonal = {name: s.double() / 2 + jitter for name, s in variance.items()}
        factor = {name: scale * q.double() for name, q in deviations.items()}
        return cls(diagonal, factor)

    def quadratic(self, x: Mapping[str, Tensor]) -> Tensor:
        """x^T Sigma^-1 x, in float64.

        Args:
            x: tensors by weight name, shaped as the weights.
        """
        terms = [(x[name].double().square() / d).sum() for name, d in self.diagonal.items()]
        diagonal_part = torch.stack(terms).sum()
        if not self.rank:
            return diagonal_part
        inner = [s.mT @ x[name].double().flatten() for name, s in self._scaled.items()]
        column = torch.stack(inner).sum(0).unsqueeze(1)  # F^T D^-1 x
        correction = torch.linalg.solve_triangular(self._L, column, upper=False)
        return diagonal_part - correction.square().sum()

    def trace(self, variance: Mapping[str, Tensor]) -> Tensor:
        """tr(Sigma^-1 diag(variance)), in float64.

        Args:
            variance: by weight name, a number or one value per element.
        """
        terms = [
            (inverse * variance[name].double()).sum()
            for name, inverse in self.inverse_diagonal.items()
        ]
        return torch.stack(terms).sum()

    def _scaled_factor(self, factor: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """D^-1 F [numel, K] of each weight."""
        if factor and set(factor) != set(self.diagonal):
            raise MarglikError(
                f"factor and diagonal must name the same weights, got {sorted(factor)} and "
                f"{sorted(self.diagonal)}"
            )
        scaled = {}
        for name, f in factor.items():
            d = self.diagonal[name]
            rank = next(iter(factor.values())).shape[-1]
            if f.shape[:-1] != d.shape or f.shape[-1] != rank:
                raise MarglikError(
                    f"the factor of {name!r} must be {(*d.shape, 'K')}, K common, got "
                    f"{tuple(f.shape)}"
                )
            quotient = f.detach().to(d) / d.unsqueeze(-1)
            scaled[name] = quotient.reshape(-1, rank)
        return scaled

    def _inverse_diagonal(self, name: str) -> Tensor:
        """The diagonal of Sigma^-1 of a weight, shaped as the weight."""
        d = self.diagonal[name]
        if not self.rank:
            return 1 / d
        solved = torch.linalg.solve_triangular(self._L, self._scaled[name].mT, upper=False)
        correction = solved.square().sum(0)
        return 1 / d - correction.reshape(d.shape)
