"""Kronecker-factored curvature (KFAC) of one weight, "expand" or "reduce" over shared positions.

    H ~= B (x) A
    expand: A = 1/(n T) sum_nt a_nt a_nt^T,               B = sum_nrt g_nrt g_nrt^T
    reduce: A = 1/n sum_n (mean_t a_nt)(mean_t a_nt)^T,   B = sum_nr (sum_t g_nrt)(sum_t g_nrt)^T
    log|I + P0^-1 (B (x) A)| = sum_jk log(1 + beta_j alpha_k / precision)

(Eschenhagen et al. 2023.) Augmented copies are reduced first: activations averaged, cotangents
(which carry 1/A) summed, so that A equal copies give the value of one. Groups of a grouped
convolution are separate blocks. A bias has A = 1. Where a factor has fewer rows than its side, its
rows are kept and the eigenvalues come from their Gram matrix.

With one precision per element the determinant of B (x) A has no such form. Of a small weight it is
computed as it is, of a large one the log precision is projected on row effect + column effect,
which keeps the Kronecker form: exact whenever the precision is constant, per row, per column, or a
product of both, and otherwise usually too small a determinant, so that the evidence comes out too
high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asdl_marglik.curvature.problem import Group, Problem, Setting
from asdl_marglik.curvature.term import Kind, Memory, Settled, Term, mix
from asdl_marglik.errors import PrecisionLost
from asdl_marglik.linalg import (
    ROUNDING,
    eigenvalues,
    eigenvalues_of_rows,
    is_coarse,
    log_det_identity_plus,
    precision_of_rows,
    precision_of_sums,
    resolved,
    second_moment,
)
from asdl_marglik.passes.forward import MOMENTS, Chunk, Form, Request
from asdl_marglik.passes.pullback import PullBack
from asdl_marglik.watch.plan import Plan

# weights with a precision each, up to which B (x) A is formed: a determinant of this side takes 10
# ms
EXACT_SIDE = 512


class Kron(Term):
    """Kronecker-factored curvature of one weight of a linear map or convolution.

    Args:
        name: of the weight.
        group: of the prior.
        setting: of weight sharing.
        n_data: data points in all.
        keep_inputs: keep the rows of the input factor instead of their sum.
        keep_outputs: the same for the output factor.
        bias: the weight is a bias.
        called_once: the weight is used once in a pass.
        transposed: it is stored [inputs, outputs].
        by_moment: sum over positions without patches side by side.
        double: sums in float64, whatever the network is.
        mixed: output cotangents are those of root rows.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        setting: Setting,
        n_data: int,
        *,
        keep_inputs: bool,
        keep_outputs: bool,
        bias: bool,
        called_once: bool = True,
        transposed: bool = False,
        by_moment: bool = True,
        double: bool = False,
        mixed: bool = False,
    ):
        self.double = double
        self.transposed = transposed
        self.names = (name,)
        self.group = group
        self.setting = setting
        self.n_data = n_data
        self.bias = bias
        self.kinds: tuple[Kind, Kind] = (
            "rows" if keep_inputs else "sum",
            "rows" if keep_outputs else "sum",
        )
        self.pieces = (self.kinds,)
        self.label = f"kronecker ({setting})"
        # positions of several calls are pooled before they are reduced
        self.form: Form = setting if called_once else "expand"
        # an input factor that is a sum over positions needs no patches side by side
        self._by_moment = by_moment and not keep_inputs and setting == "expand" and not bias
        pooled = self.form != setting  # uses are put together before their outer products are made
        self.sums_cotangents = mixed and not (keep_outputs or double or pooled)

    def requests(self) -> list[Request]:
        if self.sums_cotangents:
            return [(self.names[0], MOMENTS[self.form])]
        return [(self.names[0], self.form)]

    def pulls(self, plan: Plan) -> list[Request]:
        # else the mixing is part of the observation
        return [] if self.kinds[1] == "rows" else self.requests()

    def memory(self, problem: Problem) -> Memory:
        """Both factors or rows; eigenvectors of the larger in float64; a chunk's factors twice."""
        o, d = problem.plan.weights[self.names[0]].shape[0], problem.sizes[self.names[0]]
        d = 1 if self.bias else d // max(1, o)
        t = problem.plan.positions[self.names[0]]
        shared = 1 if self.setting == "reduce" else t
        inputs = problem.n_data * shared * d if self.kinds[0] == "rows" else d**2
        outputs = problem.n_rows * shared * o if self.kinds[1] == "rows" else o**2
        expanded = 1 if self.form == "reduce" else t
        at_once = 1 if self.sums_cotangents else problem.rows_per_datum
        per_datum = 2 * expanded * (d + at_once * o)
        return Memory(
            problem.element * (inputs + outputs),
            4 * 8 * max(d, o) ** 2,
            problem.element * per_datum,
        )

    def _inputs(self, patches: list[Tensor | None], like: Tensor) -> Tensor:
        """Observation of the input factor; uses of the weight are further shared positions."""
        given = [p for p in patches if p is not None]
        # [n, T, groups, D]
        rows = like.new_ones(len(like), 1, 1, 1) if self.bias else _joined(given)
        if self.setting == "reduce":
            rows = rows.mean(1, keepdim=True)
        rows = rows / (self.n_data * rows.shape[1]) ** 0.5
        return rows if self.kinds[0] == "rows" else self._moment(rows.flatten(0, 1))

    def _moment(self, rows: Tensor) -> Tensor:
        return second_moment(rows.double() if self.double else rows)

    def _outputs(self, positions: list[Tensor], mixing: Tensor | None) -> Tensor:
        """Observation of the output factor."""
        # [n, K, T, groups, O]; of a single use no copy is made
        rows = positions[0] if len(positions) == 1 else torch.cat(positions, 2)
        if self.setting == "reduce":
            rows = rows.sum(2, keepdim=True)
        return rows if self.kinds[1] == "rows" else self._moment(mix(rows, mixing).flatten(0, 2))

    def observe(
        self, chunk: Chunk, piece: int = 0, out: list[Tensor] | None = None
    ) -> list[Tensor]:
        name = self.names[0]
        if self._by_moment:
            moment = chunk.input_moment(name, double=self.double)
            inputs = moment / (self.n_data * chunk.n_positions(name))
        else:
            inputs = self._inputs(chunk.input_factors(name, self.form), chunk.f)
        if self.sums_cotangents:
            return [inputs, chunk.summed_moment(name, self.form)]
        if self.kinds[1] == "rows":
            return [inputs, self._outputs(chunk.output_factors(name, self.form), chunk.mixing)]
        outputs = chunk.output_moment(
            name, self.form, lambda positions: self._outputs(positions, chunk.mixing)
        )
        return [inputs, outputs]

    def pull(
        self,
        back: PullBack,
        observations: list[list[Tensor]],
        bars: list[Tensor],
        span: slice,
        log_precision: Tensor,
    ) -> None:
        inputs_bar, outputs_bar = (
            bar[span] if kind == "rows" else bar for bar, kind in zip(bars, self.kinds, strict=True)
        )
        with torch.enable_grad():
            patches_bars = self._pull_inputs(back, inputs_bar)
            positions_bars = self._pull_outputs(back, outputs_bar)
        pairs = list(zip(patches_bars, positions_bars, strict=True))
        back.factors(self.names[0], self.form, pairs)

    def _pull_inputs(self, back: PullBack, bar: Tensor) -> Sequence[Tensor | None]:
        """Cotangents of the patches of every use; the moment hands its own over itself."""
        name, chunk = self.names[0], back.chunk
        factors = chunk.input_factors(name, self.form) if not self._by_moment else []
        patches = [p.requires_grad_() for p in factors if p is not None]
        if self._by_moment:
            back.input_moment(name, bar / (self.n_data * chunk.n_positions(name)))
        if self._by_moment or self.bias:
            return [None for _ in chunk.plan.uses_of[name]]
        return torch.autograd.grad(self._inputs([*patches], chunk.f), patches, bar)

    def _pull_outputs(self, back: PullBack, bar: Tensor) -> Sequence[Tensor | None]:
        """Cotangents of the positions of every use; that of the mixing is handed over."""
        name, chunk = self.names[0], back.chunk
        mixing = chunk.mixing
        # of kept rows the mixing is applied later, outside the observation
        inside = self.kinds[1] == "sum" and mixing is not None
        if not (chunk.differentiable or inside):
            return [None for _ in chunk.plan.uses_of[name]]
        positions = [g.detach().requires_grad_() for g in chunk.output_factors(name, self.form)]
        leaves = list(positions)
        if inside and mixing is not None:
            leaves.append(mixing.requires_grad_())
        leaf_bars = torch.autograd.grad(self._outputs(positions, mixing), leaves, bar)
        if inside:
            back.mixing(leaf_bars[-1])
        return leaf_bars[: len(positions)]

    def log_det_ratio(
        self, statistics: list[Tensor], mixing: Tensor | None, scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        return self.settled(statistics, mixing)(scale, log_precision)

    def settled(self, statistics: list[Tensor], mixing: Tensor | None) -> Settled:
        factors = self.factors(statistics, mixing)
        if isinstance(self.group, int):
            alpha, beta = self._spectrum(factors[0], 0), self._spectrum(factors[1], 1)
            return lambda scale, theta: _log_det(alpha, beta, scale * torch.exp(-theta[self.group]))
        if factors[0].shape[-1] * factors[1].shape[-1] <= EXACT_SIDE:
            coarse = any(
                kind == "sum" and is_coarse(s)
                for kind, s in zip(self.kinds, statistics, strict=True)
            )
            product = self.product(*factors)
            return lambda scale, theta: self._exact_log_det(product, scale, theta, coarse)
        return lambda scale, theta: self._projected_log_det(factors, scale, theta)

    def log_precisions(self, log_precision: Tensor, o: int, d: int) -> Tensor:
        """The log precision of each weight [groups, O, D]."""
        theta = log_precision[self.group]
        return theta.reshape(-1, d, o).mT if self.transposed else theta.reshape(-1, o, d)

    def product(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """B (x) A [groups, O, D, O, D] in float64."""
        moments = [
            torch.einsum("ngi,ngj->gij", f.double(), f.double()) if kind == "rows" else f.double()
            for f, kind in zip((inputs, outputs), self.kinds, strict=True)
        ]
        return torch.einsum("gij,gop->goipj", *moments)

    def _exact_log_det(
        self, product: Tensor, scale: Tensor, log_precision: Tensor, coarse: bool
    ) -> Tensor:
        """log|I + P0^-1 (B (x) A)| as it is."""
        groups, o, d = product.shape[:3]
        root = torch.exp(-self.log_precisions(log_precision, o, d) / 2).reshape(groups, o * d)
        matrix = scale * root[:, :, None] * product.reshape(groups, o * d, o * d) * root[:, None, :]
        return log_det_identity_plus(matrix, coarse=coarse).sum()

    def effects(self, log_precision: Tensor, o: int, d: int) -> tuple[Tensor, Tensor]:
        """Row effect [groups, O] and column effect [groups, D] of the log precision of a weight.

        Args:
            log_precision: of the prior's groups.
            o: outputs O.
            d: inputs D.
        """
        table = self.log_precisions(log_precision, o, d)
        column_effect = table.mean(1) - table.mean((1, 2), keepdim=True).squeeze(2)
        return table.mean(2), column_effect

    def _projected_log_det(
        self, factors: tuple[Tensor, Tensor], scale: Tensor, log_precision: Tensor
    ) -> Tensor:
        """The same with row and column effects of the log precision."""
        inputs, outputs = factors
        row_effect, column_effect = self.effects(log_precision, outputs.shape[-1], inputs.shape[-1])
        alpha = self._spectrum(inputs, 0, column_effect)
        beta = self._spectrum(outputs, 1, row_effect)
        return _log_det(alpha, beta, scale)

    def spectrum(self, statistics: list[Tensor], mixing: Tensor | None) -> Tensor:
        inputs, outputs = self.factors(statistics, mixing)
        alpha, beta = self._spectrum(inputs, 0).values, self._spectrum(outputs, 1).values
        return (beta[:, :, None] * alpha[:, None, :]).flatten()

    def factors(self, statistics: list[Tensor], mixing: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both factors, or their root rows [N, groups, D]."""
        inputs, outputs = statistics
        if self.kinds[1] == "rows":
            outputs = mix(outputs.to(torch.float64), mixing).flatten(0, 2)
        return inputs.flatten(0, 1) if self.kinds[0] == "rows" else inputs, outputs

    def _spectrum(self, factor: Tensor, which: int, log_scale: Tensor | None = None) -> Spectrum:
        """Eigenvalues of a factor, given by rows [N, groups, D] or as it is [groups, D, D]."""
        dtype = factor.dtype
        if self.kinds[which] == "rows":
            if log_scale is not None:
                factor = factor * torch.exp(-log_scale / 2)
            values = eigenvalues_of_rows(factor.movedim(1, 0))
            return Spectrum(resolved(values, precision_of_rows(dtype)))
        if log_scale is not None:
            root = torch.exp(-log_scale / 2)
            factor = root[:, :, None] * factor * root[:, None, :]
        values = eigenvalues(factor)
        known = resolved(values, precision_of_sums(dtype))
        return Spectrum(
            known,
            torch.where(known > 0, 0.0, values.abs()).detach() if dtype != torch.float64 else None,
        )


def _joined(patches: list[Tensor]) -> Tensor:
    """Patches [n, T, groups, D] of all uses; of a single one no copy is made."""
    return patches[0] if len(patches) == 1 else torch.cat(patches, 1)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues [groups, m] of a factor in float64.

    Args:
        values: the eigenvalues.
        hidden: sizes of those that may be rounding alone; None where a sum was made in float64.
    """

    values: Tensor
    hidden: Tensor | None = None


def _log_det(alpha: Spectrum, beta: Spectrum, ratio: Tensor) -> Tensor:
    """sum_jk log(1 + ratio beta_j alpha_k), over all groups; ratio: of scale and precision."""
    total = torch.log1p(ratio * beta.values[:, :, None] * alpha.values[:, None, :]).sum()
    for own, other in ((alpha, beta), (beta, alpha)):
        if own.hidden is not None and _lost(own.hidden, other.values, ratio) > ROUNDING * total:
            raise PrecisionLost
    return total


@torch.no_grad()
def _lost(hidden: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    """What a log-determinant lacks if the hidden eigenvalues of a factor are real after all."""
    return torch.log1p(ratio * other[:, :, None] * hidden[:, None, :]).sum()
