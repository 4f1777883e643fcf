"""Two passes over the data: small statistics, then exact gradients of anything made of them.

Pass 1 runs chunk by chunk without keeping a graph and leaves the outputs and small statistics, as
the results of one autograd node. Whatever is computed from those (log-determinant, likelihood) is
ordinary small-space autograd. When a gradient comes back to the node, pass 2 runs the chunks again
with a graph, one at a time, and pulls the cotangents of the statistics through. Exact, and the
memory of one chunk plus what the parts keep. If only the prior or the noise is differentiated, no
gradient reaches the node and pass 2 never runs.

What stays in memory between the chunks: `Collected` keeps the observations of every part, all
that a second pass may need, and little where observations are sums. `Deferred` keeps, of every
chunk, the inputs and output cotangents of the operations instead, and makes the observations at the
end, one piece after the other: the rows of all weights are never in memory together. It serves
where no second pass follows and what it keeps is smaller than the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from asdl_marglik.curvature.term import Kind, Term
from asdl_marglik.errors import CurvatureError
from asdl_marglik.passes.forward import Chunk, Differentiate, Scratch
from asdl_marglik.passes.memory import Arrangement
from asdl_marglik.passes.pullback import PullBack
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
Gradients = tuple[list[Tensor], list[Tensor]]  # in the network's leaves, in the augmentation's
# relative difference of two computations of the same; other random numbers differ by far more
ALIKE = 1e-4


class Residency(ABC):
    """What stays of the chunks of a first pass: takes them in, gives observations of all data."""

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Take in one more chunk."""

    @abstractmethod
    def observations(self, number: int, piece: int) -> list[Tensor]:
        """Those of one piece of a part, of all data.

        Args:
            number: of the part.
            piece: of its observations.
        """


class Collected(Residency):
    """Observations of every part as they come: "rows" side by side in one buffer, "sum" added up.

    Args:
        parts: whose observations.
        n_data: data points in all chunks together.
    """

    def __init__(self, parts: Sequence[Term], n_data: int):
        self._parts = parts
        self._n_data = n_data
        self._count = 0
        self._held: list[list[list[Tensor]]] = [[[] for _ in part.pieces] for part in parts]

    def add(self, chunk: Chunk) -> None:
        span = slice(self._count, self._count + chunk.n)
        self._count += chunk.n
        if self._count > self._n_data:  # reported, with the full count, when all batches are read
            return
        for part, held in zip(self._parts, self._held, strict=True):
            for piece in range(len(part.pieces)):
                self._add_piece(part, piece, chunk, held[piece], span)

    def _add_piece(
        self, part: Term, piece: int, chunk: Chunk, held: list[Tensor], span: slice
    ) -> None:
        if chunk.n == self._n_data:  # a single chunk
            held.extend(part.observe(chunk, piece))
            return
        kinds = part.pieces[piece]
        places = [h[span] for h in held] if held and set(kinds) == {"rows"} else None
        observations = part.observe(chunk, piece, places)
        if not held:
            held.extend(self._empty(o, kind) for o, kind in zip(observations, kinds, strict=True))
        for kind, total, observation in zip(kinds, held, observations, strict=True):
            if kind == "sum":
                total += observation
            elif observation.data_ptr() != total[span].data_ptr():  # it was not written there
                total[span] = observation

    def _empty(self, observation: Tensor, kind: Kind) -> Tensor:
        """Where the observations of all data go, of which this is the first."""
        if kind == "sum":
            return torch.zeros_like(observation)
        return observation.new_empty(self._n_data, *observation.shape[1:])

    def observations(self, number: int, piece: int) -> list[Tensor]:
        return self._held[number][piece]

    def of_part(self, number: int) -> list[list[Tensor]]:
        """All pieces of a part."""
        return self._held[number]


