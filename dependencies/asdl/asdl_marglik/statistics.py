"""Two passes over the data: small statistics first, exact gradients of anything computed from them second.

Pass 1 runs chunk by chunk without keeping a graph and leaves the outputs and small statistics, as the results of one
autograd node. Whatever is computed from those (log-determinant, likelihood) is ordinary small-space autograd. When a
gradient comes back to the node, pass 2 runs the chunks again with a graph, one at a time, and pulls the cotangents of
the statistics through. Exact, and the memory of one chunk plus what the parts keep. If only the prior or the noise is
differentiated, no gradient reaches the node and pass 2 never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .chunk import Chunk, RootRows, Selection
from .errors import CurvatureError
from .kernel import Gram
from .network import Inputs, check_finite, check_inputs, evaluating, map_inputs, seeded, tensors_of
from .part import Part
from .plan import Plan

Batch = tuple[Inputs, Tensor, Tensor]  # inputs, targets, columns [n, K]


@dataclass
class Passes:
    """Everything needed to run both passes over the same data with the same random draws."""

    plan: Plan
    parts: list[Part]
    rule: RootRows
    batches: Callable[[], Iterable[Batch]]  # the same batches, in the same order, every time
    augment: nn.Module | None
    n_data: int  # in all batches together
    chunk_inputs: int
    seed: int
    network_leaves: list[Tensor]  # hyperparameters inside the network or the likelihood's root
    hyper_in_network: bool
    differentiate_augmentation: bool = True
    reuse: bool = False  # keep the first pass: later evaluations only look at prior and likelihood
    targets: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    _fingerprints: list[Tensor] = field(default_factory=list)
    _observations: list[list[Tensor]] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _results: list[Tensor] = field(default_factory=list)

    @property
    def augment_leaves(self) -> list[Tensor]:
        if self.augment is None or not self.differentiate_augmentation:
            return []
        return [p for p in self.augment.parameters() if p.requires_grad]

    @property
    def summary_depends_on_precision(self) -> bool:
        return any(isinstance(part, Gram) and part.elementwise for part in self.parts)

    def augmented(self, x: Inputs, index: int) -> Inputs:
        """Copies [n, A, ...] of a batch, the same ones in both passes."""
        if self.augment is None:
            return map_inputs(lambda t: t.unsqueeze(1), x)
        return augmented(self.augment, x, self.seed + index)

    def _slices(self, x: Inputs) -> Iterator[slice]:
        n, copies = tensors_of(x)[0].shape[:2]
        step = max(1, self.chunk_inputs // copies)
        for start in range(0, n, step):
            yield slice(start, min(start + step, n))

    def first(self, log_precision: Tensor, keep: bool) -> list[Tensor]:
        """Outputs [N, C], then the statistics of every part."""
        if self._results:
            if self.summary_depends_on_precision:
                return [self._results[0], *self._summarise(self._observations, log_precision)]
            return self._results
        outputs: list[Tensor] = []
        collected = [_Collected() for _ in self.parts]
        self.targets, self.columns, self._fingerprints, count = [], [], [], 0
        self._versions = self._current_versions()
        with self._running():
            for index, (x, y, columns) in enumerate(self.batches()):
                check_inputs(x, count)
                self._fingerprints.append(_fingerprint(x))
                self.targets.append(y)
                self.columns.append(columns)
                with torch.no_grad():
                    copies = self.augmented(x, index)
                for own in self._slices(copies):
                    torch.manual_seed(self.seed)
                    with torch.enable_grad():
                        chunk = Chunk(self.plan, _take(copies, own), Selection(self.rule, y[own], columns[own]))
                    check_finite(chunk.f, _take(copies, own), self.plan.model, count + own.start)
                    outputs.append(chunk.f.detach())
                    for part, store in zip(self.parts, collected, strict=True):
                        store.add(part, chunk, self.n_data)
                count += len(y)
        if count != self.n_data:
            raise CurvatureError(
                f"the loader gave {count} data points in all, but n_data={self.n_data}; the two must agree"
            )
        observations = [store.all for store in collected]
        results = [torch.cat(outputs), *self._summarise(observations, log_precision)]
        if keep or (self.reuse and self.summary_depends_on_precision):
            self._observations = observations
        if self.reuse:
            self._results = results
        return results

    def _summarise(self, observations: list[list[Tensor]], log_precision: Tensor) -> list[Tensor]:
        statistics = [p.summarise(o, log_precision) for p, o in zip(self.parts, observations, strict=True)]
        self._counts = [len(s) for s in statistics]
        return [s for part in statistics for s in part]

    def split(self, flat: list[Tensor]) -> list[list[Tensor]]:
        """A flat list of statistics, or of their cotangents, part by part."""
        remaining = iter(flat)
        return [[next(remaining) for _ in range(count)] for count in self._counts]

    def precision_gradient(self, bars: list[list[Tensor]], log_precision: Tensor) -> Tensor:
        """Gradient in the log precision of the statistics that depend on it."""
        total = torch.zeros_like(log_precision)
        for part, observations, part_bars in zip(self.parts, self._observations, bars, strict=True):
            gradient = part.precision_gradient(observations, part_bars, log_precision)
            if gradient is not None:
                total += gradient
        return total

    def second(
        self, f_bar: Tensor | None, bars: list[list[Tensor]], log_precision: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients in the network leaves and in the augmentation's parameters."""
        if self._current_versions() != self._versions:
            raise CurvatureError(
                "parameters were changed between the evidence and its backward pass, which would mix old and new "
                "values; call backward before any optimiser step"
            )
        totals = [torch.zeros_like(leaf) for leaf in self.network_leaves]
        augment_totals = [torch.zeros_like(leaf) for leaf in self.augment_leaves]
        count = 0
        with self._running(), torch.enable_grad():
            for index, (x, y, columns) in enumerate(self.batches()):
                self._check_repeated(index, x, y)
                copies = self.augmented(x, index)
                copies_bar = [torch.zeros_like(t) for t in tensors_of(copies) if t.requires_grad]
                for own in self._slices(copies):
                    leaf = map_inputs(lambda t: t.detach().requires_grad_(t.requires_grad), _take(copies, own))
                    leaves = [t for t in tensors_of(leaf) if t.requires_grad]
                    span = slice(count + own.start, count + own.stop)
                    torch.manual_seed(self.seed)
                    chunk = Chunk(
                        self.plan, leaf, Selection(self.rule, y[own], columns[own]),
                        differentiate_cotangents=self._needs_full_graph,
                    )  # fmt: skip
                    for part, observations, part_bars in zip(self.parts, self._observations, bars, strict=True):
                        part.pull(chunk, observations, part_bars, span, log_precision)
                    found = chunk.finish(None if f_bar is None else f_bar[span], [*self.network_leaves, *leaves])
                    for total, gradient in zip(totals, found[: len(totals)], strict=True):
                        total += gradient
                    for total, gradient in zip(copies_bar, found[len(totals) :], strict=True):
                        total[own] = gradient
                if copies_bar:
                    outputs = [t for t in tensors_of(copies) if t.requires_grad]
                    found_augment = torch.autograd.grad(outputs, self.augment_leaves, copies_bar, allow_unused=True)
                    for total, gradient in zip(augment_totals, found_augment, strict=True):
                        if gradient is not None:
                            total += gradient
                count += len(y)
        if count != sum(len(y) for y in self.targets):
            raise CurvatureError(_OTHER_BATCHES)
        return totals, augment_totals

    def _current_versions(self) -> list[int]:
        """How often each parameter behind the outputs has been written to."""
        modules = [self.plan.model] if self.augment is None else [self.plan.model, self.augment]
        return [p._version for module in modules for p in module.parameters()]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The model in evaluation mode, and random draws that leave the global state alone."""
        with evaluating(self.plan.model), seeded(self.seed, next(self.plan.model.parameters()).device):
            yield

    @property
    def _needs_full_graph(self) -> bool:
        """Whether the output cotangents themselves depend on what is differentiated."""
        return not self.plan.piecewise_linear or self.hyper_in_network or self.rule.seeds_follow_outputs

    def _check_repeated(self, index: int, x: Inputs, y: Tensor) -> None:
        same = index < len(self.targets) and torch.equal(self.targets[index], y)
        if not same or not torch.equal(self._fingerprints[index], _fingerprint(x)):
            raise CurvatureError(_OTHER_BATCHES)


_OTHER_BATCHES = (
    "the loader gave other batches in the second pass than in the first; gradients need the same data in the same "
    "order: use shuffle=False (any fixed order will do)"
)


class _TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, log_precision: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.save_for_backward(log_precision)
        return tuple(passes.first(log_precision.detach(), keep=any(ctx.needs_input_grad)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, f_bar: Tensor, *bars: Tensor) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        (log_precision,) = ctx.saved_tensors
        by_part = passes.split(list(bars))
        precision_bar = None
        if ctx.needs_input_grad[1]:
            precision_bar = passes.precision_gradient(by_part, log_precision)
        leaves = ctx.needs_input_grad[2:]
        if not any(leaves):
            return (None, precision_bar, *[None] * len(leaves))
        network, augment = passes.second(f_bar, by_part, log_precision)
        return (None, precision_bar, *network, *augment)


def statistics(passes: Passes, log_precision: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs f [N, C] and the statistics of every part, differentiable in all hyperparameters of the forward pass."""
    precision = log_precision if passes.summary_depends_on_precision else log_precision.detach()
    f, *flat = _TwoPasses.apply(passes, precision, *passes.network_leaves, *passes.augment_leaves)
    return f, passes.split(flat)


