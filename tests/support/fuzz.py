"""Random small float64 networks and problems: `draw(seed)` is the same `FuzzCase` every time.

A network is a chain of pieces (`fuzz_pieces`), activations between them, and a head; where the kind
of an activation is not what the next piece takes, a reshape or a pooling is put between them. Every
seed features one piece (its number modulo theirs), the rest is random, so that any range of
`len(PIECES)` seeds has all of them.
"""

import random
from contextlib import suppress
from dataclasses import dataclass

import torch
from cases import Shift, targets
from fuzz_pieces import (
    ACTIVATIONS,
    HEADS,
    IMAGE,
    PIECES,
    PIECEWISE,
    PIECEWISE_ACTIVATIONS,
    PIECEWISE_GATES,
    SEQUENCE,
    TOKENS,
    VECTOR,
    VOCABULARY,
    VOLUME,
    Op,
)
from torch import nn

import asdl_marglik
from laplace_marglik import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPrior,
    HeteroscedasticGaussian,
    MarginalLikelihood,
    Poisson,
)

LIKELIHOODS = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}
STRUCTURES = tuple(asdl_marglik.STRUCTURES)
ROOTS = ("paper", "fisher", "symmetric", "eigen")
PRIORS = {
    "scalar": "scalar",
    "layerwise": "layerwise",
    "diagonal": "diagonal",
    "groups": {"*weight*": "a", "*": "b"},
}
MAX_PARAMETERS = 300
# of all draws; with this one, seeds below 150 show every error that was found when there were some
SALT = "j"


class Network(nn.Module):
    """A chain with a constant factor that keeps outputs where no likelihood saturates."""

    def __init__(self, modules):
        super().__init__()
        self.chain = nn.Sequential(*modules)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.chain(x) * self.scale


def start_shape(r, kind):
    """The shape of one input, or of a vector that is made more of."""
    return {
        TOKENS: (r.randint(2, 4),),
        VECTOR: (r.randint(2, 5),),
        SEQUENCE: (r.randint(2, 4), r.randint(2, 4)),
        IMAGE: (r.randint(1, 2), r.randint(3, 4), 3),
        VOLUME: (r.randint(1, 2), 2, 3, 2),
    }[kind]


def random_inputs(n, kind, shape):
    return (
        torch.randint(VOCABULARY, (n, *shape))
        if kind == TOKENS
        else torch.randn(n, *shape, dtype=torch.float64)
    )


def adaptor(r, shape, kind):
    """A module from inputs [n, *shape] to `kind`; with weights only where a vector must grow."""
    have = len(shape)
    if have == VECTOR:
        larger = start_shape(r, kind)
        return nn.Sequential(
            nn.Linear(shape[0], torch.Size(larger).numel()), nn.Unflatten(1, larger)
        )
    if have < kind:
        return nn.Unflatten(1, (*[1] * (kind - have), shape[0]))
    if kind == IMAGE:
        return nn.Flatten(2, 3)
    if kind == SEQUENCE:
        return Op(lambda m, x: x.flatten(2).mT)
    pools = [lambda m, x: x.flatten(2).mean(2), lambda m, x: x.flatten(2).amax(2)]
    return nn.Flatten() if shape.numel() <= 8 else Op(r.choice(pools))


class Chain:
    """A network under construction: its modules, their names, and an example of activations."""

    def __init__(self, r, kind, piecewise):
        self.r, self.shape = r, start_shape(r, kind)
        self.example = random_inputs(2, kind, self.shape)
        self.modules, self.names = [], []
        self.activations = PIECEWISE_ACTIVATIONS if piecewise else list(ACTIVATIONS)

    def add(self, module, name=None):
        self.modules.append(module.double().eval())
        self.names += [name] if name else []
        self.example = module(self.example.clone())  # some pieces work in place

    def become(self, *kinds):
        """One of these kinds of activation; of the input, it is known already."""
        if self.modules and self.example.dim() - 1 not in kinds:
            self.add(adaptor(self.r, self.example.shape[1:], self.r.choice(kinds)))

    def add_piece(self, name):
        self.become(*PIECES[name].kinds)
        self.add(PIECES[name].make(self.r, self.example.shape[1:]), name)
        if self.r.random() < 0.7:
            activation = self.r.choice(self.activations)
            self.add(ACTIVATIONS[activation](), activation)

    def add_head(self, head, outputs, likelihood):
        """Outputs [n, C], or at two positions [n, C, 2], or [n, 2, C] without a class axis."""
        several = (
            likelihood != "heteroscedastic" and self.example.dim() > 2 and self.r.random() < 0.4
        )
        self.become(SEQUENCE if several else VECTOR)
        if several:
            self.add(Op(lambda m, x: x[:, :2]))
        self.add(HEADS[head](self.example.shape[-1], outputs), f"head {head}")
        if several and (likelihood == "categorical" or self.r.random() < 0.5):
            self.add(Op(lambda m, x: x.mT))


