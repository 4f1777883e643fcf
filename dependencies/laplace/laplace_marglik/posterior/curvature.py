"""The curvature of all data at the network's weights, from which posteriors are made.

One pass over the data leaves small statistics; prior, noise and temperature enter afterwards, so
that a posterior for other values of them costs no pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asdl_marglik import (
    ALL,
    ONE_AT_A_TIME,
    STRUCTURES,
    Batch,
    Budget,
    Granularity,
    Groups,
    Network,
    Passes,
    Plan,
    PlanChanged,
    PrecisionLost,
    Problem,
    RootRows,
    Settled,
    Term,
    augmented,
    check_weights,
    constant_besides,
    copied,
    evaluating,
    full_precision,
    make_plan,
    map_inputs,
    matches,
    parts_of,
    pivot_order,
    seeded,
    taken,
    tensors_of,
)
from asdl_marglik.curvature.dense import Dense, Diagonal
from asdl_marglik.curvature.kernel.gram import Gram
from asdl_marglik.curvature.kron import EXACT_SIDE, Kron
from asdl_marglik.curvature.term import inverse_precision
from asdl_marglik.linalg import gram_in_double
from asdl_marglik.watch.model import check_inputs
from asdl_marglik.watch.record import Recorder, Use
from laplace_marglik import checks
from laplace_marglik.batches import pairs
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.gradient_rows import DRAWS, GradientRows, curvature_scale
from laplace_marglik.evidence.rows import Mixed, NoRows, cotangents_per_datum, rows_for
from laplace_marglik.likelihood import Likelihood
from laplace_marglik.likelihood.base import GradientRoot, Root
from laplace_marglik.posterior.covariance import Covariance, Shapes
from laplace_marglik.posterior.dense import DenseCovariance
from laplace_marglik.posterior.elementwise import Elementwise
from laplace_marglik.posterior.kernel import KernelCovariance, RowSpace
from laplace_marglik.posterior.kron import KronCovariance, side_of

Loader = Iterable[tuple[Any, Tensor]]
# rows that inducing ones are chosen from, for each of them: more cost as many passes, fewer choose
# worse; of four the greedy choice takes the ones that say most
CANDIDATES = 4


@dataclass(frozen=True)
class Setting:
    """What a posterior is of.

    Args:
        model: the network.
        weights: its weights that are random, by name.
        likelihood: of the data.
        groups: the prior's group of each weight.
        structure: of the curvature, by name.
        n_data: size N of the training set; None for as many as the loader gives.
        augment: x [n, ...] -> [n, A, ...]; outputs are averaged over the copies.
        inducing: root rows that are kept of the `ntk` structure; None for all.
        kfac: weight-sharing setting of KFAC.
        blocks: of the block-diagonal structure.
        budget: of memory.
        seed: of augmentations and of the choice of inducing rows.
        labels: name of the targets where batches are mappings.
        root: "empirical" or "sampled" for these curvatures; any other root for the GGN.
        samples: draws of each datum for the sampled one.
    """

    model: nn.Module
    weights: dict[str, nn.Parameter]
    likelihood: Likelihood
    groups: Groups
    structure: str
    n_data: int | None
    augment: nn.Module | None = None
    inducing: int | None = None
    kfac: Literal["expand", "reduce"] = "expand"
    blocks: Granularity = "module"
    budget: Budget = field(default_factory=lambda: Budget(None, None, torch.device("cpu")))
    seed: int = 0
    labels: str | None = None
    root: Root | GradientRoot | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        if self.structure not in STRUCTURES:
            raise MarglikError(
                f"structure must be one of {', '.join(STRUCTURES)}, got {self.structure!r}"
            )
        if self.inducing is None:
            return
        checks.positive_integer("inducing", self.inducing)
        if self.structure != "ntk":
            raise MarglikError(
                f"inducing rows are for structure='ntk', got structure={self.structure!r}"
            )

    @property
    def curvature_scale(self) -> Tensor:
        """What products of rows are multiplied with, from the likelihood's scales of now."""
        return curvature_scale(self.likelihood, self.root)

    @property
    def shapes(self) -> Shapes:
        """Of the weights by name."""
        return {name: w.shape for name, w in self.weights.items()}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self.weights.values())).device

    def placed(self, x: Any) -> Any:
        """Inputs where the model is."""
        return map_inputs(lambda t: checks.ordinary(t).to(self.device), x)

    def planned(self, x: Any) -> Plan:
        """Where the rows of each weight come from, for inputs such as x."""
        with evaluating(self.model), seeded(0, self.device):
            return make_plan(self.model, self.weights, map_inputs(lambda t: t.detach(), x))

    def uses_of_weights(self, x: Any) -> list[Use]:
        """Operations with weights among their arguments, in the order in which the model runs."""
        first = map_inputs(lambda t: t[:2].detach(), self.placed(x))
        watch = Recorder(self.weights)
        with evaluating(self.model), seeded(0, self.device), torch.enable_grad(), watch as recorder:
            Network.of(self.model)(copied(first))
        return recorder.uses

    def copies(self, x: Any) -> int:
        """Augmented copies A of each datum."""
        if self.augment is None:
            return 1
        with torch.no_grad():
            first = map_inputs(lambda t: t[:1], x)
            return tensors_of(augmented(self.augment, first, 0))[0].shape[1]


