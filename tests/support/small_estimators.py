"""Estimators of networks that every shortcut applies to, and how they are compared."""

from dataclasses import fields

import torch
from torch import nn

from asdl_marglik import FastPaths
from laplace_marglik import GaussianPrior, MarginalLikelihood
from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.problem.models import build

SWITCHES = [f.name for f in fields(FastPaths)]
NONE = FastPaths(**dict.fromkeys(SWITCHES, False))
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
KINDS = [
    ("ntk", "expand"),
    ("full", "expand"),
    ("blockdiag", "expand"),
    ("kfac", "expand"),
    ("kfac", "reduce"),
    ("diag", "expand"),
]


class Net(nn.Module):
    """Strides, pooling, layers of few and of many positions, scalars, and a linear map."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            nn.Conv2d(3, 8, 3, stride=2),
        )
        self.scale, self.shift = (
            nn.Parameter(torch.tensor([1.2])),
            nn.Parameter(torch.tensor([0.1])),
        )
        self.third, self.last = nn.Conv2d(8, 5, 2), nn.Linear(20, 4)

    def forward(self, x):
        x = torch.relu(self.first(x)) * self.scale + self.shift
        x = torch.relu(self.third(torch.relu(self.second(x))))
        return self.last(
            nn.functional.max_pool2d(x, 2, stride=1, padding=1)[..., :2, :2].flatten(1)
        )


def estimator(structure, kfac, dtype, outputs=None, copies=0, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    augment = AffineAugmentation(copies, init=0.3).to(dtype) if copies else None
    return MarginalLikelihood(
        model,
        "classification",
        n_data=90,
        prior=GaussianPrior(model, precision=0.3),
        structure=structure,
        kfac=kfac,
        outputs=outputs,
        augment=augment,
        generator=torch.Generator().manual_seed(1),
        **options,
    )


def data(dtype, n=9):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, 1, 8, 8, generator=generator, dtype=dtype), torch.arange(n) % 4


def evaluated(ml, dtype):
    """Value and all gradients, in float64."""
    total = ml(*data(dtype)).total
    gradients = torch.autograd.grad(total, ml.hyperparameters())
    return [total.detach().double(), *[g.double() for g in gradients]]


def assert_same(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max())), (a, b)


def large(**options):
    """A small residual network: activations are smaller than the rows."""
    torch.manual_seed(0)
    model = build("resnet", (3, 16, 16), 10)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return MarginalLikelihood(
        model,
        "classification",
        n_data=1000,
        prior=GaussianPrior(model),
        outputs=1,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
