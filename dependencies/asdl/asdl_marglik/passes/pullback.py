"""The way back through a chunk: cotangents of its rows and factors become gradients.

Rows are bilinear in the inputs `a` and the output cotangents `g` of the operations that use a
weight, so that the cotangent of a row gives one of `a` and one of `g`. One autograd call then
carries all of them, together with those of the network's outputs, to the hyperparameters. For a
piecewise linear network `g` does not depend on the inputs almost everywhere, and its part of the
graph need not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asdl_marglik.passes.forward import Chunk, Form, detached
from asdl_marglik.rules.base import Wanted, pull_by_autograd
from asdl_marglik.watch import persample
from asdl_marglik.watch.model import taken


class PullBack:
    """Collects cotangents for one chunk; `gradients` takes all of them back at once.

    Args:
        chunk: run with a graph, which `gradients` uses up.
    """

    def __init__(self, chunk: Chunk):
        self.chunk = chunk
        self._tensors: list[Tensor] = []  # that have received a cotangent
        self._bars: list[Tensor] = []  # the cotangents
        self._persample_bars: dict[str, Tensor] = {}
        self._finished: set[str] = set()  # weights

    def finished(self, name: str) -> None:
        """Nothing more will be taken in for this weight: memory that nothing else needs goes."""
        self._finished.add(name)
        if name in self.chunk.plan.persample:
            return
        for index, _ in self.chunk.plan.uses_of[name]:
            if self._finished.issuperset(self.chunk.use(index).names.values()):
                self.chunk.drop_cotangents(index)

    def rows(self, name: str, bar: Tensor) -> None:
        """Take in the cotangent [n, K, *shape] of `chunk.rows(name)`."""
        if name in self.chunk.plan.persample:
            self._persample_bars[name] = bar.clone()  # it may be scratch
            return
        for index, role in self.chunk.plan.uses_of[name]:
            wanted = self._wanted(index)
            if any(wanted):
                self._rows_of_use(index, role, bar, wanted)

    def _rows_of_use(self, index: int, role: str, bar: Tensor, wanted: Wanted) -> None:
        chunk = self.chunk
        use = chunk.use(index)
        a = detached(chunk.inputs[index])
        g = chunk.use_cotangents.whole.get(index)
        rows_bar = bar
        if g is None:
            # rows are linear in the cotangents: one weighted sum of them serves all K
            weighted = torch.einsum("nk,nkc->nc", bar.flatten(1), chunk.output_cotangents)
            g = chunk.backward(weighted, {index}, create_graph=False)[index].unsqueeze(1)
            rows_bar = torch.ones_like(bar[:, :1])
        bars = use.rule.pull_rows(use.call, role, a, g.detach(), rows_bar, wanted)
        a_bar, g_bar = (
            _apart(t, rows_bar) if is_wanted else None
            for t, is_wanted in zip(bars, wanted, strict=True)
        )
        self._add_pair(index, a_bar, g_bar)

    def input_moment(self, name: str, bar: Tensor) -> None:
        """Take in the cotangent [groups, D, D] of `chunk.input_moment(name)`."""
        chunk = self.chunk
        for index, role in chunk.plan.uses_of[name]:
            if not self._wanted_input(index):
                continue
            use = chunk.use(index)
            mean = chunk.mean_input(index).detach()
            mean_bar = use.rule.pull_moment(use.call, role, mean.to(bar.dtype), bar).to(mean.dtype)
            copy_bar = (mean_bar / chunk.copies).unsqueeze(1)
            every_copy = copy_bar.expand(-1, chunk.copies, *[-1] * (copy_bar.dim() - 2))
            self._add_pair(index, every_copy.flatten(1, 2), None)

    def factors(
        self, name: str, form: Form, bars: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> None:
        """Take in the cotangents of the factors of a weight.

        Args:
            name: of the weight.
            form: in which the factors were asked for.
            bars: for every use, those of patches and of positions.
        """
        uses = self.chunk.plan.uses_of[name]
        for (index, role), (patches_bar, positions_bar) in zip(uses, bars, strict=True):
            if patches_bar is not None and self._wanted_input(index):
                self._patches(index, role, form, patches_bar)
            if positions_bar is not None and self._wanted(index)[1]:
                self._positions(index, role, form, positions_bar)

    def _patches(self, index: int, role: str, form: Form, bar: Tensor) -> None:
        def patches(a: Tensor, _: None) -> Tensor:
            factor = self.chunk.patches(index, role, a, form)
            assert factor is not None  # it had a cotangent
            return factor

        a = self.chunk.inputs[index]
        self._add_pair(index, *pull_by_autograd(patches, a, None, bar, (True, False)))

    def _positions(self, index: int, role: str, form: Form, bar: Tensor) -> None:
        def positions(_: None, g: Tensor) -> Tensor:
            return self.chunk.positions(index, role, g, form)

        g = self.chunk.use_cotangents.whole[index]
        self._add_pair(index, *pull_by_autograd(positions, None, g, bar, (False, True)))

    def mixing(self, bar: Tensor | None) -> None:
        """Take in the cotangent [n, K, R] of `chunk.mixing`."""
        mixing = self.chunk.mixing_with_graph
        if bar is not None and mixing is not None and mixing.requires_grad:
            self._add(mixing, bar.to(mixing.dtype))

    def outputs(self, bar: Tensor) -> None:
        """Take in the cotangent [n, C] of `chunk.f`."""
        f = self.chunk.f
        if f.requires_grad:
            self._add(f, bar.to(f.dtype))

    def gradients(self, leaves: Sequence[Tensor], *, shared: bool = False) -> list[Tensor]:
        """Gradients in `leaves` of all that was taken in.

        Args:
            leaves: of the graph.
            shared: other chunks may have parts of the graph in common with this one; otherwise its
                memory goes while the gradients are made.
        """
        total = [torch.zeros_like(leaf) for leaf in leaves]
        received = [
            (t, bar) for t, bar in zip(self._tensors, self._bars, strict=True) if t.requires_grad
        ]
        if received and leaves:
            tensors, bars = zip(*received, strict=True)
            by_graph = torch.autograd.grad(
                tensors, leaves, bars, retain_graph=shared, allow_unused=True
            )
            total = [t if g is None else t + g for t, g in zip(total, by_graph, strict=True)]
        if self._persample_bars:
            for i in range(self.chunk.n):
                by_leaf = self._persample_gradients(i, leaves)
                total = [t + g for t, g in zip(total, by_leaf, strict=True)]
        return total

    def _persample_gradients(self, i: int, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Those of datum i, through the rows of weights that no rule covers."""
        chunk = self.chunk
        bars = {name: bar[i] for name, bar in self._persample_bars.items()}
        weights = {name: chunk.plan.weights[name] for name in bars}
        x = taken(chunk.x, i)

        def cotangents(f: Tensor, i: int) -> Tensor:
            return chunk.selection.of(i).cotangents(f)[0].to(f.dtype)

        return persample.pull(chunk.plan.model, weights, x, i, cotangents, bars, leaves)

    def _wanted_input(self, index: int) -> bool:
        """Whether the input of a use depends on anything that is differentiated."""
        a = self.chunk.inputs[index]
        return a is not None and a.requires_grad

    def _wanted(self, index: int) -> Wanted:
        """Whether the input of a use, and its cotangents, depend on what is differentiated."""
        chunk = self.chunk
        g = chunk.differentiable and chunk.use_cotangents.whole[index].requires_grad
        return self._wanted_input(index), g

    def _add_pair(self, index: int, a_bar: Tensor | None, g_bar: Tensor | None) -> None:
        a = self.chunk.inputs[index]
        if a_bar is not None and a is not None:
            self._add(a, a_bar)
        if g_bar is not None:
            self._add(self.chunk.use_cotangents.whole[index], g_bar)

    def _add(self, tensor: Tensor, bar: Tensor) -> None:
        for position, known in enumerate(self._tensors):
            if known is tensor:
                self._bars[position] = self._bars[position] + bar
                return
        self._tensors.append(tensor)
        self._bars.append(bar)


def _apart(t: Tensor | None, scratch: Tensor) -> Tensor | None:
    """A copy, if it is a view of memory that will be used again."""
    if t is None:
        return None
    shared = t.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
    return t.clone() if shared else t
