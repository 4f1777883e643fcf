"""Jacobian rows of weights that no rule covers: one gradient per datum and cotangent.

They are exact for any differentiable model. The model gets the values of the weights as new leaves,
without anything that is attached to its parameters (hooks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from asdl_marglik.watch.differentiable import TwiceDifferentiable
from asdl_marglik.watch.model import Inputs, copied, run, taken

# (outputs [1, C] of datum i, i) -> cotangents [K, C] of its outputs
Cotangents = Callable[[Tensor, int], Tensor]


def averaged_output(model: nn.Module, weights: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """The outputs [C] of one datum, averaged over its copies.

    Args:
        model: the user's model.
        weights: values that replace parameters of these names.
        x: the copies [A, ...] of the datum.
    """
    with TwiceDifferentiable():
        f = run(model, copied(x), weights)
    return f.reshape(len(f), -1).mean(0)


def leaves_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights' values as new leaves."""
    return {name: w.detach().requires_grad_() for name, w in weights.items()}


def rows(
    model: nn.Module, weights: Mapping[str, Tensor], x: Inputs, cotangents: Tensor
) -> dict[str, Tensor]:
    """Rows [n, K, *shape] of each weight, without a graph.

    Args:
        model: the user's model.
        weights: the weights in question, by name.
        x: augmented copies [n, A, ...] of the data points.
        cotangents: of the outputs [n, K, C].
    """

    def projection(w: dict[str, Tensor], x_i: Inputs, cotangent: Tensor) -> Tensor:
        return (averaged_output(model, w, x_i) * cotangent).sum()

    detached = {name: w.detach() for name, w in weights.items()}
    # one vmap over data points and a loop over k: nested vmaps give wrong rows for PReLU
    row_of_each = vmap(grad(projection), in_dims=(None, 0, 0))
    try:
        columns = [row_of_each(detached, x, cotangents[:, k]) for k in range(cotangents.shape[1])]
        return {name: torch.stack([rows_k[name] for rows_k in columns], 1) for name in detached}
    # control flow, in-place buffers, operations without a batching rule
    except (RuntimeError, ValueError, TypeError):
        return _rows_by_loop(model, weights, x, cotangents)


def _rows_by_loop(
    model: nn.Module, weights: Mapping[str, Tensor], x: Inputs, cotangents: Tensor
) -> dict[str, Tensor]:
    """The same, one backward pass per datum and cotangent."""
    leaves = leaves_of(weights)
    parameters = list(leaves.values())
    rows_of_all: list[list[Tensor]] = []
    with torch.enable_grad():
        for i, cotangents_i in enumerate(cotangents):
            f = averaged_output(model, leaves, taken(x, i))
            for cotangent in cotangents_i:
                rows_of_all.append(gradients(f, parameters, cotangent, retain=True))
    by_weight = zip(*rows_of_all, strict=True)
    shape = cotangents.shape[:2]
    return {
        name: torch.stack(weight_rows).unflatten(0, shape)
        for name, weight_rows in zip(weights, by_weight, strict=True)
    }


def pull(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    x_i: Inputs,
    i: int,
    cotangents: Cotangents,
    bars: dict[str, Tensor],
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """Gradient in `leaves` of sum_k <bar_k, row_k> for one datum, by plain double backward.

    A row is J^T u(f), with a cotangent u that may depend on the outputs f. Both factors are
    differentiated: J by the second backward pass, u by its own graph. Not torch.func: its second
    derivatives through layer_norm are wrong in torch 2.13.

    Args:
        model: the user's model.
        weights: the weights in question, by name.
        x_i: augmented copies [A, ...] of the datum.
        i: its number in the chunk.
        cotangents: gives the cotangents of its outputs.
        bars: cotangents [K, *shape] of its rows, by name of the weight.
        leaves: what to differentiate in.
    """
    new_leaves = leaves_of(weights)
    f = averaged_output(model, new_leaves, x_i)
    total = f.new_zeros(())
    for k, cotangent in enumerate(cotangents(f.unsqueeze(0), i)):
        row = gradients(f, list(new_leaves.values()), cotangent, create_graph=True)
        products = [(bars[name][k] * r).sum() for name, r in zip(new_leaves, row, strict=True)]
        total = total + sum(products)
    return gradients(total, list(leaves))


def gradients(
    outputs: Tensor,
    inputs: Sequence[Tensor],
    cotangent: Tensor | None = None,
    *,
    create_graph: bool = False,
    retain: bool = False,
) -> list[Tensor]:
    """`torch.autograd.grad` with zeros for what `outputs` do not depend on.

    Args:
        outputs: to be differentiated.
        inputs: what to differentiate in.
        cotangent: of the outputs; None for a scalar.
        create_graph: whether the gradients can be differentiated again.
        retain: whether the graph of the outputs stays.
    """
    if not inputs:
        return []
    if not outputs.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    grads = torch.autograd.grad(
        outputs,
        inputs,
        cotangent,
        create_graph=create_graph,
        retain_graph=retain or create_graph,
        allow_unused=True,
    )
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True)]
