"""Curvature of any torch module, one function each: Jacobian, neural tangent kernel, GGN, KFAC.

All run the model in evaluation mode and leave it as it was. Where gradients are enabled the results
have a graph: they can be differentiated in whatever the outputs depend on (inputs, an augmentation
in front of them, parameters), by an ordinary backward pass. Under `torch.no_grad()` no graph is
kept, and memory is that of one chunk of data besides the result.

A likelihood is anything with the methods of `HasRoot`, or a function log_prob(f, y) -> [n].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from asdl_marglik.curvature.blocks import Granularity, blocks_of
from asdl_marglik.curvature.problem import Setting
from asdl_marglik.errors import CurvatureError
from asdl_marglik.linalg import psd_sqrt
from asdl_marglik.passes.forward import Chunk
from asdl_marglik.passes.graph import GraphChunk
from asdl_marglik.passes.memory import CHUNK_BYTES, LARGEST_CHUNK
from asdl_marglik.passes.root_rows import Selection
from asdl_marglik.watch.model import (
    Inputs,
    evaluating,
    map_inputs,
    matches,
    seeded,
    taken,
    tensors_of,
    trainable,
)
from asdl_marglik.watch.persample import gradients
from asdl_marglik.watch.plan import Plan, PlanChanged
from asdl_marglik.watch.planner import make_plan

Outputs = Literal["sum", "all"] | int


@runtime_checkable
class HasRoot(Protocol):
    """What the curvature needs of a likelihood: Lambda = curvature_scale() * U U^T."""

    def root(self, f: Tensor, y: Tensor, kind: Literal["fisher"], columns: Tensor) -> Tensor:
        """Columns [n, C, K] of a root U of the curvature in the outputs.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
            kind: which root, for likelihoods that have several.
            columns: numbers of the columns of each datum [n, K].
        """

    def curvature_scale(self) -> Tensor:
        """The factor of U U^T."""


LogProb = Callable[[Tensor, Tensor], Tensor]


# -------------------------------------------------------------------------- Jacobian and its kernel


def jacobian_rows(
    model: nn.Module,
    x: Inputs,
    cotangents: Tensor | None = None,
    *,
    weights: Iterable[str] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Rows u_k^T J of the network's Jacobian [n, K, P], J[i, c] = d f_c(x_i) / d w.

    Examples:
        >>> model = nn.Linear(3, 2).double()
        >>> x = torch.eye(3).double()
        >>> jacobian_rows(model, x).shape  # 3 inputs, 2 outputs, 8 weights
        torch.Size([3, 2, 8])
        >>> jacobian_rows(model, x, torch.ones(1, 2).double(), weights=["bias"])[0]
        tensor([[1., 1.]], dtype=torch.float64)

    Args:
        model: network that maps inputs [n, ...] to outputs [n, ...], C numbers for each input.
        x: inputs [n, ...], a tensor or a mapping of tensors.
        cotangents: u of the outputs, [K, C] for all inputs or [n, K, C]; None for single outputs.
        weights: name patterns of the weights, P numbers in the model's order; None for all that
            require grad.
        chunk: inputs per forward pass; by default as many as keep the rows small.
    """
    network = _Network(model, x, weights, chunk)
    with network.running():
        chunks = list(network.rows(x, _cotangents(cotangents, network, x)))
    return torch.cat([torch.cat([*chunk_rows.values()], 2) for chunk_rows in chunks])