def random_weights(
    weights: dict[str, nn.Parameter], patterns: Iterable[str] | None
) -> dict[str, nn.Parameter]:
    """Those of the weights that fit some pattern; every pattern must fit one.

    Args:
        weights: by name.
        patterns: such as `head.*`; None for all.
    """
    if patterns is None:
        return weights
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in weights):
            raise MarglikError(
                f"the pattern {pattern!r} of weights= fits no weight; weights are {list(weights)}"
            )
    if not patterns:
        raise MarglikError("weights=[] leaves no weights; use None for all")
    return {name: w for name, w in weights.items() if matches(name, patterns)}


@dataclass
class Curvature:
    """Statistics of all data.

    Args:
        setting: what they are of.
        plan: where the rows of each weight came from.
        parts: terms of the log-determinant.
        statistics: of each part.
        f: outputs [N, ...] in float64.
        y: targets.
        x: the first input, for its shape and dtype.
        double: whether sums were made in float64.
    """

    setting: Setting
    plan: Plan
    parts: list[Term]
    statistics: list[list[Tensor]]
    f: Tensor
    y: Tensor
    x: Any
    double: bool = False
    _settled: list[Settled] | None = None

    def log_det_ratio(self, scale: Tensor, log_precision: Tensor) -> Tensor:
        """log|I + P0^-1 H| in float64, differentiable in both.

        Args:
            scale: of the curvature.
            log_precision: of the prior's groups, in float64.
        """
        if self._settled is None:
            pairs = zip(self.parts, self.statistics, strict=True)
            with torch.no_grad():
                self._settled = [part.settled(own, None) for part, own in pairs]
        return torch.stack([s(scale, log_precision) for s in self._settled]).sum()

    def regrouped(self, groups: Groups) -> Curvature:
        """The same statistics under a prior with other groups."""
        parts = [copy.copy(part) for part in self.parts]
        for part in parts:
            if isinstance(part, Kron):
                part.group = groups[part.names[0]]
            else:
                part.groups = groups  # type: ignore[attr-defined]
        return replace(
            self, setting=replace(self.setting, groups=groups), parts=parts, _settled=None
        )

    def state(self) -> dict[str, Any]:
        """What it is made of besides the setting, as plain tensors."""
        return {
            "n_data": self.setting.n_data,
            "statistics": self.statistics,
            "f": self.f,
            "y": self.y,
            "x": self.x,
            "double": self.double,
        }

    @staticmethod
    def from_state(setting: Setting, state: Mapping[str, Any]) -> Curvature:
        """The curvature that a state is of.

        Args:
            setting: what it is of: the same as when the state was made.
            state: from `state`.
        """
        setting = replace(setting, n_data=state["n_data"])
        x = setting.placed(state["x"])
        plan = setting.planned(x)
        rows = RowsOfRoot.of(setting, plan.output_shape)
        problem = _problem(setting, plan, rows, state["n_data"], x, double=state["double"])
        parts = _terms(setting.structure, problem)
        if setting.inducing is not None:
            parts = [RowSpace(problem.sizes, setting.groups, keep=True)]
        statistics = [[t.to(setting.device) for t in own] for own in state["statistics"]]
        f, y = state["f"].to(setting.device), state["y"].to(setting.device)
        return Curvature(setting, plan, parts, statistics, f, y, x, double=state["double"])

    @torch.no_grad()
    def covariances(self, scale: Tensor, log_precision: Tensor) -> list[Covariance]:
        """The posterior's covariance, block by block.

        Args:
            scale: of the curvature.
            log_precision: of the prior's groups, in float64.
        """
        pairs = zip(self.parts, self.statistics, strict=True)
        return [self._covariance(part, own, scale, log_precision) for part, own in pairs]

    def _covariance(
        self, part: Term, own: list[Tensor], scale: Tensor, log_precision: Tensor
    ) -> Covariance:
        shapes = {name: self.setting.shapes[name] for name in part.names}
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        groups = self.setting.groups
        if isinstance(part, Kron):
            return kron_covariance(part, own, shapes, scale, log_precision)
        inverse = inverse_precision(log_precision, groups, sizes)
        if isinstance(part, RowSpace):
            rows = scale.sqrt().to(own[0].dtype) * own[0].flatten(0, 1)
            return KernelCovariance.of_rows(shapes, rows, inverse.sqrt())
        if isinstance(part, Dense):
            H = scale * part.summed(own, None)
            return DenseCovariance.of_curvature(shapes, H, inverse.sqrt())
        assert isinstance(part, Diagonal)
        h = scale * part.summed(own, None)
        (shape,) = shapes.values()
        return Elementwise(shapes, (inverse / (1 + h * inverse)).reshape(shape))


