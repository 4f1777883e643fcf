"""One recorded forward pass over a few data points: its Jacobian rows and Kronecker factors.

A row of a weight is bilinear in the inputs `a` of the operations that use the weight and in the
cotangents `g` of their outputs. Both are kept here; the way back through them is in `pullback`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from asdl_marglik.errors import CurvatureError
from asdl_marglik.linalg import second_moment
from asdl_marglik.passes.root_rows import Selection
from asdl_marglik.watch import persample
from asdl_marglik.watch.batch_axis import Layout
from asdl_marglik.watch.linearity import piecewise_linear
from asdl_marglik.watch.model import (
    Inputs,
    checked_outputs,
    copied,
    map_inputs,
    tensors_of,
    versions,
)
from asdl_marglik.watch.plan import Plan, PlanChanged
from asdl_marglik.watch.record import Recorder, Use

# How the factors of a weight treat augmented copies and shared positions: keep all of them; average
# (sum) over copies; average (sum) over copies and positions
Form = Literal["all", "expand", "reduce"]
# Sums of outer products of such factors, over data points, output cotangents and positions
Moment = Literal["moment of all", "moment of expand", "moment of reduce"]
MOMENTS: dict[Form, Moment] = {
    "all": "moment of all",
    "expand": "moment of expand",
    "reduce": "moment of reduce",
}
_OF_MOMENT: dict[str, Form] = {moment: form for form, moment in MOMENTS.items()}
# What will be asked of the cotangents of a weight's uses; "weighted": their sum over the K output
# cotangents, with coefficients for each datum
Request = tuple[str, Form | Moment | Literal["rows", "weighted"]]
# Whether the cotangents of uses have a graph: never; always, as where they depend on
# hyperparameters otherwise than through the inputs; or where the inputs move them, which the graph
# of the outputs tells
Differentiate = Literal["never", "always", "where needed"]
Reduced = tuple[int, str, str]  # a use, the role of the weight in it, and the form


class Scratch:
    """One piece of memory for large intermediates: fresh pages cost more than arithmetic."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor that is valid until the next is taken.

        Args:
            like: says dtype and device.
            shape: of the tensor.
        """
        size = torch.Size(shape).numel()
        if self._memory is None or self._memory.numel() < size or self._memory.dtype != like.dtype:
            self._memory = None  # free it before the larger one is there
            self._memory = like.new_empty(size)
        return self._memory[:size].view(shape)


@dataclass
class UseCotangents:
    """What the backward passes of a chunk leave.

    Args:
        whole: cotangents [n, K, Q, ...] by use.
        reduced: rows or factors where these are smaller than the cotangents that they were made of.
    """

    whole: dict[int, Tensor]
    reduced: dict[Reduced, Tensor]


class Chunk:
    """The recorded pass of some data points; outputs f [n, C] are averaged over their copies.

    Args:
        plan: where the rows of each weight come from.
        x: inputs [n, A, ...], A copies of each datum.
        selection: the root rows that are wanted, K for each datum.
        differentiate: whether the cotangents of uses have a graph.
        inputs_only: gradients will be asked for in the inputs `x`, and in no weight.
        requests: what will be asked of these cotangents, if known: then only as much of them is
            kept.
        pulls: what the way back will ask of them.
        scratch: memory for large intermediates.
    """

    def __init__(
        self,
        plan: Plan,
        x: Inputs,
        selection: Selection,
        *,
        differentiate: Differentiate = "never",
        inputs_only: bool = False,
        requests: Sequence[Request] | None = None,
        pulls: Sequence[Request] = (),
        scratch: Scratch | None = None,
    ):
        self.plan = plan
        self.x = x
        self.selection = selection
        self.scratch = scratch or Scratch()
        self.n, self.copies = tensors_of(x)[0].shape[:2]
        recorder, outputs = self._recorded(inputs_only)
        by_copy = outputs.reshape(self.n, self.copies, -1)
        self.f = by_copy.mean(1) if self.copies > 1 else by_copy.squeeze(1)
        self._last = outputs.grad_fn  # the operation whose output is that of the network
        self._uses = plan.matched(recorder, self.n * self.copies)
        self.differentiable = differentiate == "always" or (
            differentiate == "where needed" and not self._linear()
        )
        f = self.f if self.differentiable else self.f.detach()
        self.output_cotangents = selection.cotangents(f).to(f.dtype)  # [n, K, C]
        self.mixing_with_graph = selection.mixing(self.f)
        self.inputs = [self._standard_input(use, layout) for use, layout in self._uses]
        self._requests = requests
        self._pulls = pulls
        self._output_moments: dict[tuple[tuple[int, ...], Form, int], Tensor] = {}

    def _recorded(self, inputs_only: bool) -> tuple[Recorder, Tensor]:
        """The pass itself; a model that is known to write to its inputs gets copies of them."""
        tensors = tensors_of(self.x)
        before = versions(tensors)
        x = map_inputs(lambda t: t.flatten(0, 1), self.x)
        plan = self.plan
        batch = self.n * self.copies
        with Recorder(
            plan.weights, repeated=plan.repeated, batch=batch, inputs_only=inputs_only
        ) as recorder:
            outputs = self.plan.model(copied(x) if self.plan.writes_inputs else x)
        if versions(tensors) != before:
            raise CurvatureError(
                "the model changes its input in place, for these data though not for the first "
                "ones, and has overwritten it; use out-of-place operations on the input"
            )
        if outputs.shape[1:] != self.plan.output_shape:
            raise PlanChanged  # sequences of another length
        return recorder, checked_outputs(outputs, self.n * self.copies)

    def _linear(self) -> bool:
        """Whether no cotangent depends on the inputs, as far as they are differentiated."""
        leaves = [t for t in tensors_of(self.x) if t.requires_grad]
        if not leaves or not self.f.requires_grad:
            return True
        edges = [use.edge for use, _ in self._uses]
        sources = [get_gradient_edge(t).node for t in leaves]
        sources += [edge.node for edge in edges if edge is not None]
        return piecewise_linear(self.f, sources)

    def _standard_input(self, use: Use, layout: Layout | None) -> Tensor | None:
        """The input of a use as [n, Q, ...]; None where its rows do not depend on it."""
        if layout is None or use.input is None:
            return None
        aligned = use.rule.align_input(use.call, layout.axis, tuple(use.shape))
        return None if aligned is None else layout.standard(aligned, self.n * self.copies, self.n)

    @property
    def k(self) -> int:
        """Output cotangents, and so rows before mixing, per datum."""
        return self.output_cotangents.shape[1]

    @property
    def mixing(self) -> Tensor | None:
        """Coefficients [n, K, R] of the root rows in the dtype of the rows, detached."""
        if self.mixing_with_graph is None:
            return None
        return self.mixing_with_graph.detach().to(self.f.dtype)

    def use(self, index: int) -> Use:
        """A use of weights, by its place in the pass."""
        return self._uses[index][0]

    # ------------------------------------------------------------------------- backward passes

    @cached_property
    def use_cotangents(self) -> UseCotangents:
        """The cotangents of all uses, made when first asked for, one output cotangent at a time."""
        reductions, whole = self._needed()
        needed = whole.union(index for index, *_ in reductions)
        if needed and all(self._is_output(index) for index in needed):
            return self._of_last_layer(reductions, whole)
        wholes: dict[int, list[Tensor]] = {}
        pieces: dict[Reduced, list[Tensor]] = {}
        for k in range(self.k):
            with torch.enable_grad():
                cotangent = self.output_cotangents[:, k]
                by_use = self.backward(cotangent, needed, create_graph=self.differentiable)
            for key in reductions:
                piece = self._reduced(*key, by_use[key[0]].unsqueeze(1))
                _collect(pieces.setdefault(key, []), piece, key)
            for index in whole & by_use.keys():
                wholes.setdefault(index, []).append(by_use.pop(index))
            del by_use  # before the next are made
        with torch.enable_grad():
            stacked = {index: _stacked(wholes.pop(index)) for index in list(wholes)}
        return UseCotangents(stacked, {key: _joined(parts) for key, parts in pieces.items()})

    def _is_output(self, index: int) -> bool:
        """Whether the output of a use is that of the network, one row for each input."""
        use, layout = self._uses[index]
        if layout is None or use.edge is None or use.edge.node is not self._last:
            return False
        rows = (self.n * self.copies, self.f.shape[1])
        return layout.axis == 0 and tuple(use.shape) == rows

    def _of_last_layer(self, reductions: list[Reduced], whole: set[int]) -> UseCotangents:
        """The cotangents of such a use are those of the outputs: no backward pass is needed."""
        with torch.set_grad_enabled(self.differentiable):  # whoever asks, as after a backward pass
            of_mean = (self.output_cotangents / self.copies).unsqueeze(2)
            g = of_mean.expand(-1, -1, self.copies, -1)
            reduced = {key: self._reduced(*key, g) for key in reductions}
        return UseCotangents(dict.fromkeys(whole, g), reduced)

    def _needed(self) -> tuple[list[Reduced], set[int]]:
        """What to reduce at once because it is smaller, and the uses whose cotangents stay."""
        if self._requests is None or self.differentiable:
            return [], set(range(len(self._uses)))
        reductions: dict[Reduced, None] = {}
        whole: set[int] = set()
        weighted: set[int] = set()
        for name, form in (*self._requests, *self._pulls):
            if name in self.plan.persample:
                continue
            for index, role in self.plan.uses_of[name]:
                if form == "weighted":
                    weighted.add(index)
                elif form in _OF_MOMENT:
                    reductions[index, self._sharing(index, role), form] = None
                elif form == "reduce" or (form == "rows" and self._rows_are_smaller(name, index)):
                    reductions[index, role, form] = None
                else:
                    whole.add(index)
        # A weighted sum takes a backward pass of its own, down to its use: half a pass on average.
        # Up to 2 K of them cost less than the K passes that give all cotangents, unless those are
        # made anyway.
        if whole or len(weighted) > 2 * self.k:
            whole |= weighted
        return list(reductions), whole

    def _sharing(self, index: int, role: str) -> str:
        """The role whose positions are those of `role`: of weight and bias, without groups."""
        call = self.use(index).call
        return "weight" if "weight" in call.weights and call.options.get("groups", 1) == 1 else role

    def _rows_are_smaller(self, name: str, index: int) -> bool:
        """Whether a datum's row of a weight has fewer numbers than the output of its use."""
        per_input = self.use(index).shape.numel() // (self.n * self.copies)
        return self.plan.weights[name].numel() < per_input

    def _reduced(self, index: int, role: str, form: str, g: Tensor) -> Tensor:
        if form == "rows":
            return self._rows(index, role, g)
        if form not in _OF_MOMENT:
            return self.positions(index, role, g, cast(Form, form))
        positions = self.positions(index, role, g.detach(), _OF_MOMENT[form])
        return second_moment(positions.flatten(0, 2))

    def backward(
        self, cotangent: Tensor, needed: set[int], *, create_graph: bool
    ) -> dict[int, Tensor]:
        """Cotangents [n, Q, ...] of the uses among `needed`, from one of the outputs [n, C]."""
        planned = {
            index: (use, layout)
            for index, (use, layout) in enumerate(self._uses)
            if layout is not None and index in needed
        }
        if not planned:
            return {}
        edges = [cast(GradientEdge, use.edge) for use, _ in planned.values()]
        by_edge: Sequence[Tensor | None]
        if self.f.requires_grad:
            by_edge = torch.autograd.grad(
                self.f,
                edges,
                cotangent,
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
        else:
            by_edge = [None] * len(edges)
        cotangents = {}
        for (index, (use, layout)), g in zip(planned.items(), by_edge, strict=True):
            if g is None:  # the outputs do not depend on this use
                g = self.f.new_zeros(use.shape)
            cotangents[index] = layout.standard(g, self.n * self.copies, self.n)
        return cotangents

    def drop_graph(self) -> None:
        """Keep what rows and factors are made of; nothing can be pulled back afterwards."""
        cotangents = self.use_cotangents
        whole = {index: g.detach() for index, g in cotangents.whole.items()}
        self.use_cotangents = UseCotangents(whole, cotangents.reduced)
        self.inputs = [detached(a) for a in self.inputs]
        self._uses = [(use.without_graph(), layout) for use, layout in self._uses]
        self.f = self.f.detach()
        self.mixing_with_graph = detached(self.mixing_with_graph)

    def drop_cotangents(self, index: int) -> None:
        """Let go of the cotangents of a use; no row can be made of them again.

        Args:
            index: of the use.
        """
        self.use_cotangents.whole.pop(index, None)

    # ------------------------------------------------------------------------------------ rows

    def rows(self, name: str, out: Tensor | None = None) -> Tensor:
        """Jacobian rows [n, K, *shape] of one weight, without a graph.

        Args:
            name: of the weight.
            out: where the rows are written, if anywhere.
        """
        if name in self.plan.persample:
            total = self._persample_rows[name]
        else:
            by_use = [self._rows_of_use(index, role) for index, role in self.plan.uses_of[name]]
            total = sum(by_use[1:], by_use[0])
        return total if out is None else out.copy_(total)

    def _rows_of_use(self, index: int, role: str) -> Tensor:
        reduced = self.use_cotangents.reduced.get((index, role, "rows"))
        if reduced is not None:
            return reduced
        return self._rows(index, role, self.use_cotangents.whole[index].detach())

    def _rows(self, index: int, role: str, g: Tensor) -> Tensor:
        use = self.use(index)
        return use.rule.rows(use.call, role, detached(self.inputs[index]), g)

    @cached_property
    def _persample_rows(self) -> dict[str, Tensor]:
        """Rows of the weights that no rule covers."""
        weights = {name: self.plan.weights[name] for name in self.plan.persample}
        x = map_inputs(lambda t: t.detach(), self.x)
        return persample.rows(self.plan.model, weights, x, self.output_cotangents.detach())

    # ------------------------------------------------------------------------ Kronecker factors

    def n_positions(self, name: str) -> int:
        """Shared positions T of a weight's uses together, per input."""
        uses = [self.use(index) for index, _ in self.plan.uses_of[name]]
        outputs = self.plan.weights[name].shape[uses[0].rule.output_axis]
        numbers = sum(use.shape.numel() for use in uses)
        return numbers // (self.n * self.copies * outputs)

    def input_moment(self, name: str, *, double: bool = False) -> Tensor:
        """Sum of outer products [groups, D, D] of patches averaged over copies, over all uses.

        Args:
            name: of the weight.
            double: sum in float64.
        """
        moments = []
        for index, role in self.plan.uses_of[name]:
            use = self.use(index)
            mean = self.mean_input(index).detach()
            moments.append(use.rule.moment(use.call, role, mean.double() if double else mean))
        return sum(moments[1:], moments[0])

    def output_moment(
        self, name: str, form: Form, reduce: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """A reduction of the positions of a weight; weight and bias of the same uses share it.

        Args:
            name: of the weight.
            form: how positions are put together.
            reduce: of the positions [n, K, T, groups, O] of every use, the same for all weights.
        """
        positions = self.output_factors(name, form)
        uses = tuple(index for index, _ in self.plan.uses_of[name])
        key = (uses, form, positions[0].shape[3])
        if key not in self._output_moments:
            self._output_moments[key] = reduce(positions)
        return self._output_moments[key].clone()

    def summed_moment(self, name: str, form: Form) -> Tensor:
        """Sum of outer products [groups, O, O] of the positions of a weight, over all uses.

        Args:
            name: of the weight.
            form: how positions are put together.
        """
        reduced = self.use_cotangents.reduced
        uses = self.plan.uses_of[name]
        moments = [reduced[i, self._sharing(i, role), MOMENTS[form]] for i, role in uses]
        return torch.stack(moments).sum(0)  # a copy: weight and bias share them

    def mean_input(self, index: int) -> Tensor:
        """The input of a use, averaged over copies."""
        a = self.inputs[index]
        assert a is not None
        return a if self.copies == 1 else a.unflatten(1, (self.copies, -1)).mean(1)

    def input_factors(self, name: str, form: Form) -> list[Tensor | None]:
        """For every use of a weight, its patches [n, T, groups, D]; None for a bias.

        Args:
            name: of the weight.
            form: how positions are put together.
        """
        factors = []
        for index, role in self.plan.uses_of[name]:
            a = detached(self.inputs[index])
            factors.append(None if a is None else self.patches(index, role, a, form))
        return factors

    def output_factors(self, name: str, form: Form) -> list[Tensor]:
        """For every use of a weight, its positions [n, K, T, groups, O].

        Args:
            name: of the weight.
            form: how positions are put together.
        """
        factors = []
        for index, role in self.plan.uses_of[name]:
            positions = self.use_cotangents.reduced.get((index, role, form))
            if positions is None:
                g = self.use_cotangents.whole[index].detach()
                positions = self.positions(index, role, g, form)
            factors.append(positions)
        return factors

    def patches(self, index: int, role: str, a: Tensor, form: Form) -> Tensor | None:
        """Patches of an input of a use.

        Args:
            index: of the use.
            role: of the weight in it.
            a: the input [n, Q, ...].
            form: how positions are put together.
        """
        use = self.use(index)
        if form != "all" and self.copies > 1:
            # patches are linear in the input: averaging copies first is the same and cheaper; the
            # way back through a sum and a quotient divides before it copies
            a = a.unflatten(1, (self.copies, -1)).sum(1) / self.copies
        if form == "reduce":
            patches = use.rule.mean_patch(use.call, role, a)
        else:
            patches = use.rule.patches(use.call, role, a)
        if patches is None:
            return None
        patches = patches.flatten(1, 2)
        return patches.mean(1, keepdim=True) if form == "reduce" else patches

    def positions(self, index: int, role: str, g: Tensor, form: Form) -> Tensor:
        """Positions of the cotangents of a use.

        Args:
            index: of the use.
            role: of the weight in it.
            g: cotangents of its output [n, K, Q, ...].
            form: how positions are put together.
        """
        use = self.use(index)
        if form != "all" and self.copies > 1:
            g = g.unflatten(2, (self.copies, -1)).sum(2)
        flat = use.rule.positions(use.call, role, g.flatten(0, 1))
        positions = flat.flatten(1, 2).unflatten(0, g.shape[:2])
        return positions.sum(2, keepdim=True) if form == "reduce" else positions


def _collect(pieces: list[Tensor], piece: Tensor, key: Reduced) -> None:
    """Take in what one more output cotangent gives: side by side with the others, or added."""
    if key[2] in _OF_MOMENT and pieces:
        pieces[0] += piece
    else:
        pieces.append(piece)


def _joined(pieces: list[Tensor]) -> Tensor:
    """[n, K, ...] of K tensors [n, 1, ...]; a single one, or a sum, as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _stacked(tensors: list[Tensor]) -> Tensor:
    """[n, K, ...] of K tensors [n, ...]; a single one needs no copy."""
    return tensors[0].unsqueeze(1) if len(tensors) == 1 else torch.stack(tensors, 1)


def detached(t: Tensor | None) -> Tensor | None:
    """A tensor without its graph; None stays None."""
    return None if t is None else t.detach()
