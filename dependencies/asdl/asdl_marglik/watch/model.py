"""The user's model: which parameters are weights, how it is run, and that it is left as it was."""

from __future__ import annotations

import fnmatch
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from asdl_marglik.errors import CurvatureError
from asdl_marglik.watch.network import Inputs, Network, plain, plain_forwards

# A checksum takes so many numbers at a time: their 64-bit integers fill half a megabyte, whatever
# the size of the tensor.
PIECE = 2**16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number -> integer of that size

# Modes of modules, the global random state and, while some of them are replaced, a model's
# parameters belong to the process: estimates in several threads take turns.
ONE_AT_A_TIME = threading.RLock()


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """The inputs with `function` applied to each of their tensors.

    Args:
        function: of one tensor.
        x: a tensor, or a mapping whose other entries stay as they are.
    """
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {
            name: function(entry) if isinstance(entry, Tensor) else entry
            for name, entry in x.items()
        }
    raise CurvatureError(
        f"inputs must be a tensor or a mapping of tensors, got {type(x).__name__}; convert with "
        "torch.as_tensor"
    )


def taken(x: Inputs, index: int | slice | Tensor) -> Inputs:
    """Some of the data points.

    Args:
        x: inputs [n, ...].
        index: their place on the batch axis; an integer removes the axis.
    """
    return map_inputs(lambda t: t[index], x)


