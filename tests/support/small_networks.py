"""Small networks, data and priors of the variational tests."""

import torch
from torch import nn

GROUPS = {"0.*": None, "2.*": 3.0}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = randn(12, 4), torch.arange(12) % 3


def mlp():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.4 * randn(*p.shape, seed=i))
    return model
