"""Classes, with softmax outputs; one class axis, any number of further axes (pixels, tokens).

With class probabilities p the curvature is Lambda = diag(p) - p p^T. Its roots, all in log space so
that their derivatives stay finite when the softmax saturates:

    fisher      U = diag(sqrt p) - p sqrt(p)^T:  column r is sqrt(p_r) d log p_r / df
    symmetric   U = Lambda^{1/2}
    eigen       U = V E^{1/2}, columns by decreasing eigenvalue

Lambda ignores a common shift of the outputs, so C - 1 contrasts Q (orthonormal, orthogonal to the
shift) carry all of it: Q^T Lambda Q = T T^T with T = Q^T U W, U the Fisher root and W the C - 1
directions orthogonal to its null vector.

Any partition of the columns of a true root gives a lower bound of the evidence. The published
estimator ("paper") takes the sub-block of Lambda at the chosen outputs instead, p_c (1 - p_c) for a
single one, which is not a bound: with one datum, two classes and J P0^-1 J^T = q [[1, -1], [-1,
1]], Lambda = a [[1, -1], [-1, 1]], the exact determinant is 1 + 4 q a, the product over single
outputs (1 + q a)^2, which is smaller whenever 0 < q a < 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asdl_marglik import eigen_root, psd_sqrt
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood.base import Likelihood, Root


class Categorical(Likelihood):
    """y in {0, ..., C - 1} with logits f [n, C], or f [n, C, ...] with targets [n, ...], as in
    `cross_entropy`.
    """

    constant_log_prob = True
    discrete = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        log_p, y = self._log_p(f), y.reshape(len(f), -1)
        if y.shape[1] != log_p.shape[1] or y.is_floating_point():
            raise MarglikError(
                f"expected integer class indices of shape {(len(f), *f.shape[2:])}, got "
                f"{tuple(y.shape)} of {y.dtype}"
            )
        if y.numel() and not (int(y.min()) >= 0 and int(y.max()) < f.shape[1]):
            raise MarglikError(
                f"class indices must be in 0..{f.shape[1] - 1}, got {int(y.min())}..{int(y.max())}"
            )
        return log_p.gather(2, y.unsqueeze(2)).sum((1, 2))

    def predict(self, f: Tensor) -> Tensor:
        return f.softmax(1)

    def _log_p(self, f: Tensor) -> Tensor:
        """Log probabilities [n, T, V] at every position."""
        if f.dim() < 2:
            raise MarglikError(f"expected logits [n, C, ...], got {tuple(f.shape)}")
        return f.flatten(2).log_softmax(1).mT if f.dim() > 2 else f.log_softmax(1).unsqueeze(1)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        p = self._log_p(f).exp()
        return self._embed(torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2))

    def contrasts(self, shape: torch.Size) -> Tensor | None:
        v, t = shape[0], shape[1:].numel()
        if v < 2:
            return None
        return torch.kron(_contrasts(v).mT.contiguous(), torch.eye(t, dtype=torch.float64))

    def contrast_root(self, f: Tensor, y: Tensor) -> Tensor:
        log_p = self._log_p(f)
        p, root_p = log_p.exp(), torch.exp(log_p / 2)
        # a reflection takes the null vector sqrt(p) to the last axis; its other columns are W
        last = torch.nn.functional.one_hot(torch.tensor(p.shape[2] - 1), p.shape[2]).to(p)
        normal = root_p + last
        normal = normal / normal.norm(dim=2, keepdim=True)
        fisher = torch.diag_embed(root_p) - p.unsqueeze(3) * root_p.unsqueeze(2)
        reflected = fisher - 2 * (fisher @ normal.unsqueeze(3)) * normal.unsqueeze(2)
        return self._embed(_contrasts(p.shape[2]).to(p).mT @ reflected[..., :-1])

    def _embed(self, blocks: Tensor) -> Tensor:
        """Blocks [n, T, V, V] per position as one matrix over the flattened outputs [n, V T, V
        T].
        """
        n, t, v, _ = blocks.shape
        full = torch.diag_embed(blocks.permute(0, 2, 3, 1))  # [n, V, V, T, T]
        return full.permute(0, 1, 3, 2, 4).reshape(n, v * t, v * t)

    def root(self, f: Tensor, y: Tensor, kind: Root, columns: Tensor) -> Tensor:
        log_p = self._log_p(f)
        p, (n, t, v) = log_p.exp(), log_p.shape
        if kind == "fisher":
            roots = torch.diag_embed(torch.exp(log_p / 2)) - p.unsqueeze(3) * torch.exp(
                log_p / 2
            ).unsqueeze(2)
        else:
            hessian = torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2)
            roots = eigen_root(hessian) if kind == "eigen" else psd_sqrt(hessian)
        position, label = columns % t, columns // t
        index = torch.arange(n, device=f.device).unsqueeze(1)
        chosen = roots[index, position, :, label]  # [n, K, V]
        at_position = torch.nn.functional.one_hot(position, t).to(chosen)  # [n, K, T]
        return torch.einsum("nkv,nkt->nvtk", chosen, at_position).reshape(n, v * t, -1)

    def root_product(self, f: Tensor, y: Tensor, xi: Tensor) -> Tensor:
        """sqrt(p) xi - p (sqrt(p) . xi): the Fisher root without its matrix."""
        p = f.softmax(1)
        scaled = torch.exp(f.log_softmax(1) / 2) * xi
        return scaled - p * scaled.sum(2, keepdim=True)

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        p = f.softmax(1)
        return p * (v - (p * v).sum(2, keepdim=True))

    def block_root(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """diag(sqrt p) - c p sqrt(p)^T, c = 1 / (1 + sqrt(1 - sum p)), over the chosen outputs of
        each position.
        """
        log_p = self._log_p(f)
        n, t, v = log_p.shape
        position, label = columns % t, columns // t
        index = torch.arange(n, device=f.device).unsqueeze(1)
        chosen = log_p[index, position, label]  # [n, K]
        selected = torch.zeros(n, t, v, dtype=torch.bool, device=f.device)
        selected[index, position, label] = True
        rest = log_p.masked_fill(selected, -torch.inf)
        some_left = (~selected).any(2)
        # logsumexp of nothing has no derivative
        safe = rest.masked_fill(~some_left.unsqueeze(2), 0.0)
        root_rest = torch.exp(safe.logsumexp(2) / 2) * some_left  # sqrt(1 - sum p)
        c = (1 / (1 + root_rest)).gather(1, position)  # [n, K]
        same = (position.unsqueeze(2) == position.unsqueeze(1)).to(chosen.dtype)
        root_p = torch.exp(chosen / 2)
        return (
            torch.diag_embed(root_p) - (c * chosen.exp()).unsqueeze(2) * root_p.unsqueeze(1) * same
        )


def _contrasts(v: int) -> Tensor:
    """Orthonormal contrasts [V, V - 1] (Helmert): column r compares output r + 1 with the mean of
    those before.
    """
    q = (
        torch.triu(torch.ones(v, v - 1, dtype=torch.float64))
        - torch.diag(torch.arange(1.0, v), -1)[:, :-1]
    )
    return q / q.norm(dim=0)
