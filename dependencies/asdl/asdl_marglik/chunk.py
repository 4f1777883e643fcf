"""One forward pass over a few data points: gives Jacobian rows and Kronecker factors, and takes their cotangents back.

The second half is the exact pull-back of the two-pass scheme: the cotangents of rows become cotangents of each
operation's input `a` and output gradient `g` (rows are bilinear in them), and one autograd call carries all of
them, together with those of the outputs, to the hyperparameters. For a piecewise linear network `g` does not depend
on the input almost everywhere, so its part of the graph need not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from . import persample
from .network import Inputs, map_inputs, tensors_of
from .record import Recorder

if TYPE_CHECKING:
    from .plan import Plan


# How the factors of a weight treat augmented copies and shared positions: keep all of them; average (sum) over copies;
# average (sum) over copies and positions
Form = Literal["all", "expand", "reduce"]


class RootRows(Protocol):
    """Which rows of U^T J are wanted: row r of datum i is  sum_k weights[i, k, r] * seeds[i, k] . J_i."""

    seeds_follow_outputs: bool  # whether the seeds depend on the outputs (else they are constants)

    def seeds(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        """Cotangents of the outputs [n, K, C] for outputs f [n, C]."""

    def weights(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """Mixing of the seeded rows [n, K, R], or None for the identity."""


@dataclass
class Selection:
    """The rows wanted of a chunk: a rule for rows, with the targets and columns it is applied to."""

    rule: RootRows
    y: Tensor
    columns: Tensor  # [n, K]

    def seeds(self, f: Tensor) -> Tensor:
        return self.rule.seeds(f, self.y, self.columns)

    def weights(self, f: Tensor) -> Tensor | None:
        return self.rule.weights(f, self.y, self.columns)

    def of(self, i: int) -> Selection:
        return Selection(self.rule, self.y[i : i + 1], self.columns[i : i + 1])


class Chunk:
    """The recorded pass of data points x [n, A, ...]; outputs f [n, C] are averaged over the A copies."""

    def __init__(self, plan: Plan, x: Inputs, selection: Selection, *, differentiate_cotangents: bool = False):
        self.plan, self.x, self.selection = plan, x, selection
        self.n, self.copies = tensors_of(x)[0].shape[:2]
        with Recorder(plan.weights) as recorder:
            outputs = plan.model(map_inputs(lambda t: t.flatten(0, 1), x))
        self.f = outputs.reshape(self.n, self.copies, -1).mean(1)
        plan.check(recorder)
        plan.check_layouts(recorder, self.n * self.copies)
        self._uses = [(use, layout) for use, layout in zip(recorder.uses, plan.layouts, strict=True)]
        f = self.f if differentiate_cotangents else self.f.detach()
        self.seeds = selection.seeds(f).to(f.dtype)
        self.mixing = selection.weights(self.f)  # stays in the graph of the outputs
        self._inputs = [self._input(index) for index in range(len(self._uses))]
        self._computed: list[dict[int, Tensor]] | None = None
        self.differentiable = differentiate_cotangents
        self._outputs: list[Tensor] = []  # what has received a cotangent, and the cotangents
        self._bars: list[Tensor] = []
        self._persample: dict[str, Tensor] | None = None
        self._persample_bars: dict[str, Tensor] = {}

    @property
    def k(self) -> int:
        """Seeded rows per datum."""
        return self.seeds.shape[1]

    def weights(self) -> Tensor | None:
        """Mixing weights [n, K, R] in the dtype of the rows, detached."""
        return None if self.mixing is None else self.mixing.detach().to(self.f.dtype)

    @property
    def _cotangents(self) -> list[dict[int, Tensor]]:
        """Output cotangents of the uses, per seed; computed when first asked for."""
        if self._computed is None:
            with torch.enable_grad():
                self._computed = [self._backward(self.seeds[:, k], self.differentiable) for k in range(self.k)]
        return self._computed

    def _input(self, index: int) -> Tensor | None:
        use, layout = self._uses[index]
        if layout is None or use.input is None:
            return None
        use.call.options["axis"] = layout.axis
        aligned = use.rule.align_input(use.call, layout.axis, tuple(use.shape))
        return None if aligned is None else layout.standard(aligned, self.n * self.copies, self.n)

    def _backward(self, seed: Tensor, create_graph: bool) -> dict[int, Tensor]:
        """The standardised output cotangent of every planned use, for one seed per datum [n, C]."""
        planned = {i: (use, layout) for i, (use, layout) in enumerate(self._uses) if layout is not None}
        if not planned:
            return {}
        edges = [use.edge for use, _ in planned.values()]
        cotangents = torch.autograd.grad(
            self.f, edges, seed, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        found = {}
        for (i, (use, layout)), g in zip(planned.items(), cotangents, strict=True):
            use.call.options["axis"] = layout.axis
            g = self.f.new_zeros(use.shape) if g is None else g  # None: the outputs do not depend on this use
            found[i] = layout.standard(g, self.n * self.copies, self.n)
        return found

    def rows(self, name: str, out: Tensor | None = None) -> Tensor:
        """Jacobian rows [n, K, *shape] of one weight, one per seed, without a graph; written to `out` if given."""
        if name in self.plan.persample:
            rows = self._persample_rows()[name]
            return rows if out is None else out.copy_(rows)
        if out is None:
            weight = self.plan.weights[name]
            out = weight.new_empty(self.n, self.k, *weight.shape)
        for k, cotangents in enumerate(self._cotangents):
            for call, (index, role) in enumerate(self.plan.uses_of[name]):
                use, _ = self._uses[index]
                a, g = _detached(self._inputs[index]), cotangents[index].detach()
                rows = use.rule.rows(use.call, role, a, g)
                out[:, k] = rows if call == 0 else out[:, k] + rows
        return out

    def pull_rows(self, name: str, bar: Tensor) -> None:
        """Take the cotangent [n, K, *shape] of `rows(name)` back to the operations' inputs and output cotangents."""
        if name in self.plan.persample:
            self._persample_bars[name] = bar
            return
        for index, role in self.plan.uses_of[name]:
            use, _ = self._uses[index]
            for k in range(self.k):
                self._pull(index, k, lambda a, g, use=use, role=role: use.rule.rows(use.call, role, a, g), bar[:, k])

    def input_factors(self, name: str, form: Form) -> list[Tensor | None]:
        """For every use of a weight, its patches [n, T, groups, D]; None for a bias."""
        found = []
        for index, role in self.plan.uses_of[name]:
            a = _detached(self._inputs[index])
            found.append(None if a is None else self._patches(index, role, a, form))
        return found

    def output_factors(self, name: str, form: Form) -> list[list[Tensor]]:
        """For every use of a weight, per seed, its positions [n, T, groups, O]."""
        return [
            [self._positions(index, role, cotangents[index].detach(), form) for cotangents in self._cotangents]
            for index, role in self.plan.uses_of[name]
        ]

    def _patches(self, index: int, role: str, a: Tensor, form: Form) -> Tensor | None:
        (use, _), rule = self._uses[index], self._uses[index][0].rule
        if form == "all":
            patches = rule.patches(use.call, role, a)
        else:  # patches are linear in the input: averaging copies first is the same and cheaper
            a = a.unflatten(1, (self.copies, -1)).mean(1)
            patches = rule.patches(use.call, role, a) if form == "expand" else rule.mean_patch(use.call, role, a)
        if patches is None:
            return None
        patches = patches.flatten(1, 2)
        return patches.mean(1, keepdim=True) if form == "reduce" else patches

    def _positions(self, index: int, role: str, g: Tensor, form: Form) -> Tensor:
        use, _ = self._uses[index]
        if form != "all":
            g = g.unflatten(1, (self.copies, -1)).sum(1)
        positions = use.rule.positions(use.call, role, g).flatten(1, 2)
        return positions.sum(1, keepdim=True) if form == "reduce" else positions

    def pull_factors(
        self, name: str, form: Form, bars: Sequence[tuple[Tensor | None, Sequence[Tensor | None]]]
    ) -> None:
        """Take the cotangents of the factors back, use by use: (of patches, per seed of positions)."""
        for (index, role), (patches_bar, positions_bars) in zip(self.plan.uses_of[name], bars, strict=True):

            def patches(a: Tensor, _: Tensor | None, index: int = index, role: str = role) -> Tensor:
                found = self._patches(index, role, a, form)
                assert found is not None  # it had a cotangent
                return found

            def positions(_: Tensor | None, g: Tensor, index: int = index, role: str = role) -> Tensor:
                return self._positions(index, role, g, form)

            if patches_bar is not None:
                self._pull(index, None, patches, patches_bar)
            for k, bar in enumerate(positions_bars):
                if bar is not None:
                    self._pull(index, k, positions, bar)

    def pull_mixing(self, bar: Tensor | None) -> None:
        """Take the cotangent of `weights()` back."""
        if bar is not None and self.mixing is not None and self.mixing.requires_grad:
            self._push(self.mixing, bar.to(self.mixing.dtype))

    def finish(self, f_bar: Tensor | None, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Gradients in `leaves` of everything pulled so far plus <f_bar, f>."""
        if f_bar is not None and self.f.requires_grad:
            self._push(self.f, f_bar.to(self.f.dtype))
        outputs = [o for o in self._outputs if o.requires_grad]
        bars = [b for o, b in zip(self._outputs, self._bars, strict=True) if o.requires_grad]
        total = [torch.zeros_like(leaf) for leaf in leaves]
        if outputs and leaves:
            found = torch.autograd.grad(outputs, leaves, bars, retain_graph=True, allow_unused=True)
            total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
        if self._persample_bars:
            for i in range(self.n):
                bars_i = {name: bar[i] for name, bar in self._persample_bars.items()}
                names = {name: self.plan.weights[name] for name in bars_i}
                gradients = persample.pull(
                    self.plan.model, names, map_inputs(lambda t, i=i: t[i], self.x), i,  # type: ignore[misc]
                    self._seeds_of, bars_i, leaves,
                )  # fmt: skip
                total = [t + g for t, g in zip(total, gradients, strict=True)]
        return total

    def _seeds_of(self, f: Tensor, i: int) -> Tensor:
        return self.selection.of(i).seeds(f)[0].to(f.dtype)

    def _pull(self, index: int, k: int | None, function: Callable, bar: Tensor) -> None:
        """Cotangents of one use's input and of its k-th output cotangent, from the cotangent of `function(a, g)`."""
        graph_a = self._inputs[index]
        graph_g = None if k is None else self._cotangents[k][index]
        wanted_a = graph_a is not None and graph_a.requires_grad
        wanted_g = graph_g is not None and self.differentiable and graph_g.requires_grad
        if not (wanted_a or wanted_g):
            return
        a, g = _detached(graph_a), _detached(graph_g)
        with torch.enable_grad():
            leaves = [t.requires_grad_() for t, wanted in ((a, wanted_a), (g, wanted_g)) if wanted and t is not None]
            result = function(a, g)
            if not result.requires_grad:
                return
            found = torch.autograd.grad(result, leaves, bar, allow_unused=True)
        targets = [t for t, wanted in ((graph_a, wanted_a), (graph_g, wanted_g)) if wanted and t is not None]
        for target, cotangent in zip(targets, found, strict=True):
            if cotangent is not None:
                self._push(target, cotangent)

    def _push(self, output: Tensor, bar: Tensor) -> None:
        for position, known in enumerate(self._outputs):
            if known is output:
                self._bars[position] = self._bars[position] + bar
                return
        self._outputs.append(output)
        self._bars.append(bar)

    def _persample_rows(self) -> dict[str, Tensor]:
        if self._persample is None:
            names = {name: self.plan.weights[name] for name in self.plan.persample}
            x = map_inputs(lambda t: t.detach(), self.x)
            self._persample = persample.rows(self.plan.model, names, x, self.seeds.detach())
        return self._persample


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()
