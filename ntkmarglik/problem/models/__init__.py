"""Networks by name: plain torch modules from images [n, c, h, w] to outputs [n, C].

Their names are known before torch is imported, which takes longer than to read a command line.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asdl_marglik.lazy import Later
from ntkmarglik.errors import NtkMarglikError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DEPTH", "MODELS", "Model", "build", "check_uses", "n_parameters"]

DEPTH = 18  # of a network whose depth is not set


@dataclass(frozen=True)
class Model:
    """A network by name: `make(input_shape, n_classes, ...)` with its sizes by keyword."""

    make: Callable[..., nn.Module]
    uses: tuple[str, ...] = ()  # of "depth" and "width"


MODELS: dict[str, Model] = {
    "mlp": Model(Later(f"{__name__}.mlp:mlp"), ("width",)),
    "cnn": Model(Later(f"{__name__}.lenet:cnn")),
    "mininet": Model(Later(f"{__name__}.lenet:mininet")),
    "resnet": Model(Later(f"{__name__}.resnet:resnet"), ("depth", "width")),
    "resnet50": Model(Later(f"{__name__}.resnet:resnet50"), ("width",)),
    "wrn": Model(Later(f"{__name__}.wrn:wrn"), ("width",)),
    "resnet_norm": Model(Later(f"{__name__}.resnet_norm:resnet_norm"), ("depth", "width")),
}


def model_named(name: str) -> Model:
    """The entry of this name, or an error that lists them."""
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.4)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise NtkMarglikError(f"Unknown model {name!r}. {hint}Known are {', '.join(MODELS)}.")


def check_uses(name: str, *, depth: int, width: int) -> None:
    """Refuse a size that is set although the network does not use it."""
    uses = model_named(name).uses
    for setting, value, default in (("depth", depth, DEPTH), ("width", width, 0)):
        if value != default and setting not in uses:
            users = [other for other, model in MODELS.items() if setting in model.uses]
            raise NtkMarglikError(
                f"--{setting} {value}, but the model {name} has no {setting} to choose; leave it "
                f"out, or use --model {' or '.join(users)}."
            )


def n_parameters(
    name: str, input_shape: tuple[int, int, int], n_classes: int, *, depth: int, width: int
) -> float:
    """Number of weights of a network that is not made; infinite beyond what can be counted."""
    import torch

    model = model_named(name)
    sizes = {"depth": depth, "width": width}
    try:
        with torch.device("meta"):
            network = model.make(input_shape, n_classes, **{use: sizes[use] for use in model.uses})
    except (RuntimeError, OverflowError):  # the size of a tensor is no 64-bit number
        return math.inf
    return sum(p.numel() for p in network.parameters())


def build(
    name: str,
    input_shape: tuple[int, int, int],
    n_classes: int,
    *,
    depth: int = DEPTH,
    width: int = 0,
    seed: int | torch.Generator = 0,
) -> nn.Module:
    """The network `name` of MODELS, drawn from `seed`; the global random state is left alone.

    Args:
        name: of the network.
        input_shape: channels, height and width of an image.
        n_classes: number of outputs.
        depth: of `resnet` and `resnet_norm`.
        width: hidden units (mlp), first-stage width (residual networks) or widening factor (wrn); 0
            for the published one.
        seed: a number, or a generator to draw it.
    """
    import torch

    model = model_named(name)
    if len(input_shape) != 3 or min(input_shape) < 1 or n_classes < 1:
        raise NtkMarglikError(
            "A model needs input_shape (channels, height, width) and n_classes, all at least 1, "
            f"but got {tuple(input_shape)} and {n_classes}."
        )
    if width < 0:
        raise NtkMarglikError(
            f"width must be positive, or 0 for the model's own default, but is {width}."
        )
    check_uses(name, depth=depth, width=width)
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    sizes = {"depth": depth, "width": width}
    # Modules draw their weights on the CPU from the global generator: lend it a state, then give
    # its own back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return model.make(input_shape, n_classes, **{use: sizes[use] for use in model.uses})
