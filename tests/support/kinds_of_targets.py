"""Classes as targets in every form: on any axis, ignored, soft, smoothed, weighted."""

import torch

from laplace_marglik import Categorical, NextToken

N, T, V = 4, 3, 5


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def indices(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, shape, generator=generator)


def some_ignored(y):
    y = y.clone()
    y.view(-1)[::3] = -100
    return y


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
# name -> likelihood, outputs, targets
CASES = {
    "single": (Categorical(), normal(N, V), indices(N)),
    "ignored data": (Categorical(), normal(N, V), some_ignored(indices(N))),
    "positions": (Categorical(), normal(N, V, T), some_ignored(indices(N, T))),
    "image": (Categorical(), normal(N, V, 2, 2), some_ignored(indices(N, 2, 2))),
    "last axis": (Categorical(class_axis=-1), normal(N, T, V), some_ignored(indices(N, T))),
    "last axis, single": (Categorical(class_axis=-1), normal(N, V), indices(N)),
    "as many positions as classes": (
        Categorical(class_axis=-1),
        normal(N, V, V),
        some_ignored(indices(N, V)),
    ),
    "smoothed": (Categorical(label_smoothing=0.2), normal(N, V), some_ignored(indices(N))),
    "weighted": (Categorical(class_weights=WEIGHTS), normal(N, V), indices(N)),
    "all at once": (
        Categorical(class_axis=-1, label_smoothing=0.1, class_weights=WEIGHTS),
        normal(N, T, V),
        some_ignored(indices(N, T)),
    ),
    "soft": (Categorical(), normal(N, V), normal(N, V, seed=2).softmax(1)),
    "soft, last axis": (
        Categorical(class_axis=-1, label_smoothing=0.1),
        normal(N, T, V),
        normal(N, T, V, seed=2).softmax(2),
    ),
    "next token": (NextToken(), normal(N, T, V), some_ignored(indices(N, T))),
}
