"""Which rows of U^T J a block contains, in the forms the curvature engine takes.

Single outputs: constant cotangents (one-hot), with the root of the sub-block of Lambda as mixing
afterwards. Used for all outputs (any root gives the same determinant), for diagonal Lambda, and for
the published estimator. Contrasts: as before for all outputs, with fewer cotangents where the
likelihood ignores a direction of the outputs. Mixed: the root of either is part of the cotangents,
where nothing that moves it is differentiated. Root columns: the cotangents are columns of a true
root and depend on the outputs. Gradient rows: they are gradients of log-likelihoods.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.gradient_rows import GradientRows, is_gradient
from laplace_marglik.likelihood import Likelihood
from laplace_marglik.likelihood.base import GradientRoot, Root


@dataclass
class SingleOutputs:
    """Rows of single outputs, mixed by a root of their sub-block of Lambda.

    Args:
        likelihood: whose root.
        shape: of one datum's outputs.
    """

    likelihood: Likelihood
    shape: torch.Size  # of one datum's outputs
    cotangents_follow_outputs = False

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(columns, f.shape[1]).to(f.dtype)

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return self.likelihood.block_root(f.double().reshape(-1, *self.shape), y, columns)


@dataclass
class Contrasts:
    """Rows of all outputs, from the directions that the likelihood does not ignore.

    Args:
        likelihood: whose root.
        shape: of one datum's outputs.
        directions: of the outputs that count [R, C].
    """

    likelihood: Likelihood
    shape: torch.Size
    directions: Tensor
    cotangents_follow_outputs = False

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        return self.directions.to(f).expand(len(f), -1, -1)

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return self.likelihood.contrast_root(f.double().reshape(-1, *self.shape), y)


@dataclass
class Mixed:
    """Rows with nothing left to mix: the root is part of the cotangents.

    These [n, K, C] are smaller than what is made of them, and one can be done with before the next.

    Args:
        rows: in another form.
    """

    rows: Rows
    cotangents_follow_outputs = True

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        cotangents = self.rows.cotangents(f, y, columns)
        mixing = self.rows.mixing(f, y, columns)
        return cotangents if mixing is None else mixing.mT @ cotangents.to(mixing.dtype)

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return None


@dataclass
class RootColumns:
    """Rows of some columns of a true root of Lambda.

    Args:
        likelihood: whose root.
        shape: of one datum's outputs.
        kind: which root.
    """

    likelihood: Likelihood
    shape: torch.Size
    kind: Root
    cotangents_follow_outputs = True

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        return self.likelihood.root(f.double().reshape(-1, *self.shape), y, self.kind, columns).mT

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return None


@dataclass
class NoRows:
    """No rows at all: only outputs are wanted."""

    cotangents_follow_outputs = False

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        return f.new_zeros(len(f), 0, f.shape[1])

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return None


Rows = SingleOutputs | Contrasts | RootColumns | GradientRows


def rows_for(
    likelihood: Likelihood,
    shape: torch.Size,
    root: Root | GradientRoot,
    k: int,
    *,
    contrasts: bool = True,
    samples: int = 1,
) -> Rows:
    """The form in which k of all root columns are computed.

    Args:
        likelihood: whose root.
        shape: of one datum's outputs.
        root: which root.
        k: columns of each datum.
        contrasts: allow the form of fewer cotangents.
        samples: draws of each datum for the sampled root.
    """
    if root == "empirical" or root == "sampled":
        return GradientRows(likelihood, shape, samples if root == "sampled" else None)
    directions = likelihood.contrasts(shape) if contrasts and k == shape.numel() else None
    if directions is not None:
        return Contrasts(likelihood, shape, directions)
    if root == "paper" or likelihood.diagonal or k == shape.numel():
        return SingleOutputs(likelihood, shape)
    return RootColumns(likelihood, shape, root)


def n_root_columns(
    likelihood: Likelihood, shape: torch.Size, root: Root | GradientRoot, samples: int = 1
) -> int:
    """Columns of a root that may differ from zero; the others come last.

    Args:
        likelihood: whose root.
        shape: of one datum's outputs.
        root: which root; only the eigen root has its zero columns last.
        samples: draws of each datum for the sampled root.
    """
    if is_gradient(root):
        return samples if root == "sampled" else 1
    contrasts = likelihood.contrasts(shape) if root == "eigen" and len(shape) == 1 else None
    return shape.numel() if contrasts is None else len(contrasts)


def cotangents_per_datum(rows: Rows, k: int) -> int:
    """Backward passes per datum.

    Args:
        rows: the form of the rows.
        k: root columns of each datum.
    """
    return len(rows.directions) if isinstance(rows, Contrasts) else k


def draw_columns(
    n: int, n_outputs: int, k: int, generator: torch.Generator, *, iid: bool
) -> Tensor:
    """Random distinct columns [n, k].

    Args:
        n: data points.
        n_outputs: root columns that there are.
        k: root columns of each datum.
        generator: of the draws.
        iid: drawn for each data point, instead of the same for all.
    """
    if k == n_outputs:
        return torch.arange(n_outputs).expand(n, -1)
    draws = torch.rand(n if iid else 1, n_outputs, generator=generator).argsort(1)[:, :k]
    return draws if iid else draws.expand(n, -1)


def checked_columns(columns: Tensor, n: int, c: int) -> Tensor:
    """Columns as [n, K], distinct and in range.

    Args:
        columns: [K] or [n, K].
        n: data points.
        c: root columns that there are.
    """
    columns = torch.as_tensor(columns)
    if columns.dim() == 1:
        columns = columns.expand(n, -1)
    if (
        columns.dim() != 2
        or len(columns) != n
        or columns.is_floating_point()
        or not columns.shape[1]
    ):
        raise MarglikError(
            f"columns must be integers [K] or [{n}, K], got {columns.dtype} of shape "
            f"{tuple(columns.shape)}"
        )
    if int(columns.min()) < 0 or int(columns.max()) >= c:
        raise MarglikError(
            f"columns must be in 0..{c - 1}, got {int(columns.min())}..{int(columns.max())}"
        )
    if (columns.sort(1).values.diff(dim=1) == 0).any():
        raise MarglikError(
            "columns of a datum must be distinct; a repeated row would be counted twice"
        )
    return columns
