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
from torch.nn.functional import one_hot

from asdl_marglik import eigen_root, psd_sqrt
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood.base import Likelihood, Root, probit_scaled


class Categorical(Likelihood):
    """y in {0, ..., C - 1} with logits f [n, C] or f [n, C, ...], as in `cross_entropy`.

    Targets are [n] or [n, ...]. At every position Lambda = diag(p) - p p^T, p = softmax(f).

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
    """

    constant_log_prob = True
    discrete = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        log_p = self._log_p(f)
        y = y.reshape(len(f), -1)
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

    def predict_probit(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.predict(probit_scaled(f, variance))

    def _log_p(self, f: Tensor) -> Tensor:
        """Log probabilities [n, T, V] at every position."""
        if f.dim() < 2:
            raise MarglikError(f"expected logits [n, C, ...], got {tuple(f.shape)}")
        if f.dim() == 2:
            return f.log_softmax(1).unsqueeze(1)
        return f.flatten(2).log_softmax(1).mT

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        p = self._log_p(f).exp()
        return self._embed(_curvature(p))

    def contrasts(self, shape: torch.Size) -> Tensor | None:
        classes = shape[0]
        positions = shape[1:].numel()
        if classes < 2:
            return None
        Q = _contrasts(classes)
        return torch.kron(Q.mT.contiguous(), torch.eye(positions, dtype=torch.float64))

    def contrast_root(self, f: Tensor, y: Tensor) -> Tensor:
        log_p = self._log_p(f)
        classes = log_p.shape[2]
        root_p = torch.exp(log_p / 2)
        # a reflection takes the null vector sqrt(p) to the last axis; its other columns are W
        last = one_hot(torch.tensor(classes - 1), classes).to(log_p)
        normal = root_p + last
        normal = normal / normal.norm(dim=2, keepdim=True)
        U = _fisher_root(log_p)
        reflected = U - 2 * (U @ normal.unsqueeze(3)) * normal.unsqueeze(2)
        Q = _contrasts(classes).to(log_p)
        return self._embed(Q.mT @ reflected[..., :-1])

    def _embed(self, blocks: Tensor) -> Tensor:
        """Matrices [n, T, V, V] of all positions as one over the outputs [n, V T, V T]."""
        n, positions, classes, _ = blocks.shape
        size = classes * positions
        full = torch.diag_embed(blocks.permute(0, 2, 3, 1))  # [n, V, V, T, T]
        return full.permute(0, 1, 3, 2, 4).reshape(n, size, size)

    def root(self, f: Tensor, y: Tensor, kind: Root, columns: Tensor) -> Tensor:
        log_p = self._log_p(f)
        n, positions, classes = log_p.shape
        if kind == "fisher":
            U = _fisher_root(log_p)
        elif kind == "eigen":
            U = eigen_root(_curvature(log_p.exp()))
        else:
            U = psd_sqrt(_curvature(log_p.exp()))
        position, label = columns % positions, columns // positions
        index = torch.arange(n, device=f.device).unsqueeze(1)
        chosen = U[index, position, :, label]  # [n, K, V]
        at_position = one_hot(position, positions).to(chosen)  # [n, K, T]
        by_position = torch.einsum("nkv,nkt->nvtk", chosen, at_position)
        return by_position.reshape(n, classes * positions, -1)

    def root_product(self, f: Tensor, y: Tensor, xi: Tensor) -> Tensor:
        """sqrt(p) xi - p (sqrt(p) . xi): the Fisher root times xi, without its matrix.

        Args:
            f: logits [n, C] or [n, C, ...].
            y: targets, which the root does not depend on.
            xi: k vectors, each shaped as the outputs [k, n, ...].
        """
        p = f.softmax(1)
        scaled = torch.exp(f.log_softmax(1) / 2) * xi
        return scaled - p * scaled.sum(2, keepdim=True)

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        p = f.softmax(1)
        return p * (v - (p * v).sum(2, keepdim=True))

    def block_root(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """diag(sqrt p) - c p sqrt(p)^T over the chosen outputs of each position.

        c = 1 / (1 + sqrt(1 - sum p)), the sum over the chosen outputs of the position.

        Args:
            f: logits [n, C] or [n, C, ...].
            y: targets, which the root does not depend on.
            columns: numbers of the outputs of each datum [n, K].
        """
        log_p = self._log_p(f)
        positions = log_p.shape[1]
        position, label = columns % positions, columns // positions
        index = torch.arange(len(log_p), device=f.device).unsqueeze(1)
        chosen = log_p[index, position, label]  # [n, K]
        selected = torch.zeros_like(log_p, dtype=torch.bool, requires_grad=False)
        selected[index, position, label] = True
        c = (1 / (1 + _root_of_rest(log_p, selected))).gather(1, position)  # [n, K]
        same_position = (position.unsqueeze(2) == position.unsqueeze(1)).to(chosen.dtype)
        root_p = torch.exp(chosen / 2)
        scaled_p = c * chosen.exp()
        outer = scaled_p.unsqueeze(2) * root_p.unsqueeze(1)
        return torch.diag_embed(root_p) - outer * same_position


def _curvature(p: Tensor) -> Tensor:
    """Lambda = diag(p) - p p^T [n, T, V, V] of class probabilities p [n, T, V]."""
    return torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2)


def _fisher_root(log_p: Tensor) -> Tensor:
    """U = diag(sqrt p) - p sqrt(p)^T [n, T, V, V] of log probabilities [n, T, V]."""
    root_p = torch.exp(log_p / 2)
    return torch.diag_embed(root_p) - log_p.exp().unsqueeze(3) * root_p.unsqueeze(2)


def _root_of_rest(log_p: Tensor, selected: Tensor) -> Tensor:
    """sqrt(1 - sum p) [n, T], the sum over the selected classes of each position [n, T, V]."""
    rest = log_p.masked_fill(selected, -torch.inf)
    some_left = (~selected).any(2)
    # logsumexp of nothing has no derivative
    safe = rest.masked_fill(~some_left.unsqueeze(2), 0.0)
    return torch.exp(safe.logsumexp(2) / 2) * some_left


def _contrasts(classes: int) -> Tensor:
    """Helmert's orthonormal contrasts Q [V, V - 1]: a class against the mean of those before."""
    before = torch.triu(torch.ones(classes, classes - 1, dtype=torch.float64))
    against = torch.diag(torch.arange(1.0, classes), -1)[:, :-1]
    Q = before - against
    return Q / Q.norm(dim=0)