def ntk(
    model: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    outputs: Outputs = "sum",
    *,
    weights: Iterable[str] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The empirical neural tangent kernel J(x1) J(x2)^T.

        "all"   Theta[i, j, c, d] = <df_c(x1_i)/dw, df_d(x2_j)/dw>     [n1, n2, C, C]
        "sum"   sum_c Theta[i, j, c, c]                                [n1, n2]
        index   Theta[i, j, index, index]                              [n1, n2]

    Examples:
        >>> model = nn.Linear(3, 2).double()
        >>> x = torch.eye(3).double()
        >>> ntk(model, x).detach()  # for each of 2 outputs <x, x'> + 1
        tensor([[4., 2., 2.],
                [2., 4., 2.],
                [2., 2., 4.]], dtype=torch.float64)

    Args:
        model: network that maps inputs [n, ...] to outputs [n, ...].
        x1: inputs [n1, ...].
        x2: inputs [n2, ...]; None for x1.
        outputs: what is kept of the C x C entries of each pair of inputs.
        weights: name patterns of the weights; None for all that require grad.
        chunk: inputs per forward pass; by default as many as keep the rows small.
    """
    network = _Network(model, x1, weights, chunk)
    u = _single_outputs(outputs, network.n_outputs, network.like)
    other = x1 if x2 is None else x2
    by_row = []
    with network.running():
        for rows1 in network.rows(x1, _repeated(u, x1)):
            once = x2 is None and len(next(iter(rows1.values()))) == _length(x1)
            others = [rows1] if once else network.rows(other, _repeated(u, other))
            by_row.append(torch.cat([_kernel(rows1, rows2, outputs) for rows2 in others], 1))
    return torch.cat(by_row)


def _kernel(rows1: dict[str, Tensor], rows2: dict[str, Tensor], outputs: Outputs) -> Tensor:
    """The kernel between two chunks, from their rows [n, K, P] of each weight."""
    product = "ncp,mcp->nm" if outputs == "sum" else "ncp,mdp->nmcd"
    terms = [torch.einsum(product, rows1[name], rows2[name]) for name in rows1]
    total = sum(terms[1:], terms[0])
    return total if isinstance(outputs, str) else total.reshape(total.shape[:2])


def _single_outputs(outputs: Outputs, c: int, like: Tensor) -> Tensor:
    """One-hot cotangents [K, C] of all outputs, or of one."""
    unit = torch.eye(c, dtype=like.dtype, device=like.device)
    if outputs in ("sum", "all"):
        return unit
    if isinstance(outputs, bool) or not isinstance(outputs, int) or not -c <= outputs < c:
        raise CurvatureError(
            f"outputs must be 'sum', 'all' or the number of one of the {c} outputs, got {outputs!r}"
        )
    return unit[outputs].unsqueeze(0)


# ------------------------------------------------------------------------ generalised Gauss-Newton


def ggn(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    likelihood: HasRoot | LogProb,
    *,
    weights: Iterable[str] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The generalised Gauss-Newton matrix H = sum_i J_i^T Lambda_i J_i [P, P].

    Lambda_i = -d^2 log p(y_i | f_i) / df^2; of an indefinite one the positive semi-definite part.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False).double()
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 1.0]]).double()
        >>> def log_prob(f, y):  # unit noise: H = X^T X
        ...     return -0.5 * (f - y).square().sum(1)
        >>> ggn(model, x, torch.zeros(2, 1), log_prob).detach()
        tensor([[5., 2.],
                [2., 1.]], dtype=torch.float64)

    Args:
        model: network that maps inputs [n, ...] to outputs [n, ...].
        x: inputs [n, ...].
        y: targets, one per datum.
        likelihood: an object with `root` and `curvature_scale`, or log_prob(f, y) -> [n].
        weights: name patterns of the weights, P numbers in all; None for all that require grad.
        chunk: inputs per forward pass; by default as many as keep the rows small.
    """
    total = None
    for by_weight in _root_rows(_Network(model, x, weights, chunk), x, y, likelihood):
        V = torch.cat([*by_weight.values()], 2).flatten(0, 1)
        total = V.mT @ V if total is None else total + V.mT @ V
    assert total is not None
    return total


def ggn_blocks(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    likelihood: HasRoot | LogProb,
    *,
    blocks: Granularity = "module",
    weights: Iterable[str] | None = None,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """The diagonal blocks of the GGN, by name of the module or of the parameter tensor.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        >>> x, y = torch.ones(4, 2).double(), torch.zeros(4, 1).double()
        >>> def log_prob(f, y):
        ...     return -0.5 * (f - y).square().sum(1)
        >>> {name: tuple(H.shape) for name, H in ggn_blocks(model, x, y, log_prob).items()}
        {'0': (9, 9), '2': (4, 4)}

    Args:
        model: network that maps inputs [n, ...] to outputs [n, ...].
        x: inputs [n, ...].
        y: targets, one per datum.
        likelihood: as in `ggn`.
        blocks: all parameters of a "module" together, or each "tensor" for itself, or those of
            all modules with the same "parent", or lists of name patterns, one for each block.
        weights: name patterns of the weights; None for all that require grad.
        chunk: inputs per forward pass; by default as many as keep the rows small.
    """
    network = _Network(model, x, weights, chunk)
    members = blocks_of(network.plan.weights, blocks)
    totals: dict[str, Tensor] = {}
    for by_weight in _root_rows(network, x, y, likelihood):
        for block, names in members.items():
            V = torch.cat([by_weight[name] for name in names], 2).flatten(0, 1)
            totals[block] = totals[block] + V.mT @ V if block in totals else V.mT @ V
    return totals


def ggn_diagonal(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    likelihood: HasRoot | LogProb,
    *,
    weights: Iterable[str] | None = None,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """The diagonal of the GGN, shaped as the weights, by name: h = sum of squared root rows.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False).double()
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 1.0]]).double()
        >>> def log_prob(f, y):
        ...     return -0.5 * (f - y).square().sum(1)
        >>> ggn_diagonal(model, x, torch.zeros(2, 1), log_prob)["weight"].detach()
        tensor([[5., 1.]], dtype=torch.float64)

    Args:
        model: network that maps inputs [n, ...] to outputs [n, ...].
        x: inputs [n, ...].
        y: targets, one per datum.
        likelihood: as in `ggn`.
        weights: name patterns of the weights; None for all that require grad.
        chunk: inputs per forward pass; by default as many as keep the rows small.
    """
    network = _Network(model, x, weights, chunk)
    totals: dict[str, Tensor] = {}
    for by_weight in _root_rows(network, x, y, likelihood):
        for name, V in by_weight.items():
            h = V.square().sum((0, 1)).reshape(network.plan.weights[name].shape)
            totals[name] = totals[name] + h if name in totals else h
    return totals


def kfac_factors(
    model: nn.Module,
    x: Inputs,
    y: Tensor,
    likelihood: HasRoot | LogProb,
    *,
    setting: Setting = "expand",
    weights: Iterable[str] | None = None,
    chunk: int | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Kronecker factors (A, B) of the GGN by name, H ~= B (x) A for a weight [O, D].

    A weight [D, O] on the right of a matrix product has H ~= A (x) B.

        expand: A = 1/(n T) sum_nt a_nt a_nt^T,               B = sum_nrt g_nrt g_nrt^T
        reduce: the same, with a averaged and g summed over the positions t first

    a are inputs of the linear map or convolution at T positions, g cotangents of its outputs
    (Eschenhagen et al. 2023). A bias has A = 1. A grouped convolution has factors with a leading
    axis, one for each channel group. Weights without a Kronecker form (of norms, embeddings, raw
    parameters) are left out: `ggn_blocks` has theirs.

    Examples:
        >>> model = nn.Linear(2, 1).double()
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 1.0]]).double()
        >>> def log_prob(f, y):
        ...     return -0.5 * (f - y).square().sum(1)
        >>> A, B = kfac_factors(model, x, torch.zeros(2, 1), log_prob)["weight"]
        >>> torch.kron(B, A).detach()
        tensor([[5., 2.],
                [2., 1.]], dtype=torch.float64)

    Args:
        model: network that maps inputs [n, ...] to outputs [n, ...].
        x: inputs [n, ...].
        y: targets, one per datum.
        likelihood: as in `ggn`.
        setting: "expand" or "reduce" over shared positions.
        weights: name patterns of the weights; None for all that require grad.
        chunk: inputs per forward pass; by default as many as keep the rows small.
    """
    if setting not in ("expand", "reduce"):
        raise CurvatureError(f"setting must be 'expand' or 'reduce', got {setting!r}")
    network = _Network(model, x, weights, chunk)
    n = _length(x)
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    for span_chunk, U in _rooted(network, x, y, likelihood):
        for name in network.plan.weights:
            if name not in network.plan.kronecker:
                continue
            A, B = _chunk_factors(span_chunk, name, U, setting)
            if name in totals:
                totals[name] = (totals[name][0] + A / n, totals[name][1] + B)
            else:
                totals[name] = (A / n, B)
    return {name: (_one_group(A), _one_group(B)) for name, (A, B) in totals.items()}


def _chunk_factors(chunk: Chunk, name: str, U: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Sums over a chunk [channel groups, D, D] and [channel groups, O, O]; A without its 1/n."""
    patches = [a for a in chunk.input_factors(name, "expand") if a is not None]
    positions = chunk.output_factors(name, "expand")
    a = torch.cat(patches, 1) if patches else U.new_ones(chunk.n, 1, 1, 1)  # [n, T, groups, D]
    g = torch.einsum("nck,nctgo->nktgo", U.to(positions[0].dtype), torch.cat(positions, 2))
    if setting == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
    a = a.to(g.dtype)
    A = torch.einsum("ntgd,ntge->gde", a, a) / a.shape[1]
    return A, torch.einsum("nktgo,nktgp->gop", g, g)


def _one_group(factor: Tensor) -> Tensor:
    """A factor without the axis of a single channel group."""
    return factor.squeeze(0) if len(factor) == 1 else factor


def _root_rows(
    network: _Network, x: Inputs, y: Tensor, likelihood: HasRoot | LogProb
) -> Iterator[dict[str, Tensor]]:
    """Root rows V = U^T J [n, C, P] of each weight, chunk by chunk; U U^T = Lambda."""
    for chunk, U in _rooted(network, x, y, likelihood):
        rows = network.rows_of(chunk)
        yield {name: torch.einsum("nck,ncp->nkp", U, J) for name, J in rows.items()}


def _rooted(
    network: _Network, x: Inputs, y: Tensor, likelihood: HasRoot | LogProb
) -> Iterator[tuple[Chunk, Tensor]]:
    """Chunks with cotangents of single outputs, and roots U [n, C, C] of their curvature."""
    n = _length(x)
    if not isinstance(y, Tensor) or not y.dim() or len(y) != n:
        came = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise CurvatureError(f"expected a tensor of {n} targets, one for each input, got {came}")
    if not isinstance(likelihood, HasRoot) and not callable(likelihood):
        raise CurvatureError(
            "likelihood must be a function log_prob(f, y) -> [n], or an object with root and "
            f"curvature_scale, got {type(likelihood).__name__}"
        )
    u = _single_outputs("all", network.n_outputs, network.like)
    start = 0
    with network.running():
        for chunk in network.chunks(x, _repeated(u, x)):
            targets = y[start : start + chunk.n].to(chunk.f.device)
            f = chunk.f.reshape(-1, *network.plan.output_shape)
            yield chunk, _root(likelihood, f, targets).to(chunk.f.dtype)
            start += chunk.n


def _root(likelihood: HasRoot | LogProb, f: Tensor, y: Tensor) -> Tensor:
    """U [n, C, C] with U U^T = Lambda, in float64, with the graph of f."""
    f = f.double()
    if isinstance(likelihood, HasRoot):
        columns = torch.arange(f[0].numel(), device=f.device).expand(len(f), -1)
        U = likelihood.root(f, y, "fisher", columns)
        return U * likelihood.curvature_scale().sqrt().to(U)
    return psd_sqrt(_hessian(likelihood, f, y))


def _hessian(log_prob: LogProb, f: Tensor, y: Tensor) -> Tensor:
    """-d^2 log p / df^2 [n, C, C]."""
    with torch.enable_grad():
        flat = f.flatten(1)
        flat = flat if flat.requires_grad else flat.detach().requires_grad_()
        values = log_prob(flat.reshape(f.shape), y)
        if values.shape != f.shape[:1]:
            raise CurvatureError(
                f"log_prob must return one value per datum [{len(f)}], got {tuple(values.shape)}"
            )
        (slope,) = gradients(values.sum(), [flat], create_graph=True)
        entries = [slope[:, c].sum() for c in range(flat.shape[1])]
        columns = [gradients(entry, [flat], create_graph=True)[0] for entry in entries]
    return -torch.stack(columns, 1)


# ------------------------------------------------------------------------------------ the network


@dataclass
class _Constant:
    """Given cotangents [n, K, C]; `y` are the numbers of the data points."""

    constants: Tensor
    cotangents_follow_outputs = False

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        return self.constants[y].to(f.dtype)

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return None


class _Network:
    """A model with the plan of its rows: chunks of data points, with or without a graph.

    Args:
        model: the user's model.
        x: inputs, of which the first two make the plan.
        weights: name patterns; None for all that require grad.
        chunk: inputs per forward pass, if that is fixed.
    """

    def __init__(
        self, model: nn.Module, x: Inputs, weights: Iterable[str] | None, chunk: int | None
    ):
        if torch.is_inference_mode_enabled():
            raise CurvatureError(
                "curvature is made of derivatives, which torch.inference_mode() forbids; use "
                "torch.no_grad()"
            )
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise CurvatureError(f"chunk must be a whole number of at least 1, got {chunk!r}")
        chosen = _weights(model, weights)
        _length(x)
        detached = map_inputs(lambda t: t.detach(), x)
        with evaluating(model), seeded(0, tensors_of(x)[0].device):
            self.plan: Plan = make_plan(model, chosen, detached)
        self._graph = torch.is_grad_enabled()
        self._chunk = chunk or self._chunk_inputs()

    @property
    def n_outputs(self) -> int:
        return self.plan.output_shape.numel()

    @property
    def like(self) -> Tensor:
        """A weight, for dtype and device."""
        return next(iter(self.plan.weights.values()))

    def _chunk_inputs(self) -> int:
        """As many inputs as keep activations and rows of a chunk small."""
        size = sum(w.numel() * w.element_size() for w in self.plan.weights.values())
        per_input = self.plan.bytes_per_input + self.n_outputs * size
        return int(min(max(CHUNK_BYTES // per_input, 1), LARGEST_CHUNK))

    def running(self) -> AbstractContextManager[None]:
        """The model in evaluation mode."""
        return evaluating(self.plan.model)

    def chunks(self, x: Inputs, cotangents: Tensor) -> Iterator[Chunk]:
        """Recorded passes over the inputs, chunk by chunk.

        Args:
            x: inputs [n, ...].
            cotangents: of the outputs [n, K, C].
        """
        numbers = torch.arange(_length(x), device=cotangents.device)
        for span in numbers.split(self._chunk):
            selection = Selection(_Constant(cotangents), span, span.unsqueeze(1))
            yield self._recorded(taken(x, slice(int(span[0]), int(span[-1]) + 1)), selection)

    def _recorded(self, x: Inputs, selection: Selection) -> Chunk:
        """The pass of some data points."""
        copies = map_inputs(lambda t: (t if self._graph else t.detach()).unsqueeze(1), x)
        try:
            with torch.enable_grad():
                kind = GraphChunk if self._graph else Chunk
                chunk = kind(self.plan, copies, selection)
        except PlanChanged:
            raise CurvatureError(
                "the model uses its weights differently from one data point to the next "
                "(data-dependent control flow); call this function for such data separately"
            ) from None
        if not self._graph:
            chunk.drop_graph()
        return chunk

    def rows(self, x: Inputs, cotangents: Tensor) -> Iterator[dict[str, Tensor]]:
        """Rows [n, K, numel] of each weight by name, chunk by chunk."""
        return (self.rows_of(chunk) for chunk in self.chunks(x, cotangents))

    def rows_of(self, chunk: Chunk) -> dict[str, Tensor]:
        """Rows [n, K, numel] of each weight of one chunk."""
        shape = (chunk.n, chunk.k, -1)
        return {name: chunk.rows(name).reshape(shape) for name in self.plan.weights}


def _weights(model: nn.Module, patterns: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The weights that fit some pattern; every pattern must fit one."""
    weights = trainable(model)
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns or ():
        if not any(matches(name, [pattern]) for name in weights):
            raise CurvatureError(
                f"the pattern {pattern!r} fits no weight that requires grad; weights are "
                f"{list(weights)}"
            )
    if patterns is not None:
        patterns = list(patterns)
        weights = {name: w for name, w in weights.items() if matches(name, patterns)}
    if not weights:
        raise CurvatureError("the model has no weights that require grad; unfreeze some")
    return weights


def _length(x: Inputs) -> int:
    """The number of inputs."""
    lengths = {len(t) if t.dim() else 0 for t in tensors_of(map_inputs(lambda t: t, x))}
    if len(lengths) != 1 or lengths == {0}:
        raise CurvatureError(
            f"expected inputs [n, ...] with one batch axis of at least one datum, got lengths "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _repeated(cotangents: Tensor, x: Inputs) -> Tensor:
    """The same cotangents [K, C] for every input [n, K, C]."""
    return cotangents.expand(_length(x), -1, -1)


def _cotangents(cotangents: Tensor | None, network: _Network, x: Inputs) -> Tensor:
    """Cotangents as [n, K, C]."""
    n, c = _length(x), network.n_outputs
    if cotangents is None:
        return _repeated(_single_outputs("all", c, network.like), x)
    shape = tuple(cotangents.shape)
    if shape[-1:] != (c,) or (len(shape) != 2 and (len(shape) != 3 or shape[0] != n)):
        raise CurvatureError(
            f"cotangents must be [K, {c}] or [{n}, K, {c}], got {tuple(cotangents.shape)}"
        )
    cotangents = cotangents.to(network.like.device)
    return cotangents if len(shape) == 3 else _repeated(cotangents, x)
