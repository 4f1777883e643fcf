"""One forward pass over a few data points: gives Jacobian rows and Kronecker factors, and takes
their cotangents back.

The second half is the exact pull-back of the two-pass scheme: the cotangents of rows become
cotangents of each operation's input `a` and output gradient `g` (rows are bilinear in them), and
one autograd call carries all of them, together with those of the outputs, to the hyperparameters.
For a piecewise linear network `g` does not depend on the input almost everywhere, so its part of
the graph need not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from asdl_marglik.errors import CurvatureError
from asdl_marglik.passes.root_rows import Selection
from asdl_marglik.rules.base import Wanted, pull_by_autograd
from asdl_marglik.watch import persample
from asdl_marglik.watch.linearity import piecewise_linear
from asdl_marglik.watch.model import (
    Inputs,
    checked_outputs,
    copied,
    map_inputs,
    taken,
    tensors_of,
    versions,
)
from asdl_marglik.watch.plan import Plan
from asdl_marglik.watch.record import Recorder

# How the factors of a weight treat augmented copies and shared positions: keep all of them; average
# (sum) over copies; average (sum) over copies and positions
Form = Literal["all", "expand", "reduce"]
# what will be asked of a weight's output cotangents; "weighted": their sum over seeds, with weights
# for each datum
Request = tuple[str, Form | Literal["rows", "weighted"]]
# Whether output cotangents keep a graph: never; always, as where they depend on hyperparameters
# otherwise than through the inputs; or where the inputs move them, which the graph of the outputs
# tells
Differentiate = Literal["never", "always", "where needed"]


class Scratch:
    """One piece of memory for large intermediates, used again and again: fresh pages cost more than
    arithmetic.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor that is valid until the next is taken."""
        size = torch.Size(shape).numel()
        if self._memory is None or self._memory.numel() < size or self._memory.dtype != like.dtype:
            self._memory = None  # free it before the larger one is there
            self._memory = like.new_empty(size)
        return self._memory[:size].view(shape)


class Chunk:
    """The recorded pass of data points x [n, A, ...]; outputs f [n, C] are averaged over the A
    copies.

    requests: all that will be asked of the output cotangents, if known: then only as much of them
    is kept. pulls: what the way back will ask of them besides.
    """

    def __init__(
        self,
        plan: Plan,
        x: Inputs,
        selection: Selection,
        *,
        differentiate: Differentiate = "never",
        requests: Sequence[Request] | None = None,
        pulls: Sequence[Request] = (),
        scratch: Scratch | None = None,
    ):
        self.plan = plan
        self.x = x
        self.selection = selection
        self.scratch = scratch or Scratch()
        self.n, self.copies = tensors_of(x)[0].shape[:2]
        recorder, outputs = self._recorded()
        self.f = outputs.reshape(self.n, self.copies, -1).mean(1)
        self._uses = plan.matched(recorder, self.n * self.copies)
        self.differentiable = differentiate == "always" or (
            differentiate == "where needed" and not self._linear()
        )
        f = self.f if self.differentiable else self.f.detach()
        self.seeds = selection.seeds(f).to(f.dtype)
        self.mixing = selection.weights(self.f)  # stays in the graph of the outputs
        self._inputs = [self._input(index) for index in range(len(self._uses))]
        self._requests = requests
        self._pulls = pulls
        self._computed: dict[int, Tensor] | None = None
        self._made: dict[tuple[int, str, str], Tensor] = {}  # in place of cotangents
        self._outputs: list[Tensor] = []  # what has received a cotangent, and the cotangents
        self._bars: list[Tensor] = []
        self._persample: dict[str, Tensor] | None = None
        self._persample_bars: dict[str, Tensor] = {}

    def _recorded(self) -> tuple[Recorder, Tensor]:
        """The pass itself; a model that is known to write to its inputs gets copies of them."""
        tensors = tensors_of(self.x)
        before = versions(tensors)
        x = map_inputs(lambda t: t.flatten(0, 1), self.x)
        with Recorder(self.plan.weights) as recorder:
            outputs = self.plan.model(copied(x) if self.plan.writes_inputs else x)
        if versions(tensors) != before:
            raise CurvatureError(
                "the model changes its input in place, for these data though not for the first "
                "ones, and has overwritten it; use out-of-place operations on the input"
            )
        return recorder, checked_outputs(outputs, self.n * self.copies)

    def _linear(self) -> bool:
        """Whether no cotangent depends on the inputs, as far as they are differentiated."""
        leaves = [t for t in tensors_of(self.x) if t.requires_grad]
        if not leaves or not self.f.requires_grad:
            return True
        edges = [use.edge for use, _ in self._uses]
        sources = [get_gradient_edge(t).node for t in leaves] + [
            edge.node for edge in edges if edge is not None
        ]
        return piecewise_linear(self.f, sources)

    @property
    def k(self) -> int:
        """Seeded rows per datum."""
        return self.seeds.shape[1]

    def weights(self) -> Tensor | None:
        """Mixing weights [n, K, R] in the dtype of the rows, detached."""
        return None if self.mixing is None else self.mixing.detach().to(self.f.dtype)

    @property
    def _cotangents(self) -> dict[int, Tensor]:
        """Output cotangents [n, K, Q, ...] of the uses; computed when first asked for, one seed
        after the other.
        """
        if self._computed is None:
            made, whole = self._needed()
            needed = whole.union(index for index, *_ in made)
            by_seed: dict[int, list[Tensor]] = {}
            pieces: dict[tuple[int, str, str], list[Tensor]] = {}
            for k in range(self.k):
                with torch.enable_grad():
                    found = self._backward(self.seeds[:, k], needed, self.differentiable)
                for index, role, what in made:
                    g = found[index].unsqueeze(1)
                    piece = (
                        self._rows(index, role, g)
                        if what == "rows"
                        else self._positions(index, role, g, what)
                    )
                    pieces.setdefault((index, role, what), []).append(piece)
                for index in whole & found.keys():
                    by_seed.setdefault(index, []).append(found.pop(index))
                del found
            with torch.enable_grad():
                self._computed = {i: _stacked(by_seed.pop(i)) for i in list(by_seed)}
            self._made = {key: torch.cat(by, 1) for key, by in pieces.items()}
        return self._computed

    def _needed(self) -> tuple[list[tuple[int, str, Form | Literal["rows"]]], set[int]]:
        """What to make of the cotangents at once because it is smaller, and the uses whose
        cotangents stay.
        """
        if self._requests is None or self.differentiable:
            return [], set(range(len(self._uses)))
        made: dict[tuple[int, str, Form | Literal["rows"]], None] = {}
        whole: set[int] = set()
        weighted: set[int] = set()
        for name, what in (*self._requests, *self._pulls):
            for index, role in () if name in self.plan.persample else self.plan.uses_of[name]:
                size = self._uses[index][0].shape.numel() // (self.n * self.copies)
                if what == "weighted":
                    weighted.add(index)
                elif what == "reduce" or (
                    what == "rows" and self.plan.weights[name].numel() < size
                ):
                    made[index, role, what] = None
                else:
                    whole.add(index)
        # a weighted sum takes a backward pass down to its use, on average half of one: too many of
        # them are made of the cotangents of all seeds instead, and any number if these are needed
        # anyway
        return list(made), whole if not whole and len(weighted) <= 2 * self.k else whole | weighted

    def _input(self, index: int) -> Tensor | None:
        use, layout = self._uses[index]
        if layout is None or use.input is None:
            return None
        use.call.options["axis"] = layout.axis
        aligned = use.rule.align_input(use.call, layout.axis, tuple(use.shape))
        return None if aligned is None else layout.standard(aligned, self.n * self.copies, self.n)

    def _backward(self, seed: Tensor, needed: set[int], create_graph: bool) -> dict[int, Tensor]:
        """The standardised output cotangents of the planned uses among `needed`, for one seed per
        datum [n, C].
        """
        planned = {
            i: (use, layout)
            for i, (use, layout) in enumerate(self._uses)
            if layout is not None and i in needed
        }
        if not planned:
            return {}
        edges = [cast(GradientEdge, use.edge) for use, _ in planned.values()]
        cotangents = torch.autograd.grad(
            self.f, edges, seed, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        found = {}
        for (i, (use, layout)), g in zip(planned.items(), cotangents, strict=True):
            use.call.options["axis"] = layout.axis
            # None: the outputs do not depend on this use
            g = self.f.new_zeros(use.shape) if g is None else g
            found[i] = layout.standard(g, self.n * self.copies, self.n)
        return found

    def drop_graph(self) -> None:
        """Keep what rows and factors are made of; nothing can be pulled back afterwards."""
        self._inputs = [_detached(a) for a in self._inputs]
        self._computed = {i: g.detach() for i, g in self._cotangents.items()}
        self._uses = [(use.without_graph(), layout) for use, layout in self._uses]
        self.f, self.mixing = self.f.detach(), _detached(self.mixing)

    def rows(self, name: str, out: Tensor | None = None) -> Tensor:
        """Jacobian rows [n, K, *shape] of one weight, one per seed, without a graph; written to
        `out` if given.
        """
        if name in self.plan.persample:
            rows = self._persample_rows()[name]
            return rows if out is None else out.copy_(rows)
        total: Tensor | None = None
        for index, role in self.plan.uses_of[name]:
            made = self._made_of(index, role, "rows")
            rows = (
                self._rows(index, role, self._cotangents[index].detach()) if made is None else made
            )
            total = rows if total is None else total + rows
        assert total is not None
        return total if out is None else out.copy_(total)

    def _made_of(self, index: int, role: str, what: str) -> Tensor | None:
        """What was made of a use's cotangents in their place."""
        _ = self._cotangents
        return self._made.get((index, role, what))

    def _rows(self, index: int, role: str, g: Tensor) -> Tensor:
        use, _ = self._uses[index]
        return use.rule.rows(use.call, role, _detached(self._inputs[index]), g)

    def pull_rows(self, name: str, bar: Tensor) -> None:
        """Take the cotangent [n, K, *shape] of `rows(name)` back to the operations' inputs and
        output cotangents.
        """
        if name in self.plan.persample:
            self._persample_bars[name] = bar.clone()  # it may be scratch
            return
        for index, role in self.plan.uses_of[name]:
            wanted = self._wanted(index)
            if any(wanted):
                use, _ = self._uses[index]
                a, g = _detached(self._inputs[index]), self._cotangents.get(index)
                # rows are linear in the cotangents: one weighted sum of them serves all seeds
                if g is None:
                    seed = torch.einsum("nk,nkc->nc", bar.flatten(1), self.seeds)
                    g, bar = (
                        self._backward(seed, {index}, False)[index].unsqueeze(1),
                        torch.ones_like(bar[:, :1]),
                    )
                a_bar, g_bar = use.rule.pull_rows(use.call, role, a, g.detach(), bar, wanted)
                self._push_pair(index, (_apart(a_bar, bar), _apart(g_bar, bar)))

    def _wanted(self, index: int, of_cotangents: bool = True) -> Wanted:
        """Whether a use's input, and its output cotangents, depend on anything that is
        differentiated.
        """
        a = self._inputs[index]
        g = of_cotangents and self.differentiable and self._cotangents[index].requires_grad
        return a is not None and a.requires_grad, g

    def _push_pair(self, index: int, bars: tuple[Tensor | None, Tensor | None]) -> None:
        (a_bar, g_bar), a = bars, self._inputs[index]
        if a_bar is not None and a is not None:
            self._push(a, a_bar)
        if g_bar is not None:
            self._push(self._cotangents[index], g_bar)

    def input_moment(self, name: str, *, double: bool = False) -> Tensor:
        """Mean over copies, then sum of outer products of the patches [groups, D, D], over all uses
        of a weight.
        """
        moments = []
        for index, role in self.plan.uses_of[name]:
            use, mean = self._uses[index][0], self._mean_input(index).detach()
            moments.append(use.rule.moment(use.call, role, mean.double() if double else mean))
        return sum(moments[1:], moments[0])

    def pull_input_moment(self, name: str, bar: Tensor) -> None:
        for index, role in self.plan.uses_of[name]:
            if self._wanted(index, of_cotangents=False)[0]:
                use, mean = self._uses[index][0], self._mean_input(index).detach()
                a_bar = (
                    use.rule.pull_moment(use.call, role, mean.to(bar.dtype), bar).to(mean.dtype)
                    / self.copies
                )
                a_bar = (
                    a_bar.unsqueeze(1)
                    .expand(-1, self.copies, *[-1] * (a_bar.dim() - 1))
                    .flatten(1, 2)
                )
                self._push_pair(index, (a_bar, None))

    def _mean_input(self, index: int) -> Tensor:
        a = self._inputs[index]
        assert a is not None
        return a if self.copies == 1 else a.unflatten(1, (self.copies, -1)).mean(1)

    def n_positions(self, name: str) -> int:
        """Shared positions T of a weight's uses together, per input."""
        weight, batch = self.plan.weights[name], self.n * self.copies
        outputs = weight.shape[self._uses[self.plan.uses_of[name][0][0]][0].rule.output_axis]
        return sum(self._uses[index][0].shape.numel() for index, _ in self.plan.uses_of[name]) // (
            batch * outputs
        )

    def input_factors(self, name: str, form: Form) -> list[Tensor | None]:
        """For every use of a weight, its patches [n, T, groups, D]; None for a bias."""
        found = []
        for index, role in self.plan.uses_of[name]:
            a = _detached(self._inputs[index])
            found.append(None if a is None else self._patches(index, role, a, form))
        return found

    def output_factors(self, name: str, form: Form) -> list[Tensor]:
        """For every use of a weight, its positions [n, K, T, groups, O]."""
        found = []
        for index, role in self.plan.uses_of[name]:
            made = self._made_of(index, role, form)
            if made is None:
                made = self._positions(index, role, self._cotangents[index].detach(), form)
            found.append(made)
        return found

    def _patches(self, index: int, role: str, a: Tensor, form: Form) -> Tensor | None:
        (use, _), rule = self._uses[index], self._uses[index][0].rule
        if form == "all":
            patches = rule.patches(use.call, role, a)
        else:  # patches are linear in the input: averaging copies first is the same and cheaper
            a = a.unflatten(1, (self.copies, -1)).mean(1)
            patches = (
                rule.patches(use.call, role, a)
                if form == "expand"
                else rule.mean_patch(use.call, role, a)
            )
        if patches is None:
            return None
        patches = patches.flatten(1, 2)
        return patches.mean(1, keepdim=True) if form == "reduce" else patches

    def _positions(self, index: int, role: str, g: Tensor, form: Form) -> Tensor:
        use, _ = self._uses[index]
        if form != "all":
            g = g.unflatten(2, (self.copies, -1)).sum(2)
        positions = (
            use.rule.positions(use.call, role, g.flatten(0, 1))
            .flatten(1, 2)
            .unflatten(0, g.shape[:2])
        )
        return positions.sum(2, keepdim=True) if form == "reduce" else positions

    def pull_factors(
        self, name: str, form: Form, bars: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> None:
        """Take the cotangents of the factors back, use by use: (of patches, of positions)."""
        for (index, role), (patches_bar, positions_bar) in zip(
            self.plan.uses_of[name], bars, strict=True
        ):
            if patches_bar is not None and self._wanted(index, of_cotangents=False)[0]:

                def patches(a: Tensor, _: None, index: int = index, role: str = role) -> Tensor:
                    found = self._patches(index, role, a, form)
                    assert found is not None  # it had a cotangent
                    return found

                self._push_pair(
                    index,
                    pull_by_autograd(
                        patches, self._inputs[index], None, patches_bar, (True, False)
                    ),
                )
            if positions_bar is not None and self._wanted(index)[1]:

                def positions(_: None, g: Tensor, index: int = index, role: str = role) -> Tensor:
                    return self._positions(index, role, g, form)

                g = self._cotangents[index]
                self._push_pair(
                    index, pull_by_autograd(positions, None, g, positions_bar, (False, True))
                )

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
                    self.plan.model, names, taken(self.x, i), i, self._seeds_of, bars_i, leaves
                )
                total = [t + g for t, g in zip(total, gradients, strict=True)]
        return total

    def _seeds_of(self, f: Tensor, i: int) -> Tensor:
        return self.selection.of(i).seeds(f)[0].to(f.dtype)

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


def _stacked(by_seed: list[Tensor]) -> Tensor:
    """[n, K, ...]; a single seed needs no copy."""
    return by_seed[0].unsqueeze(1) if len(by_seed) == 1 else torch.stack(by_seed, 1)


def _apart(t: Tensor | None, scratch: Tensor) -> Tensor | None:
    """A copy, if it is a view of memory that will be used again."""
    shared = (
        t is not None and t.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
    )
    return t.clone() if shared and t is not None else t


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()