class Deferred(Residency):
    """Chunks without their graphs; an observation is made of them when it is asked for.

    Args:
        parts: terms of the log-determinant.
    """

    def __init__(self, parts: Sequence[Term]):
        self._parts = parts
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        chunk.drop_graph()
        self._chunks.append(chunk)

    def observations(self, number: int, piece: int) -> list[Tensor]:
        part = self._parts[number]
        by_chunk = [part.observe(chunk, piece) for chunk in self._chunks]
        if len(by_chunk) == 1:
            return by_chunk[0]
        by_slot = zip(*by_chunk, strict=True)
        return [
            torch.cat(chunks) if kind == "rows" else torch.stack(chunks).sum(0)
            for kind, chunks in zip(part.pieces[piece], by_slot, strict=True)
        ]


@dataclass
class Seen:
    """What the second pass has to know of the first, by batch where nothing else is said."""

    targets: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # fingerprints
    copies: list[Tensor] = field(default_factory=list)  # fingerprints of augmented inputs
    outputs: Tensor | None = None  # of all data, if a second pass will follow
    checksum: Tensor | None = None  # of all parameters
    chunks: dict[int, Chunk] = field(default_factory=dict)  # with graphs, by their first datum

    @property
    def n_data(self) -> int:
        return sum(len(y) for y in self.targets)


@dataclass(frozen=True)
class Bars:
    """Cotangents of what the first pass gave.

    Args:
        outputs: of f [N, C].
        parts: of the statistics of every part.
        log_precision: at which the statistics were made.
    """

    outputs: Tensor | None
    parts: list[list[Tensor]]
    log_precision: Tensor

    def of(self, parts: Sequence[Term], span: slice) -> Bars:
        """Those of some data points' outputs and rows; sums and kernels belong to all data.

        Args:
            parts: terms of the log-determinant.
            span: the data points among all.
        """
        by_part = [_of_span(part, bars, span) for part, bars in zip(parts, self.parts, strict=True)]
        outputs = None if self.outputs is None else self.outputs[span]
        return Bars(outputs, by_part, self.log_precision)


def _of_span(part: Term, bars: list[Tensor], span: slice) -> list[Tensor]:
    if not part.additive:
        return bars
    kinds = part.pieces[0]
    return [bar[span] if kind == "rows" else bar for bar, kind in zip(bars, kinds, strict=True)]


