"""A weight of a linear map or convolution under Kronecker-factored curvature.

    Sigma = (P0 + s B (x) A)^-1 = R (Q_B (x) Q_A) diag(1 / (1 + s beta alpha)) (Q_B (x) Q_A)^T R

with the prior's standard deviations R = R_B (x) R_A and eigen-decompositions of R_B B R_B and
R_A A R_A. Where a factor has fewer rows than its side, its eigenvectors span only these; the
eigenvalue of everything orthogonal to them is zero.

A Jacobian row is J = sum_t g_t a_t^T over positions t. For a single position

    J Sigma J^T = sum_jk (Q_B^T R_B g)_j^2 (Q_A^T R_A a)_k^2 / (1 + s beta_j alpha_k)

takes inputs and output cotangents only, never a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from laplace_marglik.posterior.covariance import (
    Covariance,
    Factored,
    Features,
    Rows,
    Shapes,
    normal,
    rows_of,
)
from laplace_marglik.posterior.elementwise import (
    has_single_position,
    of_factors,
    single_position,
)

# eigenvalues of kept rows below this part of the largest are rounding
SMALLEST = 1e-12


class Side(NamedTuple):
    """One of the two factors, decomposed.

    Args:
        basis: eigenvectors [groups, d, m], m <= d.
        values: eigenvalues [groups, m].
        root: square root R of the prior's variance on this side [groups, d].
    """

    basis: Tensor
    values: Tensor
    root: Tensor


def side_of(factor: Tensor, root: Tensor, *, by_rows: bool) -> Side:
    """The eigen-decomposition of R F R in float64.

    Args:
        factor: F [groups, d, d], or rows X [m, groups, d] with F = X^T X.
        root: R [groups, d].
        by_rows: whether it is rows.
    """
    factor = factor.double()
    if by_rows:
        rows = factor.movedim(1, 0) * root.unsqueeze(1)  # [groups, m, d]
        if rows.shape[1] < rows.shape[2]:
            return _thin(rows, root)
        scaled = rows.mT @ rows
    else:
        scaled = root.unsqueeze(2) * factor * root.unsqueeze(1)
    values, basis = torch.linalg.eigh(scaled)
    return Side(basis, values.clamp_min(0), root)


def _thin(rows: Tensor, root: Tensor) -> Side:
    """From fewer rows [groups, m, d] than features: eigenvectors of their Gram matrix."""
    values, vectors = torch.linalg.eigh(rows @ rows.mT)
    known = values > SMALLEST * values.amax(1, keepdim=True).clamp_min(torch.finfo().tiny)
    inverse = torch.where(known, values.clamp_min(torch.finfo().tiny).rsqrt(), 0.0)
    basis = rows.mT @ vectors * inverse.unsqueeze(1)
    return Side(basis, torch.where(known, values, 0.0), root)


@dataclass(frozen=True)
class KronCovariance(Covariance):
    """One weight [O, D], or one for each channel group.

    Args:
        shapes: of the weight, by its name.
        inputs: the input side, as a tuple (basis, values, root).
        outputs: the output side.
        transposed: whether the weight is stored [inputs, outputs].
        bias: whether it is a bias.
    """

    shapes: Shapes
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    transposed: bool
    bias: bool
    form = "kron"

    @property
    def name(self) -> str:
        return next(iter(self.shapes))

    @property
    def sides(self) -> tuple[Side, Side]:
        """Input side, output side."""
        return Side(*self.inputs), Side(*self.outputs)

    def _size(self) -> int:
        return torch.Size(self.shapes[self.name]).numel()

    def numbers_per_output(self, plan: Factored, copies: int) -> int:
        if has_single_position(plan, copies, self.name):
            return 2 * (self.outputs[0].shape[1] + self.inputs[0].shape[1])
        return 3 * self._size()

    def _variance(self) -> Tensor:
        """1 / (1 + beta alpha) of every pair of coordinates [groups, O', D']."""
        alpha, beta = (_padded(side) for side in self.sides)
        return 1 / (1 + beta.unsqueeze(2) * alpha.unsqueeze(1))

    def of_outputs(self, chunk: Rows) -> Tensor:
        factors = self._bias_factors(chunk) if self.bias else single_position(chunk, self.name)
        if factors is None:
            return super().of_outputs(chunk)
        a, g = factors
        inputs, outputs = self.sides
        variance = self._variance().to(a.dtype)
        return of_factors(_coordinates(a, inputs), _coordinates(g, outputs), variance)

    def _bias_factors(self, chunk: Rows) -> tuple[Tensor, Tensor]:
        """A bias has inputs of one."""
        rows = rows_of(chunk, self.name)
        groups = len(self.outputs[0])
        return rows.new_ones(chunk.n, groups, 1), rows.unflatten(2, (groups, -1))

    def features(self, chunk: Rows) -> Features:
        if self.bias:
            _, g = self._bias_factors(chunk)
            rotated = _coordinates(g, self.sides[1]).unsqueeze(4)
        elif self._rotates_factors(chunk):
            rotated = self._rotated_factors(chunk)
        else:
            rotated = self._rotated_rows(chunk)
        yield 1.0, (rotated * self._variance().sqrt().to(rotated.dtype)).flatten(2)

    def _rotates_factors(self, chunk: Rows) -> bool:
        """Whether rotating inputs and cotangents at all positions costs less than rotating rows."""
        t = chunk.copies * chunk.plan.positions.get(self.name, 0)
        d, o = self.inputs[0].shape[1], self.outputs[0].shape[1]
        if self.name not in chunk.plan.kronecker or not t:
            return False
        return t * (o * o + d * d / chunk.k) < o * d * (o + d)

    def _rotated_factors(self, chunk: Rows) -> Tensor:
        """Rows in the coordinates of both sides [n, C, groups, O', D'], from rotated factors."""
        inputs, outputs = self.sides
        patches = [a for a in chunk.input_factors(self.name, "all") if a is not None]
        a = _coordinates(torch.cat(patches, 1), inputs)  # [n, T, groups, D']
        g = _coordinates(torch.cat(chunk.output_factors(self.name, "all"), 2), outputs)
        g = g.permute(0, 3, 1, 4, 2)  # [n, groups, C, O', T]
        n, groups, c, o, t = g.shape
        product = g.reshape(n, groups, c * o, t) @ a.transpose(1, 2)
        return product.reshape(n, groups, c, o, -1).transpose(1, 2)

    def _rotated_rows(self, chunk: Rows) -> Tensor:
        """The same from the rows."""
        inputs, outputs = self.sides
        groups, o, d = len(inputs.basis), outputs.basis.shape[1], inputs.basis.shape[1]
        rows = rows_of(chunk, self.name)
        if self.transposed:
            rows = rows.unflatten(2, (groups, d, o)).mT
        else:
            rows = rows.unflatten(2, (groups, o, d))
        half = _coordinates(rows.transpose(2, 3), inputs).transpose(2, 3)  # [n, C, groups, O, D']
        turned = half.movedim(3, 4)  # [n, C, groups, D', O]
        return _coordinates(turned.transpose(2, 3), outputs).permute(0, 1, 3, 4, 2)

    def sample(self, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        """R (I + Q (diag - I) Q^T) xi: what no eigenvector sees stays as in the prior."""
        inputs, outputs = self.sides
        groups, d, o = len(inputs.root), inputs.root.shape[1], outputs.root.shape[1]
        xi = normal(k, groups * o * d, inputs.root, generator).reshape(k, groups, o, d)
        seen = outputs.basis.mT @ xi @ inputs.basis  # [k, groups, m_O, m_D]
        shrunk = (1 + outputs.values.unsqueeze(2) * inputs.values.unsqueeze(1)).rsqrt() - 1
        z = xi + outputs.basis @ (seen * shrunk) @ inputs.basis.mT
        z = outputs.root.unsqueeze(2) * z * inputs.root.unsqueeze(1)
        z = z.mT if self.transposed else z
        return {self.name: z.reshape(k, *self.shapes[self.name])}


def _padded(side: Side) -> Tensor:
    """Eigenvalues of all coordinates: zero for those orthogonal to a thin basis."""
    _, d, m = side.basis.shape
    return side.values if m == d else torch.nn.functional.pad(side.values, (0, d))


def _coordinates(v: Tensor, side: Side) -> Tensor:
    """Vectors [..., groups, d] in eigenvectors; of a thin basis the rest [d] stands behind."""
    basis = side.basis.to(v.dtype)
    scaled = v * side.root.to(v.dtype)
    if len(basis) == 1:
        along = scaled @ basis[0]
    else:
        along = torch.einsum("...gd,gdm->...gm", scaled, basis)
    if basis.shape[1] == basis.shape[2]:
        return along
    rest = scaled - torch.einsum("...gm,gdm->...gd", along, basis)
    return torch.cat([along, rest], -1)
