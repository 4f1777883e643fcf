"""Two passes over the data: small statistics first, exact gradients of anything computed from them
second.

Pass 1 runs chunk by chunk without keeping a graph and leaves the outputs and small statistics, as
the results of one autograd node. Whatever is computed from those (log-determinant, likelihood) is
ordinary small-space autograd. When a gradient comes back to the node, pass 2 runs the chunks again
with a graph, one at a time, and pulls the cotangents of the statistics through. Exact, and the
memory of one chunk plus what the parts keep. If only the prior or the noise is differentiated, no
gradient reaches the node and pass 2 never runs.

What stays in memory between the chunks: `Collected` keeps the observations of every part, all
that a second pass may need, and little where observations are sums. `Deferred` keeps, of every
chunk, the inputs and output cotangents of the operations instead, and makes the observations at the
end, one after the other: the rows of all weights are never in memory together. It serves where no
second pass follows and what it keeps is smaller than the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from asdl_marglik.curvature.term import Term
from asdl_marglik.errors import CurvatureError
from asdl_marglik.passes.forward import Chunk, Differentiate, Scratch
from asdl_marglik.passes.memory import Arrangement
from asdl_marglik.passes.root_rows import RootRows, Selection
from asdl_marglik.passes.shortcuts import ALL, FastPaths
from asdl_marglik.watch.model import (
    Inputs,
    check_finite,
    check_hooks,
    checksum,
    copied,
    evaluating,
    fingerprint,
    finite,
    full_precision,
    map_inputs,
    seed_all,
    seeded,
    taken,
    tensors_of,
)
from asdl_marglik.watch.plan import Plan

Batch = tuple[Inputs, Tensor, Tensor]  # inputs, targets, columns [n, K]
# relative difference of two computations of the same; other random numbers differ by far more
ALIKE = 1e-4


class Residency(ABC):
    """Takes chunks in, gives observations of all data out."""

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Take in one more chunk."""

    @abstractmethod
    def observations(self) -> Iterator[Iterable[Tensor]]:
        """For every part, its observations of all data; each may be used only until the next is
        asked for.
        """


class Collected(Residency):
    """Observations of every part as they come: "rows" side by side in one buffer, "sum" added
    up.
    """

    def __init__(self, parts: Sequence[Term], n_data: int):
        self._parts = parts
        self._n_data = n_data
        self._count = 0
        self._held: list[list[Tensor]] = [[] for _ in parts]

    def add(self, chunk: Chunk) -> None:
        own = slice(self._count, self._count + chunk.n)
        self._count += chunk.n
        if self._count > self._n_data:  # reported, with the full count, when all batches are read
            return
        for part, held in zip(self._parts, self._held, strict=True):
            self._add(part, chunk, held, own)

    def _add(self, part: Term, chunk: Chunk, held: list[Tensor], own: slice) -> None:
        if chunk.n == self._n_data:  # a single chunk
            held.extend(part.observe(chunk))
            return
        places = [h[own] for h in held] if held and set(part.kinds) == {"rows"} else None
        found = list(part.observe(chunk, places))
        if not held:
            held.extend(
                o.new_empty(self._n_data, *o.shape[1:]) if kind == "rows" else torch.zeros_like(o)
                for kind, o in zip(part.kinds, found, strict=True)
            )
        for kind, kept, observation in zip(part.kinds, held, found, strict=True):
            if kind == "sum":
                kept += observation
            elif places is None or observation.data_ptr() != kept[own].data_ptr():
                kept[own] = observation

    def observations(self) -> Iterator[Iterable[Tensor]]:
        return iter(self._held)

    @property
    def held(self) -> list[list[Tensor]]:
        """Observations by part, to keep for a second pass."""
        return self._held