@dataclass
class Passes:
    """Everything needed to run both passes over the same data with the same random draws.

    Args:
        plan: where the rows of each weight come from.
        parts: terms of the log-determinant.
        root_rows: which rows are wanted.
        batches: gives the same batches in the same order every time.
        augment: turns inputs [n, ...] into copies [n, A, ...].
        n_data: data points in all batches together.
        arrangement: the layout in memory.
        seed: of all random draws.
        network_leaves: hyperparameters inside the network or the likelihood's root.
        hyper_in_network: whether there are any inside the network.
        differentiate_augmentation: whether gradients in the augmentation are wanted.
        fast: the shortcuts that may be taken.
        reuse: keep the first pass: later evaluations only look at prior and likelihood.
        row_data: the datum of each row, where a datum may have several: batches then have inputs
            of distinct data, and a target and a column for each row.
        next_batches: if given, gradients are estimated from the batches (number, x, y) of the
            first pass that it gives, instead of from all of them.
    """

    plan: Plan
    parts: list[Term]
    root_rows: RootRows
    batches: Callable[[], Iterable[Batch]]
    augment: nn.Module | None
    n_data: int
    arrangement: Arrangement
    seed: int
    network_leaves: Sequence[Tensor]
    hyper_in_network: bool
    differentiate_augmentation: bool = True
    fast: FastPaths = ALL
    reuse: bool = False
    row_data: Tensor | None = None
    next_batches: Callable[[], Iterable[tuple[int, Inputs, Tensor]]] | None = None
    seen: Seen = field(default_factory=Seen)
    _collected: Collected | None = None
    _counts: list[int] = field(default_factory=list)  # statistics of each part
    _results: list[Tensor] = field(default_factory=list)
    _scratch: Scratch = field(default_factory=Scratch)

    @property
    def augment_leaves(self) -> list[Tensor]:
        if self.augment is None or not self.differentiate_augmentation:
            return []
        return [p for p in self.augment.parameters() if p.requires_grad]

    @property
    def summary_depends_on_precision(self) -> bool:
        return any(part.depends_on_precision for part in self.parts)

    @property
    def rows_of_data(self) -> tuple[Tensor, Tensor]:
        """Targets and columns of all data seen."""
        return torch.cat(self.seen.targets), torch.cat(self.seen.columns)

    @property
    def batch_lengths(self) -> list[int]:
        """Data points in each batch of the first pass."""
        return [len(y) for y in self.seen.targets]

    @property
    def unchanged(self) -> bool:
        """Whether all parameters are those of the first pass, where a second one was to follow."""
        before = self.seen.checksum
        return before is None or torch.equal(checksum(self._parameters()), before)

    def _parameters(self) -> list[Tensor]:
        """Everything learnable behind the outputs."""
        modules = [self.plan.model] if self.augment is None else [self.plan.model, self.augment]
        return [p for module in modules for p in module.parameters()]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The model in evaluation mode, and random draws that leave the global state alone."""
        check_hooks(self.plan.model)
        with evaluating(self.plan.model), seeded(self.seed, self.plan.device):
            yield

    # ---------------------------------------------------------------------------------- chunks

    def augmented(self, x: Inputs, index: int) -> Inputs:
        """Copies [n, A, ...] of a batch, the same ones in both passes.

        Args:
            x: inputs of the batch [n, ...].
            index: number of the batch.
        """
        if self.augment is None:
            return map_inputs(lambda t: t.unsqueeze(1), x)
        return augmented(self.augment, x, self.seed + index)

    def _copies(self, x: Inputs, index: int) -> Inputs:
        """Copies of the data point of each row of a batch."""
        copies = self.augmented(x, index)
        return copies if self.row_data is None else taken(copies, self.row_data)

    def _all_copies(self) -> Iterator[Inputs]:
        return (self._copies(x, index) for index, (x, _, _) in enumerate(self.batches()))

    def _spans(self, copies: Inputs) -> list[slice]:
        """The data points of each chunk of a batch; chunks are of equal size."""
        n, n_copies = tensors_of(copies)[0].shape[:2]
        number = -(-n // max(1, self.arrangement.chunk_inputs // n_copies))
        step = -(-n // number)
        return [slice(start, min(start + step, n)) for start in range(0, n, step)]

    def _chunk(
        self, copies: Inputs, batch: Batch, span: slice, *, with_graph: bool, observe: bool
    ) -> Chunk:
        """The pass over some data points of a batch.

        Args:
            copies: of the whole batch.
            batch: its inputs, targets and columns.
            span: which data points.
            with_graph: cotangents will be taken back through it.
            observe: the parts will look at it.
        """
        x = map_inputs(lambda t: t.detach(), taken(copies, span))
        if with_graph and self.augment_leaves:
            x = map_inputs(lambda t: t.requires_grad_(t.is_floating_point()), x)
        inputs_only = with_graph and not self.hyper_in_network
        requests = [request for part in self.parts for request in part.requests()]
        pulls = [request for part in self.parts for request in part.pulls(self.plan)]
        _, y, columns = batch
        seed_all(self.seed, self.plan.device)
        with torch.enable_grad():
            return Chunk(
                self.plan,
                x,
                Selection(self.root_rows, y[span], columns[span]),
                differentiate=self._differentiate if with_graph else "never",
                inputs_only=inputs_only and self.fast.image_gradients,
                requests=requests if observe else [],
                pulls=pulls if with_graph else [],
                scratch=self._scratch,
            )

    @property
    def _differentiate(self) -> Differentiate:
        """Whether the output cotangents themselves depend on what is differentiated."""
        moving = self.hyper_in_network or self.root_rows.cotangents_follow_outputs
        return "always" if moving or not self.fast.piecewise_linear else "where needed"

    # ------------------------------------------------------------------------------ first pass

    def first(self, log_precision: Tensor, *, keep: bool, again: bool) -> list[Tensor]:
        """Outputs [N, C], then the statistics of every part.

        Args:
            log_precision: of the prior's groups.
            keep: the observations, for gradients that need them.
            again: a second pass will follow.
        """
        if self._results:
            return self._results_at(log_precision)
        later = self.summary_depends_on_precision or self.next_batches is not None
        keep |= self.reuse and later
        collected = Collected(self.parts, self.n_data)
        deferred = self.arrangement.defer and not keep
        held: Residency = Deferred(self.parts) if deferred else collected
        self.seen = Seen()
        if again or self.reuse:
            self.seen.checksum = checksum(self._parameters())
        with self._running():
            f = self._outputs_of_all(held, again=again)
            results = [f, *self._summarise(held, log_precision)]
        if keep:
            self._collected = collected
        if self.reuse:
            self._results = results
        return results

    def _results_at(self, log_precision: Tensor) -> list[Tensor]:
        """Those of an earlier first pass, for the log precision of now."""
        if not self.summary_depends_on_precision:
            return self._results
        assert self._collected is not None
        return [self._results[0], *self._summarise(self._collected, log_precision)]

    def _outputs_of_all(self, held: Residency, *, again: bool) -> Tensor:
        """The pass itself: outputs f [N, C]; `held` takes in the chunks."""
        outputs: list[Tensor] = []
        inputs_finite: list[Tensor] = []
        for index, batch in enumerate(self.batches()):
            x, y, columns = batch
            inputs_finite.append(finite(x))
            self.seen.inputs.append(fingerprint(x))
            self.seen.targets.append(y)
            self.seen.columns.append(columns)
            outputs.extend(self._outputs_of_batch(index, batch, held, again=again))
        self._check_count()
        f = torch.cat(outputs)
        # looked at once: asking for every chunk would keep a GPU waiting
        check_finite(inputs_finite, f, self.plan.model, self._all_copies)
        self.seen.outputs = f if again else None
        return f

    def _outputs_of_batch(
        self, index: int, batch: Batch, held: Residency, *, again: bool
    ) -> list[Tensor]:
        with torch.no_grad():
            copies = self._copies(batch[0], index)
        if again and self.augment is not None:
            self.seen.copies.append(fingerprint(copies))
        spans = self._spans(copies)
        one_batch = len(batch[1]) == self.n_data  # not a stream of batches
        n_kept = self.arrangement.kept_chunks if again and one_batch else 0
        kept = {span.start for span in spans[max(0, len(spans) - n_kept) :]}
        outputs = []
        for span in spans:
            graph = span.start in kept
            chunk = self._chunk(copies, batch, span, with_graph=graph, observe=True)
            outputs.append(chunk.f.detach())
            held.add(chunk)
            if graph:
                self.seen.chunks[span.start] = chunk
            del chunk  # before the next is there
        return outputs

    def _check_count(self) -> None:
        count = self.seen.n_data
        if count != self.n_data:
            raise CurvatureError(
                f"the loader gave {count} data points in all, but n_data={self.n_data}; the two "
                "must agree"
            )

    def _summarise(self, held: Residency, log_precision: Tensor) -> list[Tensor]:
        """The statistics of all parts, one after the other."""
        by_part = [
            self._statistics(number, held, log_precision) for number in range(len(self.parts))
        ]
        self._counts = [len(statistics) for statistics in by_part]
        return [statistic for statistics in by_part for statistic in statistics]

    def _statistics(self, number: int, held: Residency, log_precision: Tensor) -> list[Tensor]:
        """Those of one part, from one piece after the other."""
        part = self.parts[number]
        statistics: list[Tensor] = []
        for piece in range(len(part.pieces)):
            # no name for the observations: they may go before the next are made
            statistics = part.summarise(
                statistics, piece, held.observations(number, piece), log_precision
            )
        return statistics

    def split(self, flat: list[Tensor]) -> list[list[Tensor]]:
        """A flat list of statistics, or of their cotangents, part by part."""
        by_part = []
        start = 0
        for count in self._counts:
            by_part.append(flat[start : start + count])
            start += count
        return by_part

    # ----------------------------------------------------------------------------- second pass

    def precision_gradient(self, bars: Bars) -> Tensor:
        """Gradient in the log precision of the statistics that depend on it."""
        total = torch.zeros_like(bars.log_precision)
        for number, part in enumerate(self.parts):
            if part.depends_on_precision:
                assert self._collected is not None
                total += part.precision_gradient(
                    self._collected.of_part(number), bars.parts[number], bars.log_precision
                )
        return total

    def gradients(self, bars: Bars) -> Gradients:
        """Gradients in the network leaves and in the augmentation's parameters."""
        return self.second(bars) if self.next_batches is None else self._estimated(bars)

    def _estimated(self, bars: Bars) -> Gradients:
        """Those of some batches, times N/S: statistics are sums over data, so this is unbiased.

        Of all batches, each once, they are those of all data.
        """
        assert self.next_batches is not None
        network = [torch.zeros_like(leaf) for leaf in self.network_leaves]
        augment = [torch.zeros_like(leaf) for leaf in self.augment_leaves]
        lengths = self.batch_lengths
        count = 0
        for number, x, y in self.next_batches():
            start = sum(lengths[:number])
            span = slice(start, start + lengths[number])
            in_network, in_augment = self._only(number, x, y).second(bars.of(self.parts, span))
            _add(network, in_network)
            _add(augment, in_augment)
            count += lengths[number]
        scale = sum(lengths) / count
        return [scale * gradient for gradient in network], [scale * g for g in augment]

    def _only(self, number: int, x: Inputs, y: Tensor) -> Passes:
        """The second pass over one batch of the first, at the hyperparameters of now."""
        columns = self.seen.columns[number]
        return replace(
            self,
            batches=lambda: [(x, y, columns)],
            n_data=len(y),
            seed=self.seed + number,
            next_batches=None,
            seen=Seen(targets=[y], columns=[columns], inputs=[self.seen.inputs[number]]),
        )

    def second(self, bars: Bars) -> Gradients:
        """The pass itself, over all batches."""
        if not self.unchanged:
            raise CurvatureError(
                "parameters were changed between the evidence and its backward pass, which would "
                "mix old and new values; call backward before any optimiser step"
            )
        try:
            return self._second(bars)
        except RuntimeError as error:
            if "derivative" not in str(error) or "not implemented" not in str(error):
                raise
            raise CurvatureError(
                f"the network uses an operation that torch cannot differentiate twice ({error}); "
                "gradients in an augmentation or in hyperparameters inside the network need "
                "that: write it with other operations, or learn prior, noise and temperature only"
            ) from error

    def _second(self, bars: Bars) -> Gradients:
        network = [torch.zeros_like(leaf) for leaf in self.network_leaves]
        augment = [torch.zeros_like(leaf) for leaf in self.augment_leaves]
        repeated = _Repeated()
        start = 0
        with self._running(), torch.enable_grad():
            for index, batch in enumerate(self.batches()):
                repeated.batches.append(self._same_batch(index, batch))
                in_network, in_augment = self._back(index, batch, start, bars, repeated)
                _add(network, in_network)
                _add(augment, in_augment)
                start += len(batch[1])
        self._scratch = Scratch()  # let its memory go
        repeated.check(all_batches=start == self.seen.n_data)
        _check_gradients([*network, *augment])
        return network, augment

    def _back(
        self, index: int, batch: Batch, start: int, bars: Bars, repeated: _Repeated
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Gradients of one batch, whose first datum is number `start` of all."""
        copies = self._copies(batch[0], index)
        if self.seen.copies:
            repeated.copies.append(_alike(fingerprint(copies), self.seen.copies[index]))
        moving = [t for t in tensors_of(copies) if t.requires_grad]
        copies_bar = [torch.zeros_like(t) for t in moving]
        network = [torch.zeros_like(leaf) for leaf in self.network_leaves]
        # chunks kept from the first pass come first, and go
        for span in reversed(self._spans(copies)):
            chunk = self.seen.chunks.pop(span.start, None) if index == 0 else None
            if chunk is None:
                chunk = self._chunk(copies, batch, span, with_graph=True, observe=False)
            place = slice(start + span.start, start + span.stop)
            if self.seen.outputs is not None:
                repeated.outputs.append(_alike(chunk.f.detach(), self.seen.outputs[place]))
            in_network, in_inputs = self._pulled(chunk, copies, bars, place)
            _add(network, in_network)
            for total, gradient in zip(copies_bar, in_inputs, strict=True):
                total[span] = gradient
            del chunk, in_network, in_inputs
        if not moving:
            return network, [None for _ in self.augment_leaves]
        leaves = self.augment_leaves
        return network, torch.autograd.grad(moving, leaves, copies_bar, allow_unused=True)

    def _pulled(
        self, chunk: Chunk, copies: Inputs, bars: Bars, span: slice
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of a chunk in the network leaves, and in those of its inputs that move."""
        assert self._collected is not None
        back = PullBack(chunk)
        for number, part in enumerate(self.parts):
            observations = self._collected.of_part(number)
            part.pull(back, observations, bars.parts[number], span, bars.log_precision)
            for name in part.names:
                back.finished(name)
        if bars.outputs is not None:
            back.outputs(bars.outputs[span])
        pairs = zip(tensors_of(chunk.x), tensors_of(copies), strict=True)
        moving = [leaf for leaf, copy in pairs if copy.requires_grad]
        leaves = [*self.network_leaves, *moving]
        gradients = back.gradients(leaves, shared=bool(self.network_leaves))
        n_network = len(self.network_leaves)
        return gradients[:n_network], gradients[n_network:]

    def _same_batch(self, index: int, batch: Batch) -> Tensor:
        """Whether this batch is that of the first pass, as a tensor: no device has to wait."""
        x, y, _ = batch
        if index >= len(self.seen.targets) or self.seen.targets[index].shape != y.shape:
            raise CurvatureError(_OTHER_BATCHES)
        before, now = self.seen.inputs[index], fingerprint(x)
        if now.shape != before.shape:
            raise CurvatureError(_OTHER_BATCHES)
        return (self.seen.targets[index] == y).all() & (before == now).all()


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
class _Repeated:
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


def _alike(now: Tensor, before: Tensor) -> Tensor:
    """Whether two computations of the same agree up to rounding; as a tensor, not waited for."""
    if now.shape != before.shape:
        return torch.zeros((), dtype=torch.bool, device=now.device)
    return ((now - before).abs() <= ALIKE * before.abs().max()).all()


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
        keep = any(ctx.needs_input_grad)
        return tuple(passes.first(log_precision.detach(), keep=keep, again=again))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, f_bar: Tensor, *statistics_bars: Tensor) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        (log_precision,) = ctx.saved_tensors
        bars = Bars(f_bar, passes.split(list(statistics_bars)), log_precision.detach())
        precision_bar = None
        if ctx.needs_input_grad[1]:
            with full_precision(passes.plan.model):
                precision_bar = passes.precision_gradient(bars)
        leaves = ctx.needs_input_grad[2:]
        if not any(leaves):
            return (None, precision_bar, *[None] * len(leaves))
        network, augment = passes.gradients(bars)
        return (None, precision_bar, *network, *augment)


def statistics(passes: Passes, log_precision: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs f [N, C] and the statistics of every part, differentiable in all hyperparameters.

    Args:
        passes: both passes over the data.
        log_precision: of the prior's groups [G].
    """
    precision = log_precision if passes.summary_depends_on_precision else log_precision.detach()
    leaves = [*passes.network_leaves, *passes.augment_leaves]
    if not torch.is_grad_enabled():  # a function is told that they need gradients all the same
        precision, leaves = precision.detach(), [leaf.detach() for leaf in leaves]
    f, *flat = _TwoPasses.apply(passes, precision, *leaves)
    return f, passes.split(flat)


def augmented(augment: nn.Module, x: Inputs, seed: int) -> Inputs:
    """The module's copies [n, A, ...] of inputs [n, ...], with draws that depend on a seed.

    Args:
        augment: the module.
        x: inputs [n, ...].
        seed: of its random draws.
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
