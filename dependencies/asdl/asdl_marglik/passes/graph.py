"""A recorded forward pass whose rows and factors keep their graph: for plain autograd.

The two passes differentiate large statistics in little memory. Where results are small and wanted
as ordinary tensors with a graph (a kernel, a predictive variance), this is simpler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asdl_marglik.passes.forward import Chunk, Form
from asdl_marglik.passes.root_rows import Selection
from asdl_marglik.watch.model import Inputs, taken
from asdl_marglik.watch.persample import averaged_output, gradients
from asdl_marglik.watch.plan import Plan


class GraphChunk(Chunk):
    """A `Chunk` that can be differentiated in whatever its outputs depend on.

    Args:
        plan: where the rows of each weight come from.
        x: inputs [n, A, ...], A copies of each datum.
        selection: the root rows that are wanted, K for each datum.
    """

    def __init__(self, plan: Plan, x: Inputs, selection: Selection):
        super().__init__(plan, x, selection, differentiate="always")
        self._persample: dict[str, Tensor] = {}

    def rows(self, name: str, out: Tensor | None = None) -> Tensor:
        """Jacobian rows [n, K, *shape] of one weight, with their graph.

        Args:
            name: of the weight.
            out: not used: rows with a graph are not written anywhere.
        """
        if name in self.plan.persample:
            return self._by_loop()[name]
        by_use = []
        for index, role in self.plan.uses_of[name]:
            use = self.use(index)
            g = self.use_cotangents.whole[index]
            by_use.append(use.rule.rows(use.call, role, self.inputs[index], g))
        return sum(by_use[1:], by_use[0])

    def _by_loop(self) -> dict[str, Tensor]:
        """Rows of the weights that no rule covers, one backward pass for each row."""
        if not self._persample:
            names = [name for name in self.plan.weights if name in self.plan.persample]
            weights: list[Tensor] = [self.plan.weights[name] for name in names]
            by_datum = [self._rows_of_datum(i, weights) for i in range(self.n)]
            stacked = [torch.stack(rows) for rows in zip(*by_datum, strict=True)]
            self._persample = dict(zip(names, stacked, strict=True))
        return self._persample

    def _rows_of_datum(self, i: int, weights: list[Tensor]) -> list[Tensor]:
        """Rows [K, *shape] of each weight for one datum."""
        with torch.enable_grad():
            f = averaged_output(self.plan.model, {}, taken(self.x, i))
            cotangents = self.output_cotangents[i]
            rows = [gradients(f, weights, u, create_graph=True) for u in cotangents]
        return [torch.stack(of_weight) for of_weight in zip(*rows, strict=True)]

    def input_factors(self, name: str, form: Form) -> list[Tensor | None]:
        """For every use of a weight, its patches [n, T, groups, D]; None for a bias.

        Args:
            name: of the weight.
            form: how positions are put together.
        """
        inputs = [(index, role, self.inputs[index]) for index, role in self.plan.uses_of[name]]
        return [None if a is None else self.patches(i, role, a, form) for i, role, a in inputs]

    def output_factors(self, name: str, form: Form) -> list[Tensor]:
        """For every use of a weight, its positions [n, K, T, groups, O].

        Args:
            name: of the weight.
            form: how positions are put together.
        """
        whole = self.use_cotangents.whole
        uses = self.plan.uses_of[name]
        return [self.positions(index, role, whole[index], form) for index, role in uses]
