"""Jacobian rows of weights that no rule covers: one gradient per datum, exact for any
differentiable model.

The weights are handed to the model as leaves of their own, without what is attached to the
parameters (hooks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from asdl_marglik.watch.differentiable import TwiceDifferentiable
from asdl_marglik.watch.model import Inputs, copied, run, taken

Seeds = Callable[[Tensor, int], Tensor]  # (outputs of datum i [1, C], i) -> seeds [K, C]


def averaged_output(model: nn.Module, weights: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """The outputs [C] of one datum, averaged over its copies x [A, ...], with the given weights."""
    with TwiceDifferentiable():
        f = run(model, copied(x), weights)
    return f.reshape(len(f), -1).mean(0)


def leaves_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights' values as new leaves."""
    return {name: w.detach().requires_grad_() for name, w in weights.items()}


def rows(
    model: nn.Module, weights: Mapping[str, Tensor], x: Inputs, seeds: Tensor
) -> dict[str, Tensor]:
    """Rows [n, K, *shape] of each weight for x [n, A, ...] and seeds [n, K, C], without a graph."""

    def projected(w: dict[str, Tensor], x_i: Inputs, seed: Tensor) -> Tensor:
        return (averaged_output(model, w, x_i) * seed).sum()

    detached = {name: w.detach() for name, w in weights.items()}
    # nested vmaps give wrong rows for PReLU
    per_datum = vmap(grad(projected), in_dims=(None, 0, 0))
    try:
        per_seed = [per_datum(detached, x, seeds[:, k]) for k in range(seeds.shape[1])]
        return {name: torch.stack([rows[name] for rows in per_seed], 1) for name in detached}
    # control flow, in-place buffers, operations without a batching rule
    except (RuntimeError, ValueError, TypeError):
        return _rows_by_loop(model, weights, x, seeds)


def _rows_by_loop(
    model: nn.Module, weights: Mapping[str, Tensor], x: Inputs, seeds: Tensor
) -> dict[str, Tensor]:
    leaves = leaves_of(weights)
    collected: list[list[Tensor]] = []
    with torch.enable_grad():
        for i in range(len(seeds)):
            f = averaged_output(model, leaves, taken(x, i))
            for seed in seeds[i]:
                collected.append(gradients(f, list(leaves.values()), seed, retain=True))
    stacked = [torch.stack(column) for column in zip(*collected, strict=True)]
    return {name: s.unflatten(0, seeds.shape[:2]) for name, s in zip(weights, stacked, strict=True)}


def pull(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    x_i: Inputs,
    i: int,
    seeds: Seeds,
    bars: dict[str, Tensor],
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """Gradient in `leaves` of sum_k <bar_k, row_k> for one datum with copies x_i [A, ...], by plain
    double backward.

    A row is J^T seed(f): it moves with the outputs through J and through the seed, whose own graph
    stays, but not through their product. Not torch.func: its second derivatives through layer_norm
    are wrong in torch 2.13.
    """
    own = leaves_of(weights)
    f = averaged_output(model, own, x_i)
    total = f.new_zeros(())
    for k, seed in enumerate(seeds(f.unsqueeze(0), i)):
        row = gradients(f, list(own.values()), seed, create_graph=True)
        total = total + sum((bars[name][k] * r).sum() for name, r in zip(own, row, strict=True))
    return gradients(total, list(leaves))


def gradients(
    outputs: Tensor,
    inputs: Sequence[Tensor],
    cotangent: Tensor | None = None,
    *,
    create_graph: bool = False,
    retain: bool = False,
) -> list[Tensor]:
    """autograd.grad with zeros for what `outputs` do not depend on."""
    if not inputs:
        return []
    if not outputs.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    found = torch.autograd.grad(
        outputs,
        inputs,
        cotangent,
        create_graph=create_graph,
        retain_graph=retain or create_graph,
        allow_unused=True,
    )
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]
