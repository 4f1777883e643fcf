"""Small float64 networks with data, one per way a parameter can enter a network.

`CASES` are categorical with C = 3 classes, n = 4 or 5, P < 1500, in eval mode;
`LIKELIHOOD_CASES` are one tanh MLP under the others. `case.make()` leaves the global RNG alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

C = 3


@dataclass(frozen=True)
class Case:
    """make() -> (model, x, y); `augmentable` when x is one float tensor."""

    name: str
    make: Callable[[], tuple]
    likelihood: str = "categorical"
    augmentable: bool = True

    def __str__(self):
        return self.name


def targets(kind, f, seed=0):
    """Deterministic targets of a likelihood kind for outputs f [n, C...]."""
    g = torch.Generator().manual_seed(seed)
    if kind == "categorical":
        return torch.randint(f.shape[1], (f.shape[0], *f.shape[2:]), generator=g)
    if kind == "gaussian":
        return f.detach() + 0.5 * torch.randn(f.shape, generator=g, dtype=f.dtype)
    if kind in ("bernoulli", "poisson"):
        return torch.randint({"bernoulli": 2, "poisson": 5}[kind], f.shape, generator=g).to(f)
    if kind == "heteroscedastic":  # first half means, second half log variances
        m = f.detach().chunk(2, dim=1)[0]
        return m + 0.5 * torch.randn(m.shape, generator=g, dtype=f.dtype)
    raise ValueError(f"unknown likelihood {kind!r}")


def seeded(build, kind="categorical", seed=0):
    """A `make` that runs build() -> (model, x) under a seed and adds noise to every parameter."""

    def make():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, x = build()
            model = model.double().eval()
            with torch.no_grad():  # so that no bias is 0 and no scale is 1
                for p in model.parameters():
                    p += 0.2 * torch.randn_like(p)
            return model, x, targets(kind, model(x), seed)

    return make


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def mlp(outputs=C):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)), randn(5, 4)


def mininet():
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(3, 4, 5, padding=1), nn.Flatten(), nn.ReLU(), nn.Linear(4, C)),
    )
    return model, randn(5, 1, 12, 12)


def conv_zoo():
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.Tanh()),
        *(nn.Conv2d(4, 4, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), nn.Tanh()),
        nn.Conv2d(4, 3, 3, padding="same", padding_mode="circular", bias=False),
        *(nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1), nn.Tanh()),
        *(nn.Flatten(2), nn.Conv1d(2, 4, 5, stride=3, padding=2, dilation=2), nn.Tanh()),
        nn.Conv1d(4, 4, 3, padding="same", groups=4),
        *(nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, C)),
    )
    return model, randn(4, 2, 8, 8)


def conv3d():
    model = nn.Sequential(
        *(nn.Conv3d(1, 3, 2, stride=2, padding=1, dilation=2), nn.Tanh()),
        *(nn.Conv3d(3, 2, (1, 2, 2)), nn.Flatten(), nn.Linear(4, C)),
    )
    return model, randn(4, 1, 4, 4, 4)


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.b


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.s


class FixupBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.b1, self.b2, self.b3, self.b4 = Bias(), Bias(), Bias(), Bias()
        self.scale = Scale()

    def forward(self, x):
        h = F.relu(self.b2(self.conv1(self.b1(x))))
        return F.relu(x + self.b4(self.scale(self.conv2(self.b3(h)))))


def fixup():
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), Bias(), nn.ReLU(), FixupBlock(4)),
        *(nn.AvgPool2d(2), FixupBlock(4), nn.AvgPool2d(3), nn.Flatten(), Bias(), nn.Linear(4, C)),
    )
    return model, randn(4, 2, 6, 6)


class Transformer(nn.Module):
    """Class token, learned positions, one encoder layer; tokens [n, T] or vectors [n, T, 4]."""

    def __init__(self, embed, batch_first=True, norm_first=False, length=4, d=8):
        super().__init__()
        self.batch_first = batch_first
        self.embed = embed
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.zeros(1, length + 1, d))
        self.layer = nn.TransformerEncoderLayer(
            d, 2, 12, dropout=0.0, activation="gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, C)

    def forward(self, x):
        h = self.embed(x)
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1) + self.pos
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.layer(h)
        h = self.norm(h if self.batch_first else h.transpose(0, 1))
        return self.head(h[:, 0] + h.mean(1))


def tokens(n=4, length=4, vocabulary=7):
    return torch.randint(vocabulary, (n, length))


def batchnorm():
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(36, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, C)),
    )
    for module in model:
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model, randn(5, 2, 5, 5)


def norm_net(norm):
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), norm, nn.SiLU(), nn.Conv2d(4, 2, 2), nn.Tanh(), nn.Flatten()),
        nn.Linear(8, C),
    )
    return model, randn(4, 2, 5, 5)


class Raw(nn.Module):
    """Parameters used directly: einsum, outer product, exponential, and one not used at all."""

    def __init__(self):
        super().__init__()
        self.core = nn.Parameter(0.3 * torch.randn(4, 4, 5))
        self.left = nn.Parameter(torch.randn(5))
        self.right = nn.Parameter(torch.randn(C))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.unused = nn.Parameter(torch.ones(2))
        self.linear = nn.Linear(5, C)

    def forward(self, x):
        h = torch.tanh(torch.einsum("ni,ijk,nj->nk", x, self.core, x))
        return h @ torch.outer(self.left, self.right) * self.log_scale.exp() + self.linear(h)


class TiedEmbedding(nn.Module):
    """The output Linear shares its weight with the embedding, as in language models."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(C, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, C)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.embed(x).sum(1))))