def kron_covariance(
    part: Kron,
    statistics: list[Tensor],
    shapes: Shapes,
    scale: Tensor,
    log_precision: Tensor,
) -> Covariance:
    """That of one weight; with a precision for each element of a small weight, in weight space.

    Args:
        part: of the weight.
        statistics: its factors.
        shapes: of the weight, by its name.
        scale: of the curvature.
        log_precision: of the prior's groups, in float64.
    """
    A, B = part.factors(statistics, None)
    d, o = A.shape[-1], B.shape[-1]
    groups = B.shape[1] if part.kinds[1] == "rows" else len(B)
    log_inputs = log_precision.new_zeros(groups, d)
    if isinstance(part.group, int):
        log_outputs = log_precision[part.group].expand(groups, o)
    elif d * o <= EXACT_SIDE:
        return _small(part.product(A, B), part, shapes, scale, log_precision)
    else:
        log_outputs, log_inputs = part.effects(log_precision, o, d)
    roots = torch.exp(-log_inputs / 2), torch.exp(-log_outputs / 2)
    of_groups = 1 if part.bias and groups > 1 else groups
    inputs = side_of(A, roots[0][:of_groups], by_rows=part.kinds[0] == "rows")
    outputs = side_of(B, roots[1], by_rows=part.kinds[1] == "rows")
    outputs = outputs._replace(values=scale * outputs.values)
    expanded = [t.expand(groups, *t.shape[1:]) for t in inputs]
    return KronCovariance(shapes, tuple(expanded), tuple(outputs), part.transposed, part.bias)


def _small(
    product: Tensor, part: Kron, shapes: Shapes, scale: Tensor, log_precision: Tensor
) -> DenseCovariance:
    """B (x) A [groups, O, D, O, D] and a precision for each element, as one matrix."""
    if part.transposed:
        product = product.permute(0, 2, 1, 4, 3)
    o, d = product.shape[1:3]
    blocks = [block.reshape(o * d, o * d) for block in product]
    root = torch.exp(-log_precision[part.group] / 2)
    return DenseCovariance.of_curvature(shapes, scale * torch.block_diag(*blocks), root)


# ------------------------------------------------------------------------------------------- fit


def curvature_of(
    setting: Setting,
    loader: Loader,
    scale: Tensor,
    log_precision: Tensor,
    *,
    double: bool = False,
) -> Curvature:
    """The curvature of all data of a loader, which is read once.

    It is read a second time if sums in single precision turn out to be too coarse for the prior.

    Args:
        setting: what the curvature is of.
        loader: gives batches (x, y), in any order.
        scale: of the curvature now.
        log_precision: of the prior's groups now, in float64.
        double: make sums in float64 from the start.
    """
    checks.outside_inference_mode()
    check_weights(setting.model)
    now = (scale.detach(), log_precision.detach())
    try:
        with ONE_AT_A_TIME, full_precision(setting.model):
            curvature = _fitted(setting, loader, now, double=double)
            curvature.log_det_ratio(*now)
            return curvature
    except PrecisionLost:
        if iter(loader) is loader:
            raise MarglikError(
                "the data must be read again, with sums in double precision, and this loader can "
                "be read only once; pass a DataLoader or a list of (x, y) batches"
            ) from None
        return curvature_of(setting, loader, scale, log_precision, double=True)
    except PlanChanged:
        raise MarglikError(
            "the model uses its weights differently from one data point to the next "
            "(data-dependent control flow), and a posterior needs one way for all; fit it on data "
            "of one kind"
        ) from None