def random_pieces(r, featured, piecewise, attempt):
    """The featured piece among others; fewer of them after failed attempts."""
    if PIECES[featured].alone:
        return [featured]
    others = (
        PIECEWISE
        if piecewise
        else [name for name, p in PIECES.items() if not p.first and not p.alone]
    )
    names = r.sample(others, r.randint(0, max(1, 3 - attempt // 3)))
    names.insert(0 if PIECES[featured].first or piecewise else r.randint(0, len(names)), featured)
    if r.random() < 0.15 and not piecewise and not PIECES[featured].first:
        names.insert(0, r.choice([name for name, p in PIECES.items() if p.first]))
    return names


def random_chain(r, featured, likelihood, piecewise, attempt):
    names = random_pieces(r, featured, piecewise, attempt)
    # gates, so that all of them may saturate
    few = featured in PIECEWISE_GATES and r.random() < 0.7
    kind = VECTOR if few else r.choice(PIECES[names[0]].kinds)
    chain = Chain(r, kind, piecewise)
    for name in names:
        chain.add_piece(name)
    outputs = {"categorical": r.randint(2, 4), "heteroscedastic": r.choice([2, 4])}.get(
        likelihood, r.randint(1, 4)
    )
    heads = list(HEADS)[:3] if piecewise else list(HEADS)
    chain.add_head("fixed" if PIECES[featured].alone else r.choice(heads), outputs, likelihood)
    return chain, kind


@dataclass
class FuzzCase:
    """A network with data, and all the choices of an evidence problem."""

    seed: int
    pieces: list
    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    # the first two data points, on which the library plans, are much larger than the others
    saturated: bool
    likelihood: str
    temperature: float
    learn_temperature: bool
    structure: str
    root: str
    columns: torch.Tensor | None
    prior: str
    copies: int | None  # of each datum, by the augmentation
    hyper: list
    n_data: int
    chunk: int | None
    kfac: str
    blocks: str

    @property
    def cotangents_follow_outputs(self):
        """Whether rows are some columns of a true root of a full Hessian."""
        return (
            self.columns is not None and self.root != "paper" and self.likelihood == "categorical"
        )

    def marginal_likelihood(self):
        """The library's object for this case, and with it all hyperparameters."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.seed)
            weights = {
                k: p
                for k, p in self.model.named_parameters()
                if p.requires_grad and k not in self.hyper
            }
            mean = {name: 0.1 * torch.randn_like(w) for name, w in weights.items()}
            prior = GaussianPrior(self.model, PRIORS[self.prior], mean=mean, hyper=self.hyper)
            prior.log_precision.normal_(0.3, 0.5)
            augment = None if self.copies is None else Shift(self.copies)
            if augment is not None:
                augment.eta.normal_(0, 0.3)
        noise = {"sigma": 0.6} if self.likelihood == "gaussian" else {}
        likelihood = LIKELIHOODS[self.likelihood](
            temperature=self.temperature, learn_temperature=self.learn_temperature, **noise
        )
        options = {
            name: getattr(self, name)
            for name in ("structure", "root", "hyper", "chunk", "kfac", "blocks")
        }
        return MarginalLikelihood(
            self.model, likelihood, n_data=self.n_data, prior=prior, augment=augment, **options
        )

    def __str__(self):
        facts = {
            k: v for k, v in vars(self).items() if k not in ("model", "x", "y", "seed", "pieces")
        }
        facts |= {k: v.tolist() for k, v in facts.items() if isinstance(v, torch.Tensor)}
        facts["frozen"] = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        facts |= {"x": tuple(self.x.shape), "y": tuple(self.y.shape)}
        named = ", ".join(f"{k}={v}" for k, v in facts.items())
        return f"seed {self.seed}: {' > '.join(self.pieces)}\n  {named}"


def draw(seed):
    """The case of a seed; draws anew what is too large or what torch itself refuses."""
    for attempt in range(100):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * seed + attempt)
            # a norm of one value, a pooling wider than its input, an activation in place of what a
            # derivative needs
            with suppress(ValueError, RuntimeError):
                case = _draw(random.Random(f"{SALT}.{seed}.{attempt}"), seed, attempt)
                if case is not None:
                    return case
    raise ValueError(f"no network could be drawn for seed {seed}")


def _draw(r, seed, attempt):
    likelihood = r.choice([*LIKELIHOODS, *["categorical"] * 4])
    featured = list(PIECES)[seed % len(PIECES)]
    alone, gated = PIECES[featured].alone, featured in PIECEWISE_GATES
    piecewise = gated or (featured in PIECEWISE and r.random() < 0.5)
    chain, kind = random_chain(r, featured, likelihood, piecewise, attempt)
    model = Network(chain.modules).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)  # no bias is 0 and no scale is 1
    n, saturated = (
        r.randint(3 if piecewise else 1, 6),
        kind != TOKENS and r.random() < (0.8 if piecewise else 0.3),
    )
    x = random_inputs(n, kind, chain.shape)
    if saturated:
        x[:2] *= 20 if gated else 10
    f = model(x.clone()).detach()
    if not _usable(model, x, f):
        return None
    model.scale.fill_(2 / float(f.abs().max()))
    weights = [name for name, p in model.named_parameters() if p.requires_grad]
    if len(weights) > 2 and r.random() < 0.25:
        model.get_parameter(weights.pop(r.randrange(len(weights)))).requires_grad_(False)
    y = targets(likelihood, f * model.scale, seed)
    return FuzzCase(
        *(seed, chain.names, model, x, y, saturated, likelihood),
        temperature=r.choice([1.0, 0.7, 1.4]),
        learn_temperature=r.random() < 0.5,
        structure=r.choice(STRUCTURES),
        root="paper" if piecewise else r.choice(ROOTS),
        columns=random_columns(r, n, f[0].numel()),
        prior=r.choice(list(PRIORS)),
        copies=r.randint(1, 3)
        if kind != TOKENS and r.random() < (0.9 if piecewise else 0.5)
        else None,
        hyper=[r.choice(weights)]
        if len(weights) > 1 and r.random() < (0.2 if piecewise else 0.4)
        else [],
        n_data=n * r.choice([1, 1, 3]) + r.choice([0, 1]),
        chunk=None if alone else r.choice([None, 1, 2, 3]),
        kfac=r.choice(["expand", "reduce"]),
        blocks=r.choice(["module", "tensor"]),
    )


def _usable(model, x, f):
    """Whether a case is small, not zero, and torch can run and differentiate a datum alone."""
    weights = [p for p in model.parameters() if p.requires_grad]
    small = sum(p.numel() for p in model.parameters()) <= MAX_PARAMETERS and f.numel() <= 30
    if not weights or not small or not f.isfinite().all() or f.abs().max() < 1e-2:
        return False
    model(x[:1].clone())  # both raise an error where torch cannot
    torch.autograd.grad(model(x.clone()).sum(), weights, allow_unused=True)
    return True


def random_columns(r, n, outputs):
    """Fewer than all root columns, for the block [K] or for each datum [n, K]; None for all."""
    if outputs == 1 or r.random() < 0.35:
        return None
    k = r.randint(1, outputs - 1)
    drawn = [r.sample(range(outputs), k) for _ in range(n)]
    return torch.tensor(drawn if r.random() < 0.5 else drawn[0])