class Repeated(nn.Module):
    """One Linear called three times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.loop = nn.Linear(5, 5)
        self.head = nn.Linear(5, C)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for _ in range(3):
            h = torch.tanh(self.loop(h))
        return self.head(h)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.vector = nn.Linear(4, 5)
        self.sequence = nn.Linear(3, 5)
        self.head = nn.Linear(5, C)

    def forward(self, x):
        h = self.vector(x["vector"]) + torch.tanh(self.sequence(x["sequence"])).mean(1)
        return self.head(torch.tanh(h))


def frozen():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, C))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model, randn(5, 4)


def segmentation():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, C, 2))
    return model, randn(4, 2, 3, 4)  # outputs [4, 3, 2, 3]


def inplace():
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Flatten()),
        *(nn.Linear(16, 6), nn.ReLU(inplace=True), nn.Linear(6, C)),
    )
    return model, randn(5, 2, 4, 4)


class Recurrent(nn.Module):
    """Batch and time flattened into [n*T, D] for the input layer, then a recurrence over time."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(3, 5)
        self.state = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, C)

    def forward(self, x):
        n, t, d = x.shape
        u = self.inputs(x.reshape(n * t, d)).reshape(n, t, -1)
        h = torch.zeros_like(u[:, 0])
        for step in range(t):
            h = torch.tanh(u[:, step] + self.state(h))
        return self.head(h)


class SumAndProduct(nn.Module):
    """Linear maps as GPT-2 has them: bias + a W over batch and time flattened together."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5))
        self.map = nn.Parameter(0.5 * torch.randn(3, 5))
        self.head_shift = nn.Parameter(torch.zeros(C))
        self.head = nn.Parameter(0.5 * torch.randn(5, C))

    def forward(self, x):
        h = torch.addmm(self.shift, x.reshape(-1, x.shape[-1]), self.map)
        h = torch.tanh(h).reshape(*x.shape[:-1], -1).mean(1)
        return torch.addmm(self.head_shift, h, self.head)


class Positions(nn.Module):
    """A positional embedding called on arange: its output has no batch axis.

    Autograd holds the row `padding_idx` of the token embedding constant; so must any rule.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5, padding_idx=0)
        self.position = nn.Embedding(4, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, C)

    def forward(self, x):
        h = self.embed(x) + self.mix(self.position(torch.arange(x.shape[1], device=x.device)))
        return self.head(torch.tanh(h).mean(1))


