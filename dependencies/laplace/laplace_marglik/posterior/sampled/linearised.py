"""The network as a linear function of its weights: products with J, without forming J."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

from asdl_marglik import copied, evaluating, run
from laplace_marglik.posterior.sampled.layout import Layout


class Linearised:
    """J(x) diag(s) at the network's present weights; s are feature scales [P] (None: ones).

    Args:
        model: the network.
        layout: places of the weights in a flat vector [P].
        together: vectors in one vectorised pass. More is faster for small networks and needs the
            activations of as many.
    """

    def __init__(self, model: nn.Module, layout: Layout, together: int = 1):
        self.model = model
        self.layout = layout
        self.together = together
        self.scale: Tensor | None = None

    def _weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights that vary, and all other parameters, as constants."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        weights = {name: parameters.pop(name) for name in self.layout.pieces}
        return weights, parameters

    def outputs(self, x: Any) -> Tensor:
        """The network's outputs f [n, ...] in evaluation mode."""
        with torch.no_grad(), evaluating(self.model):
            return run(self.model, copied(x))

    def jvp(self, x: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs f [n, ...] and J diag(s) z [k, n, ...] for vectors z [k, P]."""
        weights, fixed = self._weights()

        def forward(varied: dict[str, Tensor]) -> Tensor:
            return run(self.model, copied(x), {**fixed, **varied})

        def push(vector: Tensor) -> tuple[Tensor, Tensor]:
            scaled = vector if self.scale is None else vector * self.scale
            f, pushed = jvp(forward, (weights,), (self.layout.views(scaled),))  # type: ignore[misc]
            return f, pushed

        with torch.no_grad(), evaluating(self.model):
            if self.together > 1 and len(vectors) > 1:
                size = min(self.together, len(vectors))
                f, pushed = torch.vmap(push, out_dims=(0, 0), chunk_size=size)(vectors)
                return f[0], pushed
            results = [push(vector) for vector in vectors]
            return results[0][0], torch.stack([pushed for _, pushed in results])

    def vjp_(
        self, x: Any, cotangents: Callable[[Tensor], Tensor], out: Tensor, factor: float = 1.0
    ) -> None:
        """out [k, P] += factor diag(s) J^T u, in place.

        Args:
            x: inputs [n, ...].
            cotangents: u [k, n, ...] as a function of the outputs f [n, ...].
            out: k vectors [k, P] to add to.
            factor: of what is added.
        """
        weights, fixed = self._weights()
        leaves = {name: w.requires_grad_() for name, w in weights.items()}
        batched = self.together > 1
        with evaluating(self.model):
            with torch.enable_grad():
                f = run(self.model, copied(x), {**fixed, **leaves})
            u = cotangents(f.detach()).to(f.dtype)
            for start in range(0, len(u), self.together):
                stop = start + self.together
                part = u[start:stop]
                gradients = torch.autograd.grad(
                    f,
                    list(leaves.values()),
                    part if batched else part[0],
                    is_grads_batched=batched,
                    retain_graph=stop < len(u),
                    allow_unused=True,
                )
                self._add_gradients_(out[start:stop], gradients, factor)

    def _add_gradients_(
        self, out: Tensor, gradients: Sequence[Tensor | None], factor: float
    ) -> None:
        """out [k, P] += factor * gradients of each weight, times the feature scales."""
        for piece, gradient in zip(self.layout.pieces.values(), gradients, strict=True):
            if gradient is None:
                continue
            flat = gradient.reshape(len(out), -1)
            if self.scale is not None:
                flat = flat * self.scale[piece]
            out[:, piece].add_(flat, alpha=factor)
