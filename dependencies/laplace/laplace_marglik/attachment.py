"""The learned weight decay in every step of somebody's optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from laplace_marglik.errors import MarglikError
from laplace_marglik.prior import GaussianPrior

# where a wrapper (of accelerate, of Lightning) keeps the optimiser that takes the steps
WRAPPED = ("optimizer", "_optimizer")


class Attachment:
    """Adds the prior's pull, precision * (w - mean) / N, to every step of an optimiser.

    It acts when the step begins, after clipping and unscaling, or, where a closure computes the
    gradients inside the step, after each call of the closure.

    Args:
        optimizer: of the weights, or of some of them; wrappers of it are looked through.
        prior: whose pull.
        weights: of the model, by name.
        n_data: size N of the training set.
        decoupled: as the decay of AdamW, w -= rate * pull, instead of a part of the gradient.
        also_decays: accept an optimiser that has a weight decay of its own.
    """

    def __init__(
        self,
        optimizer: Any,
        prior: GaussianPrior,
        weights: Mapping[str, nn.Parameter],
        n_data: int,
        *,
        decoupled: bool = False,
        also_decays: bool = False,
    ):
        self.optimizer = stepping(optimizer)
        self.prior = prior
        self.n_data = n_data
        self.decoupled = decoupled
        self._names = {id(w): name for name, w in weights.items()}
        self._weights = dict(weights)
        self._check(also_decays)
        self._hook = self.optimizer.register_step_pre_hook(self._before_step)

    def _check(self, also_decays: bool) -> None:
        if not any(weights for _, weights in self._by_group()):
            raise MarglikError("the optimiser has none of the model's weights")
        decays = [group.get("weight_decay", 0) for group in self.optimizer.param_groups]
        if any(decays) and not also_decays:
            raise MarglikError(
                f"the optimiser has weight_decay={max(decays)} of its own beside the learned one; "
                "set it to 0, or say attach(optimizer, also_decays=True)"
            )
        if self.decoupled and isinstance(self.optimizer, LBFGS):
            raise MarglikError(
                "LBFGS evaluates its loss several times in a step, so that a decay beside it is "
                "not defined; use decoupled=False"
            )

    @property
    def names(self) -> list[str]:
        """Names of the weights that the optimiser moves."""
        return [name for _, weights in self._by_group() for name in weights]

    def remove(self) -> None:
        """Leave the optimiser as it was."""
        self._hook.remove()

    def _by_group(self) -> Iterator[tuple[Any, dict[str, nn.Parameter]]]:
        """The learning rate and the weights of each parameter group, as they are now."""
        for group in self.optimizer.param_groups:
            weights, others = {}, []
            for p in group["params"]:
                name = self._names.get(id(p))
                if name is not None:
                    weights[name] = p
                elif p.requires_grad:
                    others.append(p)
            if others:
                raise MarglikError(
                    f"the optimiser has {len(others)} parameters (the first of shape "
                    f"{tuple(others[0].shape)}) that are no weights of this model; hyperparameters "
                    "are moved by round(), other modules need an optimiser of their own"
                )
            yield group.get("lr"), weights

    # ------------------------------------------------------------------------------------- steps

    def _before_step(
        self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        # the optimiser comes first where the step was called as a method
        place = 1 if args and args[0] is optimizer else 0
        closure = kwargs.get("closure") or (args[place] if len(args) > place else None)
        if closure is None:
            self._pull()
            return None
        return args[:place], {**kwargs, "closure": self._with_pull(closure)}

    def _with_pull(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that computes the loss with the prior's part, and its gradients."""

        def of_posterior() -> Any:
            loss = closure()
            if loss is None:  # a step that is to be left out
                return None
            with torch.no_grad():
                penalty = self.prior.penalty(self._weights) / (2 * self.n_data)
            self._pull()
            return loss + penalty.to(loss) if isinstance(loss, Tensor) else loss

        return of_posterior

    @torch.no_grad()
    def _pull(self) -> None:
        # a scaler leaves it to a fused optimiser to unscale gradients, and to leave steps out
        scale = getattr(self.optimizer, "grad_scale", None)
        overflown = getattr(self.optimizer, "found_inf", None)
        if overflown is not None and bool(overflown):
            return
        for rate, weights in self._by_group():
            present = {name: w for name, w in weights.items() if w.grad is not None}
            if not present:
                continue
            pulls = list(self.prior.pulls(present, self.n_data).values())
            if self.decoupled:
                _add(list(present.values()), [pull * -rate for pull in pulls])
                continue
            if scale is not None:
                pulls = [pull * scale.to(pull) for pull in pulls]
            _add([_dense_gradient(name, w) for name, w in present.items()], pulls)


def _add(to: list[Tensor], pulls: list[Tensor]) -> None:
    """Add the pulls to weights or gradients, in the precision of these."""
    torch._foreach_add_(to, [pull.to(t.dtype) for t, pull in zip(to, pulls, strict=True)])


def _dense_gradient(name: str, weight: nn.Parameter) -> Tensor:
    """A weight's gradient, if it has all entries."""
    assert weight.grad is not None
    if weight.grad.is_sparse:
        raise MarglikError(
            f"the gradient of {name!r} is sparse, and the prior pulls at all of its entries; use "
            "nn.Embedding(..., sparse=False)"
        )
    return weight.grad


def stepping(optimizer: Any) -> Optimizer:
    """The torch optimiser that takes the steps, inside the wrappers of other libraries.

    Args:
        optimizer: a torch optimiser, or one that wraps it.
    """
    while True:
        kind = type(optimizer)
        if "deepspeed" in f"{kind.__module__}.{kind.__name__}".lower():
            raise MarglikError(
                f"the optimiser is {kind.__name__}, which keeps weights and gradients in parts of "
                "its own; train with DistributedDataParallel instead of DeepSpeed"
            )
        inner = [getattr(optimizer, name, None) for name in WRAPPED]
        wrapped = next((found for found in inner if isinstance(found, Optimizer)), None)
        if wrapped is None:
            break
        optimizer = wrapped
    if not isinstance(optimizer, Optimizer):
        raise MarglikError(
            f"expected a torch.optim.Optimizer, or one wrapped by accelerate or Lightning, got "
            f"{type(optimizer).__name__}"
        )
    return optimizer