def _fitted(
    setting: Setting, loader: Loader, now: tuple[Tensor, Tensor], *, double: bool
) -> Curvature:
    stream = pairs(loader, setting.labels)
    first = next(stream, None)
    if first is None:
        raise MarglikError("the loader is empty; it must yield (x, y) batches of all data")
    x = setting.placed(first[0])
    plan = setting.planned(x)
    batches = chain([first], stream)
    n_data = setting.n_data
    if n_data is None:  # it has to be known before the pass
        everything = list(batches)
        n_data = sum(len(y) for _, y in everything)
        batches = chain(everything)
    setting = replace(setting, n_data=n_data)
    example = map_inputs(lambda t: t[:1], x)
    if setting.inducing is not None:
        return _induced(setting, plan, example, batches, now)
    rows = RowsOfRoot.of(setting, plan.output_shape)
    problem = _problem(setting, plan, rows, n_data, example, double=double)
    passes = _passes(setting, plan, rows, problem, _terms(setting.structure, problem), batches)
    f, statistics = _first(passes)
    f = f.double().reshape(-1, *plan.output_shape)
    y = passes.rows_of_data[0]
    return Curvature(setting, plan, passes.parts, statistics, f, y, example, double)


@dataclass
class RowsOfRoot(Mixed):
    """All rows of a root of the likelihood's curvature: nothing that moves it is differentiated."""

    @staticmethod
    def of(setting: Setting, shape: torch.Size) -> RowsOfRoot:
        """All rows of a setting for outputs of a shape."""
        root = setting.root or "eigen"
        rows = rows_for(setting.likelihood, shape, root, shape.numel(), samples=setting.samples)
        return RowsOfRoot(rows)

    def count(self, shape: torch.Size) -> int:
        """Rows of each datum."""
        if isinstance(self.rows, GradientRows):
            return self.rows.samples or 1
        return cotangents_per_datum(self.rows, shape.numel())

    def columns(self, n: int, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The columns of the next so many data points: all, or the draws of their targets."""
        if isinstance(self.rows, GradientRows):
            return self.rows.drawn(n, generator)
        return torch.arange(shape.numel()).expand(n, -1)


def _first(passes: Passes) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs [N, C] and the statistics of each part."""
    none = torch.zeros(1, dtype=torch.float64)
    with constant_besides(passes.plan.weights.values(), passes.plan.model):
        f, *flat = passes.first(none, keep=False, again=False)
    return f, passes.split(flat)


def _problem(
    setting: Setting, plan: Plan, rows: RowsOfRoot, n: int, x: Any, *, double: bool = False
) -> Problem:
    return Problem(
        plan,
        setting.groups,
        n_data=n,
        rows_per_datum=rows.count(plan.output_shape),
        copies=setting.copies(x),
        setting=setting.kfac,
        granularity=setting.blocks,
        double=double,
        mixed=True,
    )


def _terms(structure: str, problem: Problem) -> list[Term]:
    """The structure's terms, each with statistics that a covariance can be made of."""
    terms = [_with_rows(term, problem) for term in parts_of(structure, problem)]
    for term in terms:
        if not isinstance(term, (Kron, Dense, Diagonal)):
            raise MarglikError(
                f"structure {structure!r} has no posterior: of {type(term).__name__} terms no "
                "covariance is known; use full, blockdiag, kfac, diag or ntk"
            )
    return terms


def _with_rows(term: Term, problem: Problem) -> Term:
    """A kernel forgets its rows, which predictions need: keep them, or go to weight space."""
    if not isinstance(term, Gram):
        return term
    sizes = {name: problem.sizes[name] for name in term.names}
    if problem.n_rows < sum(sizes.values()):
        return RowSpace(sizes, problem.groups, keep=True)
    return Dense(sizes, problem.groups, double=True)


def _passes(
    setting: Setting,
    plan: Plan,
    rows: RootRows,
    problem: Problem,
    parts: list[Term],
    batches: Iterable[tuple[Any, Tensor]],
) -> Passes:
    """A single pass over batches, which are read once."""
    arrangement = setting.budget.arrange(problem, parts, again=False)
    allowed = setting.budget.allowed
    if parts and arrangement.bytes > allowed:
        raise MarglikError(
            f"the {setting.structure} posterior of {problem.n_data} data points with "
            f"{problem.rows_per_datum} rows each and {sum(problem.sizes.values())} weights needs "
            f"about {arrangement.bytes / 1e9:.2g} GB, and {allowed / 1e9:.2g} GB may be used "
            "(memory_budget); use structure='kfac' or 'diag', fewer weights=[...], or "
            "structure='ntk' with inducing=..."
        )
    once = _checked(setting, batches, problem.n_data, plan.output_shape)
    return Passes(
        plan,
        parts,
        rows,
        lambda: once,
        setting.augment,
        n_data=problem.n_data,
        arrangement=arrangement,
        seed=setting.seed,
        network_leaves=[],
        hyper_in_network=False,
        differentiate_augmentation=False,
        fast=ALL,
    )


def _checked(
    setting: Setting, batches: Iterable[tuple[Any, Tensor]], n_data: int, shape: torch.Size
) -> Iterator[Batch]:
    """Batches where the model is, with the columns of all rows; n_data in all."""
    rows = RowsOfRoot.of(setting, shape)
    generator = torch.Generator().manual_seed(setting.seed + DRAWS)
    count = 0
    for x, y in batches:
        y = checks.targets(y).to(setting.device)
        x = setting.placed(x)
        if any(len(t) != len(y) for t in tensors_of(x)):
            raise MarglikError("expected as many inputs as targets in every batch of the loader")
        check_inputs(x, count)  # now: the loader may not give them again
        count += len(y)
        yield x, y, rows.columns(len(y), shape, generator).to(y.device)
    if count != n_data:
        raise MarglikError(
            f"the loader gave {count} data points in all, but n_data={n_data}; the two must agree"
        )


# --------------------------------------------------------------------------------- inducing rows


def _induced(
    setting: Setting,
    plan: Plan,
    example: Any,
    batches: Iterator[tuple[Any, Tensor]],
    now: tuple[Tensor, Tensor],
) -> Curvature:
    """The curvature of some root rows: chosen greedily among those of data drawn at random."""
    assert setting.n_data is not None and setting.inducing is not None
    rows = RowsOfRoot.of(setting, plan.output_shape)
    per_datum = rows.count(plan.output_shape)
    count = min(setting.n_data, -(-CANDIDATES * setting.inducing // per_datum))
    generator = torch.Generator().manual_seed(setting.seed)
    chosen = torch.randperm(setting.n_data, generator=generator)[:count]
    held: list[tuple[Any, Tensor]] = []
    everything = _taking(batches, chosen, held)
    outputs = _passes(
        setting,
        plan,
        NoRows(),
        _problem(setting, plan, rows, setting.n_data, example),
        [],
        everything,
    )
    f, _ = _first(outputs)
    problem = _problem(setting, plan, rows, count, example)
    sizes = problem.sizes
    part = RowSpace(sizes, setting.groups, keep=True)
    passes = _passes(setting, plan, rows, problem, [part], held)
    _, ((kept,),) = _first(passes)
    V = kept.flatten(0, 1)
    identity_plus = now[0] * gram_in_double(V, inverse_precision(now[1], setting.groups, sizes))
    identity_plus.diagonal().add_(1)
    best = pivot_order(identity_plus, min(setting.inducing, len(V)))
    f = f.double().reshape(-1, *plan.output_shape)
    y = outputs.rows_of_data[0]
    return Curvature(setting, plan, [part], [[V[best].unsqueeze(1)]], f, y, example)


def _taking(
    batches: Iterator[tuple[Any, Tensor]], chosen: Tensor, held: list[tuple[Any, Tensor]]
) -> Iterator[tuple[Any, Tensor]]:
    """The batches, of which the data points with the chosen numbers are also put into `held`."""
    start = 0
    for x, y in batches:
        own = chosen[(chosen >= start) & (chosen < start + len(y))] - start
        if len(own):
            held.append((taken(x, own.to(tensors_of(x)[0].device)), checks.targets(y)[own]))
        start += len(y)
        yield x, y
