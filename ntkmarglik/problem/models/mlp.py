"""A perceptron with one hidden layer."""

import math

from torch import nn


def mlp(input_shape: tuple[int, int, int], n_classes: int, width: int) -> nn.Module:
    """One hidden layer of `width` tanh units, 1000 if not set."""
    width = width or 1000
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), width),
        nn.Tanh(),
        nn.Linear(width, n_classes),
    )
