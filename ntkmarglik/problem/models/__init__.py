"""Networks by name: plain torch modules from images [n, c, h, w] to outputs [n, C]."""

import difflib
from collections.abc import Callable

import torch
from torch import nn

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.models.lenet import cnn, mininet
from ntkmarglik.problem.models.mlp import mlp
from ntkmarglik.problem.models.resnet import resnet, resnet50
from ntkmarglik.problem.models.resnet_norm import resnet_norm
from ntkmarglik.problem.models.wrn import wrn

__all__ = ["MODELS", "build"]

Builder = Callable[[tuple[int, int, int], int, int, int], nn.Module]

MODELS: dict[str, Builder] = {
    "mlp": mlp,
    "cnn": cnn,
    "mininet": mininet,
    "resnet": resnet,
    "resnet50": resnet50,
    "wrn": wrn,
    "resnet_norm": resnet_norm,
}


def build(
    name: str,
    input_shape: tuple[int, int, int],
    n_classes: int,
    *,
    depth: int = 18,
    width: int = 0,
    seed: int | torch.Generator = 0,
) -> nn.Module:
    """The network `name` (one of MODELS) with its weights drawn from `seed`; the global random
    state is left alone.

    input_shape: (c, h, w); depth: of `resnet` and `resnet_norm`; width: hidden units (mlp),
    first-stage width (residual networks) or widening factor (wrn), 0 for the published one; seed: a
    number, or a generator to draw it.
    """
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.4)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise NtkMarglikError(f"Unknown model {name!r}. {hint}Known are {', '.join(MODELS)}.")
    if len(input_shape) != 3 or min(input_shape) < 1 or n_classes < 1:
        raise NtkMarglikError(
            "A model needs input_shape (channels, height, width) and n_classes, all at least 1, "
            f"but got {tuple(input_shape)} and {n_classes}."
        )
    if width < 0:
        raise NtkMarglikError(
            f"width must be positive, or 0 for the model's own default, but is {width}."
        )
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    # Modules draw their weights on the CPU from the global generator: lend it a state, then give
    # its own back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return MODELS[name](input_shape, n_classes, depth, width)