def tensors_of(x: Inputs) -> list[Tensor]:
    """The tensors of the inputs, in a fixed order."""
    entries = [x] if isinstance(x, Tensor) else x.values()
    tensors = [entry for entry in entries if isinstance(entry, Tensor)]
    if not tensors:
        raise CurvatureError("inputs must hold at least one tensor, got an empty mapping")
    return tensors


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter name fits one of some shell-style patterns.

    Args:
        name: of a parameter, as in `model.named_parameters()`.
        patterns: such as `head.*`.
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def trainable(model: nn.Module, hyper: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """The weights: parameters that require grad and are no hyperparameters, in the model's order.

    Args:
        model: the user's model.
        hyper: patterns of the names of hyperparameters.
    """
    parameters = plain(model).named_parameters()
    return {name: p for name, p in parameters if p.requires_grad and not matches(name, hyper)}


def hyperparameters_in(model: nn.Module, hyper: Iterable[str]) -> dict[str, nn.Parameter]:
    """The hyperparameters among the parameters; a pattern that fits none is an error.

    Args:
        model: the user's model.
        hyper: patterns of their names.
    """
    hyper = list(hyper)
    parameters = dict(plain(model).named_parameters())
    for pattern in hyper:
        if not any(matches(name, [pattern]) for name in parameters):
            raise CurvatureError(
                f"hyperparameter pattern {pattern!r} fits no parameter; there are "
                f"{list(parameters)}"
            )
    return {name: p for name, p in parameters.items() if p.requires_grad and matches(name, hyper)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; the mode of every submodule is restored afterwards.

    It is restored after an exception, too. Attention runs by its plain formula: the fused kernels
    have no second derivative. Autocast is off, so that numbers have the precision of the weights,
    and nothing runs compiled, so that operations can be watched. Other threads wait at their own
    `evaluating`; a thread that trains the model meanwhile is not noticed.

    Args:
        model: the user's model.
    """
    with ONE_AT_A_TIME:
        training = [(module, module.training) for module in model.modules()]
        if not any(mode for _, mode in training):
            training = []
        else:
            model.eval()
        try:
            with sdpa_kernel(SDPBackend.MATH), full_precision(model), not_compiled():
                yield
        finally:
            for module, mode in training:
                module.training = mode


@contextmanager
def constant_besides(weights: Iterable[nn.Parameter], model: nn.Module) -> Iterator[None]:
    """Inside, the model's other parameters have no place in graphs; afterwards as they were.

    What the weights are not in is then run without a graph: all of the network below a last layer.

    Args:
        weights: parameters that stay as they are.
        model: the user's model.
    """
    kept = {id(w) for w in weights}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    with ONE_AT_A_TIME:
        try:
            for p in others:
                p.requires_grad_(False)
            yield
        finally:
            for p in others:
                p.requires_grad_(True)


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Autocast switched off inside, for the CPU and for the model's device.

    Where accelerate has wrapped a module's forward in autocast, the forward of before runs.

    Args:
        model: the user's model.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    wrapped = {module: module.forward for module in plain_forwards(model)}
    try:
        for module, forward in plain_forwards(model).items():
            module.forward = forward
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            yield
    finally:
        for module, forward in wrapped.items():
            module.forward = forward


@contextmanager
def not_compiled() -> Iterator[None]:
    """Models and functions that `torch.compile` has compiled run as they were written."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def run(
    model: nn.Module,
    x: Inputs,
    weights: Mapping[str, Tensor] | None = None,
    *,
    wrapped: bool = False,
) -> Tensor:
    """Outputs [n, ...] of the model.

    Args:
        model: the user's model.
        x: inputs [n, ...].
        weights: values that replace parameters of these names.
        wrapped: with what compiles or distributes the model, as in training, where no values are
            replaced.
    """
    network = Network.of(model)
    if weights:
        f = functional_call(network, dict(weights), (x,))
    else:
        f = network.as_given(x) if wrapped else network(x)
    return checked_outputs(f, len(tensors_of(x)[0]))


def run_averaged(
    model: nn.Module, copies: Inputs, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Outputs [n, ...] of the model, averaged over the A augmented copies of a datum.

    Args:
        model: the user's model.
        copies: inputs [n, A, ...].
        weights: values that replace parameters of these names.
    """
    n, a = tensors_of(copies)[0].shape[:2]
    flat = map_inputs(lambda t: t.flatten(0, 1), copies)
    f = run(model, flat, weights)
    return f.unflatten(0, (n, a)).mean(1)


def checked_outputs(f: Tensor, n: int) -> Tensor:
    """The outputs of a model; an error if they have no leading batch axis.

    Args:
        f: outputs of a `Network`.
        n: number of its inputs.
    """
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
    """How often each tensor has been written to, as torch counts it."""
    return [t._version for t in tensors]


def check_hooks(model: nn.Module) -> None:
    """Raise an error for a backward hook: rows would no longer be derivatives of the outputs."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CurvatureError(
                f"module {name or type(module).__name__!r} has a backward hook, which may change "
                "the gradients that curvature is made of; remove it (handle.remove()) before the "
                "evidence is computed"
            )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The global random state set inside and restored afterwards; other threads wait.

    Args:
        seed: of the random numbers.
        device: of the model, whose generator is set besides that of the CPU.
    """
    devices = [device] if device.type == "cuda" else []
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=devices):
        seed_all(seed, device)
        yield


def seed_all(seed: int, device: torch.device) -> None:
    """Set the generators that a model on `device` may draw from.

    `torch.manual_seed` does more: it takes a millisecond to look for other devices.

    Args:
        seed: of the random numbers.
        device: of the model.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def fingerprint(x: Inputs, entries: int = 1000) -> Tensor:
    """A few entries of the inputs, by which they are recognised later.

    Args:
        x: inputs [n, ...].
        entries: about how many entries of each tensor, evenly spaced.
    """
    samples = []
    for t in tensors_of(x):
        step = max(1, t.numel() // entries)
        samples.append(t.detach().flatten()[::step].double())
    return torch.cat(samples)


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """One integer per tensor, which differs after any change of the tensor.

    It is sum_i r_i bits_i (mod 2^64) with random factors r_i. Versions of tensors would miss writes
    through `.data`; sums of integers, unlike norms, do not depend on the number of threads.

    Args:
        tensors: of any shapes and devices.
    """
    values = [t.detach().contiguous().flatten() for t in tensors]
    bits = [v.view(BITS[v.element_size()]) for v in values]
    hashes: dict[int, Tensor] = {}
    for numbers in _together([(b.numel(), (b.dtype, b.device)) for b in bits]):
        factors = _factors(bits[numbers[0]].device)
        if len(numbers) == 1:
            hashes[numbers[0]] = _hash(bits[numbers[0]], factors).cpu()
        else:
            several = _hashes([bits[i] for i in numbers], factors).cpu()
            hashes |= dict(zip(numbers, several, strict=True))
    return torch.stack([hashes[i] for i in range(len(bits))])


def _together(kinds: list[tuple[int, tuple]]) -> list[list[int]]:
    """Numbers of tensors that are hashed at once: of one kind, PIECE entries at most.

    Args:
        kinds: entries, and dtype and device, of every tensor.
    """
    groups: list[list[int]] = []
    room = 0
    for number, (size, kind) in enumerate(kinds):
        if not groups or size > room or not size or kind != kinds[groups[-1][0]][1]:
            groups.append([])
            room = PIECE if size else 0  # nothing joins an empty one
        groups[-1].append(number)
        room -= size
    return groups


@cache
def _factors(device: torch.device) -> Tensor:
    """The random factors, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):
        return torch.randint(-(2**62), 2**62, (PIECE,), generator=generator).to(device)


def _folded(bits: Tensor) -> Tensor:
    """Bits as 64-bit integers, the upper half of each folded onto the lower one.

    The sign is the highest bit, of which a product modulo 2^64 would keep the parity alone.
    """
    wide = bits.long()
    return wide ^ (wide >> 32)


def _hashes(bits: list[Tensor], factors: Tensor) -> Tensor:
    """The integers of several small tensors; each as `_hash` gives it."""
    products = _folded(torch.cat(bits)) * torch.cat([factors[: len(b)] for b in bits])
    ends = torch.tensor([len(b) for b in bits]).cumsum(0) - 1
    sums = products.cumsum(0)[ends.to(products.device)]  # modulo 2^64, as differences of them
    return torch.diff(sums, prepend=sums.new_zeros(1)) * factors[0]


def _hash(bits: Tensor, factors: Tensor) -> Tensor:
    """The integer of one tensor: a sum over pieces, each multiplied by another factor."""
    sums = []
    for piece in bits.split(PIECE):
        sums.append((_folded(piece) * factors[: len(piece)]).sum())
    numbers = torch.arange(len(sums), device=factors.device) % PIECE
    return (torch.stack(sums) * factors[numbers]).sum()


def check_weights(model: nn.Module) -> None:
    """Raise an error that names a parameter with NaN or infinity, if there is one.

    Args:
        model: the user's model.
    """
    parameters: list[Tensor] = [p.detach() for p in model.parameters() if p.is_floating_point()]
    if not parameters:
        return
    norms = [norm.double() for norm in torch._foreach_norm(parameters)]
    if torch.stack(norms).isfinite().all():  # one synchronisation for all parameters
        return
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise CurvatureError(
                f"parameter {name!r} contains NaN or infinity: training has diverged"
            )


def check_inputs(x: Inputs, offset: int = 0) -> None:
    """Raise an error that names a datum with NaN or infinity, if there is one.

    Args:
        x: inputs [n, ...].
        offset: number of the first of them in the data.
    """
    for tensor in tensors_of(x):
        if not tensor.is_floating_point():
            continue
        bad = (~tensor.flatten(1).isfinite().all(1)).nonzero()
        if len(bad):
            raise CurvatureError(
                f"input {int(bad[0]) + offset} contains NaN or infinity; remove or repair "
                "that datum"
            )


def finite(x: Inputs) -> Tensor:
    """Whether all entries are finite, as a tensor: no device synchronisation."""
    # the least and the largest entry tell, and take a fifth of the time of looking at each
    extremes = [torch.stack(t.detach().aminmax()) if t.numel() else t for t in tensors_of(x)]
    return torch.stack([t.isfinite().all() for t in extremes]).all()


def check_finite(
    inputs: list[Tensor], outputs: Tensor, model: nn.Module, batches: Callable[[], Iterable[Inputs]]
) -> None:
    """Raise an error that names the parameter or the datum behind NaN or infinity, if there is any.

    Args:
        inputs: whether the inputs are finite, as from `finite`.
        outputs: of the network [N, C].
        model: the user's model.
        batches: gives the inputs again, batch by batch; called only if there is something to name.
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