def augmented(augment: nn.Module, x: Inputs, seed: int) -> Inputs:
    """The module's copies [n, A, ...] of x [n, ...], with random draws that depend on `seed` alone."""
    n, device = len(tensors_of(x)[0]), tensors_of(x)[0].device
    with seeded(seed, device):
        copies = augment(x)
    for t, original in zip(tensors_of(copies), tensors_of(x), strict=True):
        if t.dim() != original.dim() + 1 or t.shape[0] != n:
            raise CurvatureError(
                "the augmentation must turn inputs [n, ...] into copies [n, A, ...]; from "
                f"{tuple(original.shape)} it made {tuple(t.shape)}; for a single copy return x.unsqueeze(1)"
            )
    return copies


def _fingerprint(x: Inputs, entries: int = 1000) -> Tensor:
    """A few entries of the inputs, by which to know them again."""
    flat = [t.detach().flatten() for t in tensors_of(x)]
    return torch.cat([t[:: max(1, t.numel() // entries)].double() for t in flat])


def _take(x: Inputs, own: slice) -> Inputs:
    return map_inputs(lambda t: t[own], x)


class _Collected:
    """Observations of one part over chunks: "rows" side by side in one buffer, "sum" added up."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._count = 0

    @property
    def all(self) -> list[Tensor]:
        return self._held

    def add(self, part: Part, chunk: Chunk, n_data: int) -> None:
        own = slice(self._count, self._count + chunk.n)
        self._count += chunk.n
        if self._count > n_data:  # reported, with the full count, when all batches are read
            return
        if chunk.n == n_data:  # a single chunk
            self._held = part.observe(chunk)
            return
        places = [h[own] for h in self._held] if self._held and set(part.kinds) == {"rows"} else None
        found = part.observe(chunk, places)
        if not self._held:
            self._held = [
                o.new_empty(n_data, *o.shape[1:]) if kind == "rows" else torch.zeros_like(o)
                for kind, o in zip(part.kinds, found, strict=True)
            ]
        for kind, held, observation in zip(part.kinds, self._held, found, strict=True):
            if kind == "sum":
                held += observation
            elif places is None or observation.data_ptr() != held[own].data_ptr():
                held[own] = observation
