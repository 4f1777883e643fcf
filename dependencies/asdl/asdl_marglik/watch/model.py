"""The user's model: which parameters are weights, how it is run, and that it is left as it was."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from asdl_marglik.errors import CurvatureError

Inputs = Any  # a tensor or a mapping of tensors, each with a leading batch axis

PIECE = 2**16  # numbers whose bits are added up at once
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of as many bytes

# Modes of modules, the global random state and, while some of them are replaced, a model's
# parameters belong to the process: estimates in several threads take turns.
ONE_AT_A_TIME = threading.RLock()


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply `function` to every tensor of the inputs."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {
            key: function(value) if isinstance(value, Tensor) else value for key, value in x.items()
        }
    raise CurvatureError(
        f"inputs must be a tensor or a mapping of tensors, got {type(x).__name__}; convert with "
        "torch.as_tensor"
    )


def taken(x: Inputs, index: int | slice | Tensor) -> Inputs:
    """Some of the data points, of every tensor of the inputs."""
    return map_inputs(lambda t: t[index], x)


def tensors_of(x: Inputs) -> list[Tensor]:
    """The tensors of the inputs, in a fixed order."""
    tensors = (
        [x]
        if isinstance(x, Tensor)
        else [value for value in x.values() if isinstance(value, Tensor)]
    )
    if not tensors:
        raise CurvatureError("inputs must hold at least one tensor, got an empty mapping")
    return tensors


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter name fits one of the shell-style patterns (`head.*`)."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def trainable(model: nn.Module, hyper: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """The weights: parameters that require grad, less those named as hyperparameters, in the
    model's order.
    """
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and not matches(name, hyper)
    }


def hyperparameters_in(model: nn.Module, hyper: Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters named as hyperparameters; a pattern that fits none is an error."""
    hyper = list(hyper)
    names = dict(model.named_parameters())
    for pattern in hyper:
        if not any(matches(name, [pattern]) for name in names):
            raise CurvatureError(
                f"hyperparameter pattern {pattern!r} fits no parameter; there are {list(names)}"
            )
    return {name: p for name, p in names.items() if p.requires_grad and matches(name, hyper)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every submodule's own mode restored afterwards, also after an
    exception.

    Attention runs by its plain formula: the fused kernels have no second derivative. Autocast is
    off, so that numbers have the precision of the weights. Other threads wait; one that trains the
    model meanwhile is not noticed.
    """
    with ONE_AT_A_TIME:
        training = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with sdpa_kernel(SDPBackend.MATH), full_precision(model):
                yield
        finally:
            for module, mode in training:
                module.training = mode


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Autocast switched off, for the CPU and for the model's device."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
        yield


def run(model: nn.Module, x: Inputs, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Outputs [n, ...] of inputs x [n, ...], with some weights replaced."""
    f = functional_call(model, dict(weights), (x,)) if weights else model(x)
    return checked_outputs(f, len(tensors_of(x)[0]))


def run_averaged(
    model: nn.Module, copies: Inputs, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Outputs [n, ...] of augmented copies [n, A, ...], averaged over the A copies of a datum."""
    n, a = tensors_of(copies)[0].shape[:2]
    flat = map_inputs(lambda t: t.flatten(0, 1), copies)
    return run(model, flat, weights).unflatten(0, (n, a)).mean(1)


def checked_outputs(f: Any, n: int) -> Tensor:
    """The outputs of n data points, if they are one tensor with a leading batch axis."""
    if not isinstance(f, Tensor):
        entries = f" with the entries {list(f)}" if isinstance(f, Mapping) else ""
        raise CurvatureError(
            "the model must return one tensor of outputs [n, ...], got "
            f"{type(f).__name__}{entries}; wrap it in a module whose forward returns the tensor "
            "that the likelihood takes, for example net(**x).logits"
        )
    if not f.dim() or len(f) != n:
        raise CurvatureError(
            f"the model must return outputs with a leading batch axis: [{n}, ...] for {n} inputs, "
            f"got {tuple(f.shape)}"
        )
    return f


def copied(x: Inputs) -> Inputs:
    """Copies of the inputs, for a model that may write to them."""
    return map_inputs(lambda t: t.clone(), x)


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor has been written to."""
    return [t._version for t in tensors]


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks that may change gradients on their way back: rows would not be derivatives of
    the outputs.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CurvatureError(
                f"module {name or type(module).__name__!r} has a backward hook, which may change "
                "the gradients that curvature is made of; remove it (handle.remove()) before the "
                "evidence is computed"
            )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The global random state set to `seed` inside and restored afterwards; other threads wait."""
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_all(seed, device)
        yield


def seed_all(seed: int, device: torch.device) -> None:
    """Set the generators a model on `device` may draw from; torch.manual_seed takes a millisecond
    to find others.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def fingerprint(x: Inputs, entries: int = 1000) -> Tensor:
    """A few entries of the inputs, by which to know them again."""
    flat = [t.detach().flatten() for t in tensors_of(x)]
    return torch.cat([t[:: max(1, t.numel() // entries)].double() for t in flat])


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """One integer per tensor [T], sum_i r_i bits_i (mod 2^64) with random r_i: another one after
    any change.

    Versions of tensors do not count writes through `.data`; sums of integers, unlike norms, do not
    depend on threads.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**62), 2**62, (PIECE,), generator=generator)
    return torch.stack(
        [_hashed(tensor.detach(), random.to(tensor.device)).cpu() for tensor in tensors]
    )


def _hashed(tensor: Tensor, random: Tensor) -> Tensor:
    """The integer of one tensor; pieces have factors of their own."""
    values = tensor.contiguous().flatten()
    bits = values.view(BITS[values.element_size()])
    parts = []
    for piece in bits.split(PIECE):
        # folded: a sign is the highest bit, of which a product keeps the parity alone
        wide = piece.long()
        parts.append(((wide ^ (wide >> 32)) * random[: len(wide)]).sum())
    return (
        torch.stack(parts) * random[torch.arange(len(parts), device=random.device) % PIECE]
    ).sum()


def check_weights(model: nn.Module) -> None:
    """Raise an error that names a non-finite parameter."""
    parameters: list[Tensor] = [p.detach() for p in model.parameters() if p.is_floating_point()]
    if not parameters:
        return
    # a single question
    if torch.stack([norm.double() for norm in torch._foreach_norm(parameters)]).isfinite().all():
        return
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise CurvatureError(
                f"parameter {name!r} contains NaN or infinity; training has diverged before this "
                "call"
            )


def check_inputs(x: Inputs, offset: int = 0) -> None:
    """Raise an error that names a datum with a non-finite entry."""
    for tensor in tensors_of(x):
        if tensor.is_floating_point():
            bad = (~tensor.flatten(1).isfinite().all(1)).nonzero()
            if len(bad):
                raise CurvatureError(
                    f"input {int(bad[0]) + offset} contains NaN or infinity; remove or repair "
                    "that datum"
                )


def finite(x: Inputs) -> Tensor:
    """Whether all entries are finite, as a tensor: nobody waits for it."""
    return torch.stack([t.isfinite().all() for t in tensors_of(x)]).all()


def check_finite(
    inputs: list[Tensor], outputs: Tensor, model: nn.Module, batches: Callable[[], Iterable[Inputs]]
) -> None:
    """Raise an error that names the parameter or the data index behind a non-finite input or output
    [N, C].
    """
    if torch.stack([*inputs, outputs.isfinite().all()]).all():
        return
    check_weights(model)
    count = 0
    for x in batches():
        check_inputs(x, count)
        count += len(tensors_of(x)[0])
    index = int((~outputs.isfinite().all(1)).nonzero()[0])
    raise CurvatureError(
        f"the network's output for datum {index} is not finite although its input and all "
        "parameters are: the forward pass overflows; use smaller weights or a wider dtype"
    )