class Deferred(Residency):
    """Chunks without their graphs; an observation is made of them when it is asked for."""

    def __init__(self, parts: Sequence[Term]):
        self._parts = parts
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        chunk.drop_graph()
        self._chunks.append(chunk)

    def observations(self) -> Iterator[Iterable[Tensor]]:
        return (self._of(part) for part in self._parts)

    def _of(self, part: Term) -> Iterator[Tensor]:
        by_chunk = [iter(part.observe(chunk)) for chunk in self._chunks]
        for kind in part.kinds:
            pieces = [next(observations) for observations in by_chunk]
            if len(pieces) == 1:
                yield pieces[0]
            else:
                yield torch.cat(pieces) if kind == "rows" else torch.stack(pieces).sum(0)


@dataclass
class Passes:
    """Everything needed to run both passes over the same data with the same random draws."""

    plan: Plan
    parts: list[Term]
    rule: RootRows
    batches: Callable[[], Iterable[Batch]]  # the same batches, in the same order, every time
    augment: nn.Module | None
    n_data: int  # in all batches together
    arrangement: Arrangement
    seed: int
    network_leaves: Sequence[Tensor]  # hyperparameters inside the network or the likelihood's root
    hyper_in_network: bool
    differentiate_augmentation: bool = True
    fast: FastPaths = ALL
    reuse: bool = False  # keep the first pass: later evaluations only look at prior and likelihood
    # of the second pass, with its arguments
    instead: Callable[..., tuple[list[Tensor], list[Tensor]]] | None = None
    targets: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    _fingerprints: list[Tensor] = field(default_factory=list)  # of the inputs of each batch
    _copy_fingerprints: list[Tensor] = field(default_factory=list)  # and of their augmented copies
    _outputs: Tensor | None = None  # of the first pass, as the second has to give them again
    _observations: list[list[Tensor]] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _checksum: Tensor | None = None  # of all parameters, in the first pass
    _results: list[Tensor] = field(default_factory=list)
    _kept: dict[int, Chunk] = field(default_factory=dict)
    _scratch: Scratch = field(default_factory=Scratch)

    @property
    def augment_leaves(self) -> list[Tensor]:
        if self.augment is None or not self.differentiate_augmentation:
            return []
        return [p for p in self.augment.parameters() if p.requires_grad]

    @property
    def summary_depends_on_precision(self) -> bool:
        return any(part.depends_on_precision for part in self.parts)

    def _all_copies(self) -> Iterator[Inputs]:
        return (self.augmented(x, index) for index, (x, _, _) in enumerate(self.batches()))

    @property
    def rows_of_data(self) -> tuple[Tensor, Tensor]:
        """Targets and columns of all data seen."""
        return torch.cat(self.targets), torch.cat(self.columns)

    @property
    def batch_lengths(self) -> list[int]:
        """Data points in each batch of the first pass."""
        return [len(y) for y in self.targets]

    def only(self, number: int, x: Inputs, y: Tensor) -> Passes:
        """The second pass over one batch of the first, at the hyperparameters of now."""
        columns = self.columns[number]
        return replace(
            self,
            batches=lambda: [(x, y, columns)],
            n_data=len(y),
            seed=self.seed + number,
            targets=[y],
            instead=None,
            _fingerprints=[self._fingerprints[number]],
            _copy_fingerprints=[],
            _outputs=None,
            _checksum=None,
        )

    def augmented(self, x: Inputs, index: int) -> Inputs:
        """Copies [n, A, ...] of a batch, the same ones in both passes."""
        if self.augment is None:
            return map_inputs(lambda t: t.unsqueeze(1), x)
        return augmented(self.augment, x, self.seed + index)

    def _slices(self, x: Inputs) -> list[slice]:
        n, copies = tensors_of(x)[0].shape[:2]
        number = -(-n // max(1, self.arrangement.chunk_inputs // copies))
        step = -(-n // number)  # chunks of equal size
        return [slice(start, min(start + step, n)) for start in range(0, n, step)]

    def _chunk(
        self,
        copies: Inputs,
        own: slice,
        y: Tensor,
        columns: Tensor,
        *,
        with_graph: bool,
        observe: bool,
    ) -> Chunk:
        """The pass over some data points, to observe, `with_graph` if cotangents will be taken back
        through it.
        """
        x = map_inputs(lambda t: t.detach(), taken(copies, own))
        if with_graph and self.augment_leaves:
            x = map_inputs(lambda t: t.requires_grad_(t.is_floating_point()), x)
        seed_all(self.seed, self.plan.device)
        with torch.enable_grad():
            return Chunk(
                self.plan,
                x,
                Selection(self.rule, y[own], columns[own]),
                differentiate=self._differentiate if with_graph else "never",
                scratch=self._scratch,
                requests=[request for part in self.parts for request in part.requests()]
                if observe
                else [],
                pulls=[request for part in self.parts for request in part.pulls(self.plan)]
                if with_graph
                else [],
            )

    def first(self, log_precision: Tensor, *, keep: bool, again: bool) -> list[Tensor]:
        """Outputs [N, C], then the statistics of every part.

        keep: the observations, for gradients that need them. again: a second pass will follow.
        """
        if self._results:
            if self.summary_depends_on_precision:
                return [self._results[0], *self._summarise(self._observations, log_precision)]
            return self._results
        keep |= self.reuse and self.summary_depends_on_precision
        collected = Collected(self.parts, self.n_data)
        held: Residency = Deferred(self.parts) if self.arrangement.defer and not keep else collected
        self._forget()
        self._checksum = checksum(self._parameters()) if again or self.reuse else None
        outputs: list[Tensor] = []
        inputs_finite: list[Tensor] = []
        with self._running():
            for index, (x, y, columns) in enumerate(self.batches()):
                inputs_finite.append(finite(x))
                self._fingerprints.append(fingerprint(x))
                self.targets.append(y)
                self.columns.append(columns)
                outputs.extend(self._observed(index, (x, y, columns), held, again=again))
            self._check_count()
            f = torch.cat(outputs)
            # looked at once: asking for every chunk would keep a GPU waiting
            check_finite(inputs_finite, f, self.plan.model, self._all_copies)
            self._outputs = f if again else None
            results = [f, *self._summarise(held.observations(), log_precision)]
        if keep:
            self._observations = collected.held
        if self.reuse:
            self._results = results
        return results

    def _forget(self) -> None:
        """Nothing is known of an earlier first pass."""
        self.targets = []
        self.columns = []
        self._kept = {}
        self._fingerprints = []
        self._copy_fingerprints = []

    def _observed(self, index: int, batch: Batch, held: Residency, *, again: bool) -> list[Tensor]:
        """Let `held` take in the chunks of a batch; returns their outputs."""
        x, y, columns = batch
        with torch.no_grad():
            copies = self.augmented(x, index)
        if again and self.augment is not None:
            self._copy_fingerprints.append(fingerprint(copies))
        slices = self._slices(copies)
        block = len(y) == self.n_data  # not a stream of batches
        kept = self.arrangement.kept_chunks if again and block else 0
        stay = {own.start for own in slices[max(0, len(slices) - kept) :]}
        outputs = []
        for own in slices:
            graph = own.start in stay
            chunk = self._chunk(copies, own, y, columns, with_graph=graph, observe=True)
            outputs.append(chunk.f.detach())
            held.add(chunk)
            if graph:
                self._kept[own.start] = chunk
            del chunk  # before the next is there
        return outputs

    def _check_count(self) -> None:
        count = sum(len(y) for y in self.targets)
        if count != self.n_data:
            raise CurvatureError(
                f"the loader gave {count} data points in all, but n_data={self.n_data}; the two "
                "must agree"
            )

    def _summarise(
        self, observations: Iterable[Iterable[Tensor]], log_precision: Tensor
    ) -> list[Tensor]:
        statistics = [
            p.summarise(o, log_precision) for p, o in zip(self.parts, observations, strict=True)
        ]
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
        if not self.unchanged:
            raise CurvatureError(
                "parameters were changed between the evidence and its backward pass, which would "
                "mix old and new values; call backward before any optimiser step"
            )
        try:
            return self._second(f_bar, bars, log_precision)
        except RuntimeError as error:
            if "derivative" not in str(error) or "not implemented" not in str(error):
                raise
            raise CurvatureError(
                f"the network uses an operation that torch cannot differentiate twice ({error}); "
                "gradients in an augmentation or in hyperparameters inside the network need "
                "that: write it with other operations, or learn prior, noise and temperature only"
            ) from error

    def _second(
        self, f_bar: Tensor | None, bars: list[list[Tensor]], log_precision: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        network = [torch.zeros_like(leaf) for leaf in self.network_leaves]
        augment = [torch.zeros_like(leaf) for leaf in self.augment_leaves]
        same = _Same()
        count = 0
        with self._running(), torch.enable_grad():
            for index, (x, y, columns) in enumerate(self.batches()):
                same.batches.append(self._repeated(index, x, y))
                copies = self.augmented(x, index)
                if self._copy_fingerprints:
                    known = self._copy_fingerprints[index]
                    same.copies.append(_alike(fingerprint(copies), known))
                copies_bar = [torch.zeros_like(t) for t in tensors_of(copies) if t.requires_grad]
                # chunks kept from the first pass come first, and go
                for own in reversed(self._slices(copies)):
                    chunk = self._kept.pop(own.start, None) if index == 0 else None
                    if chunk is None:
                        chunk = self._chunk(copies, own, y, columns, with_graph=True, observe=False)
                    span = slice(count + own.start, count + own.stop)
                    if self._outputs is not None:
                        same.outputs.append(_alike(chunk.f.detach(), self._outputs[span]))
                    found = self._pulled(chunk, copies, f_bar, bars, span, log_precision)
                    _add(network, found[: len(network)])
                    for total, gradient in zip(copies_bar, found[len(network) :], strict=True):
                        total[own] = gradient
                    del chunk, found
                if copies_bar:
                    moving = [t for t in tensors_of(copies) if t.requires_grad]
                    leaves = self.augment_leaves
                    _add(
                        augment, torch.autograd.grad(moving, leaves, copies_bar, allow_unused=True)
                    )
                count += len(y)
        self._scratch = Scratch()  # let its memory go
        same.check(all_batches=count == sum(len(y) for y in self.targets))
        _check_gradients([*network, *augment])
        return network, augment

    def _pulled(
        self,
        chunk: Chunk,
        copies: Inputs,
        f_bar: Tensor | None,
        bars: list[list[Tensor]],
        span: slice,
        log_precision: Tensor,
    ) -> list[Tensor]:
        """Gradients of a chunk in the network leaves, then in those of its inputs that move."""
        for part, observations, part_bars in zip(self.parts, self._observations, bars, strict=True):
            part.pull(chunk, observations, part_bars, span, log_precision)
        pairs = zip(tensors_of(chunk.x), tensors_of(copies), strict=True)
        moving = [leaf for leaf, copy in pairs if copy.requires_grad]
        outputs_bar = None if f_bar is None else f_bar[span]
        return chunk.finish(outputs_bar, [*self.network_leaves, *moving])

    def _parameters(self) -> list[Tensor]:
        """Everything learnable behind the outputs."""
        modules = [self.plan.model] if self.augment is None else [self.plan.model, self.augment]
        return [p for module in modules for p in module.parameters()]

    @property
    def unchanged(self) -> bool:
        """Whether the parameters are still those of the first pass, as far as it was to be followed
        by another.
        """
        return self._checksum is None or torch.equal(checksum(self._parameters()), self._checksum)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The model in evaluation mode, and random draws that leave the global state alone."""
        check_hooks(self.plan.model)
        with evaluating(self.plan.model), seeded(self.seed, self.plan.device):
            yield

    @property
    def _differentiate(self) -> Differentiate:
        """Whether the output cotangents themselves depend on what is differentiated."""
        moving = self.hyper_in_network or self.rule.seeds_follow_outputs
        return "always" if moving or not self.fast.piecewise_linear else "where needed"

    def _repeated(self, index: int, x: Inputs, y: Tensor) -> Tensor:
        """Whether this batch is that of the first pass, as a tensor: nobody waits for it."""
        if index >= len(self.targets) or self.targets[index].shape != y.shape:
            raise CurvatureError(_OTHER_BATCHES)
        found = fingerprint(x)
        if found.shape != self._fingerprints[index].shape:
            raise CurvatureError(_OTHER_BATCHES)
        return (self.targets[index] == y).all() & (self._fingerprints[index] == found).all()


_OTHER_BATCHES = (
    "the loader gave other batches in the second pass than in the first; gradients need the same "
    "data in the same order: use shuffle=False (any fixed order will do)"
)


_OTHER_COPIES = (
    "the augmentation made other copies in the second pass than in the first; only torch's global "
    "generators are seeded for it: draw random numbers from them (torch.rand without generator=), "
    "not from numpy, random or a generator of its own"
)
_OTHER_OUTPUTS = (
    "the model gave other outputs in the second pass than in the first; only torch's global "
    "generators are seeded for it, and its state must stay as it is until backward: no random "
    "numbers from elsewhere, no buffers that change"
)


@dataclass
class _Same:
    """Whether the second pass saw what the first did; looked at once, when it is over."""

    batches: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def check(self, *, all_batches: bool) -> None:
        """Refuse gradients that mix two functions."""
        if not all_batches or not torch.stack(self.batches).all():
            raise CurvatureError(_OTHER_BATCHES)
        if self.copies and not torch.stack(self.copies).all():
            raise CurvatureError(_OTHER_COPIES)
        if self.outputs and not torch.stack(self.outputs).all():
            raise CurvatureError(_OTHER_OUTPUTS)


def _add(totals: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients, None counting as zero, in place."""
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None:
            total += gradient


def _check_gradients(gradients: list[Tensor]) -> None:
    if not torch.stack([t.isfinite().all() for t in gradients]).all():
        raise CurvatureError(
            "a gradient is NaN or infinite although the evidence is finite: the network has no "
            "second derivative at some input (a norm or a square root of exactly zero?); add a "
            "small constant there"
        )


class _TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: Passes, log_precision: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.save_for_backward(log_precision)
        again = any(ctx.needs_input_grad[2:])
        return tuple(
            passes.first(log_precision.detach(), keep=any(ctx.needs_input_grad), again=again)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, f_bar: Tensor, *bars: Tensor) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        (log_precision,) = ctx.saved_tensors
        by_part = passes.split(list(bars))
        precision_bar = None
        if ctx.needs_input_grad[1]:
            with full_precision(passes.plan.model):
                precision_bar = passes.precision_gradient(by_part, log_precision)
        leaves = ctx.needs_input_grad[2:]
        if not any(leaves):
            return (None, precision_bar, *[None] * len(leaves))
        network, augment = (passes.instead or passes.second)(f_bar, by_part, log_precision.detach())
        return (None, precision_bar, *network, *augment)


def statistics(passes: Passes, log_precision: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs f [N, C] and the statistics of every part, differentiable in all hyperparameters of
    the forward pass.
    """
    precision = log_precision if passes.summary_depends_on_precision else log_precision.detach()
    f, *flat = _TwoPasses.apply(passes, precision, *passes.network_leaves, *passes.augment_leaves)
    return f, passes.split(flat)


def augmented(augment: nn.Module, x: Inputs, seed: int) -> Inputs:
    """The module's copies [n, A, ...] of x [n, ...], with random draws that depend on `seed`
    alone.
    """
    n, device = len(tensors_of(x)[0]), tensors_of(x)[0].device
    with seeded(seed, device):
        copies = augment(copied(x))  # which may write to its input
    for t, original in zip(tensors_of(copies), tensors_of(x), strict=True):
        if t.dim() != original.dim() + 1 or t.shape[0] != n:
            raise CurvatureError(
                "the augmentation must turn inputs [n, ...] into copies [n, A, ...]; from "
                f"{tuple(original.shape)} it made {tuple(t.shape)}; for a single copy return "
                "x.unsqueeze(1)"
            )
    return copies


def _alike(found: Tensor, expected: Tensor) -> Tensor:
    """Whether two computations of the same gave the same, up to rounding; as a tensor that is not
    waited for.
    """
    if found.shape != expected.shape:
        return torch.zeros((), dtype=torch.bool, device=found.device)
    return ((found - expected).abs() <= ALIKE * expected.abs().max()).all()