class PositionNumbers(Positions):
    """The same for positions [1, T], as transformers have them: outputs [1, T, D] for all data."""

    def forward(self, x):
        numbers = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        h = self.embed(x) + self.mix(self.position(numbers))
        return self.head(torch.tanh(h).mean(1))


_FLOAT = {
    **{f.__name__: f for f in (mlp, mininet, conv_zoo, conv3d, fixup, batchnorm)},
    **{f.__name__: f for f in (frozen, segmentation, inplace)},
    "gelu": lambda: (nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, C)), randn(5, 4)),
    # float inputs through LayerNorm: where torch.func's second derivatives are wrong
    "vit": lambda: (Transformer(nn.Linear(4, 8)), randn(4, 4, 4)),
    "groupnorm": lambda: norm_net(nn.GroupNorm(2, 4)),
    "instancenorm": lambda: norm_net(nn.InstanceNorm2d(4, affine=True)),
    "raw": lambda: (Raw(), randn(5, 4)),
    "repeated": lambda: (Repeated(), randn(5, 4)),
    "recurrent": lambda: (Recurrent(), randn(4, 3, 3)),
    "addmm": lambda: (SumAndProduct(), randn(4, 3, 3)),
}
_OTHER = {
    "transformer": lambda: (Transformer(nn.Embedding(7, 8)), tokens()),
    "transformer_time_first": lambda: (Transformer(nn.Embedding(7, 8), False, True), tokens()),
    "tied_embedding": lambda: (TiedEmbedding(), tokens(5, 4, C)),
    "positions": lambda: (Positions(), tokens()),
    "position_numbers": lambda: (PositionNumbers(), tokens()),
    "dict_input": lambda: (TwoInputs(), {"vector": randn(5, 4), "sequence": randn(5, 2, 3)}),
}
CASES = [
    *(Case(name, seeded(build)) for name, build in _FLOAT.items()),
    *(Case(name, seeded(build), augmentable=False) for name, build in _OTHER.items()),
]
LIKELIHOOD_CASES = [
    Case(f"mlp-{kind}", seeded(lambda c=c: mlp(c), kind), kind)
    for kind, c in (("gaussian", 3), ("bernoulli", 3), ("poisson", 3), ("heteroscedastic", 4))
]


class Shift(nn.Module):
    """Deterministic augmentation x [n, ...] -> [n, A, ...], smooth in its parameters eta [dim].

    Sample a is x * (1 + t_a eta_0) + sum_{k>=1} s_ak eta_k sin(k j) with j the index of an entry
    of the data point and fixed constants t, s.
    """

    def __init__(self, samples=3, dim=2):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.eta = nn.Parameter(torch.linspace(0.3, 0.5, dim, dtype=torch.float64))
        constants = 2 * torch.rand(samples, dim, generator=g, dtype=torch.float64) - 1
        self.register_buffer("constants", constants)

    def forward(self, x):
        c = (self.constants * self.eta).to(x.dtype)  # [A, dim]
        j = torch.arange(x[0].numel(), device=x.device)
        k = torch.arange(1, c.shape[1], device=x.device)
        shift = c[:, 1:] @ torch.sin(k[:, None] * j).to(x.dtype)  # [A, entries]
        flat = x.reshape(len(x), 1, -1) * (1 + c[:, :1]) + shift
        return flat.reshape(len(x), len(c), *x.shape[1:])


class Jitter(nn.Module):
    """A random augmentation; `draw` says where its random numbers come from."""

    def __init__(self, draw=lambda *shape: torch.randn(*shape, dtype=torch.float64)):
        super().__init__()
        self.size, self.draw = nn.Parameter(torch.tensor(0.3).double()), draw

    def forward(self, x):
        return x.unsqueeze(1) + self.size * self.draw(len(x), 2, *x.shape[1:])
