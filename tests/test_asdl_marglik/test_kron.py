"""Kronecker-factored curvature: exact where theory says so, naive recomputation elsewhere.

Values of ordinary Linear and Conv layers in the "expand" setting are covered by test_structure.
"""

import pytest
import reference
import torch
from cases import CASES, C, Shift
from marginal_likelihoods import X, Y, by_name, close, expected, setup
from small_networks import mlp, randn
from torch import nn
from torch.nn import functional as F

import asdl_marglik.curvature.cover
from asdl_marglik import STRUCTURES, naive
from laplace_marglik import Gaussian, GaussianPrior, MarginalLikelihood

SETTINGS = ["expand", "reduce"]


def seeded(model, seed=0):
    """The model in float64 with all its parameters drawn anew."""
    with torch.no_grad():
        for i, p in enumerate(model.double().parameters()):
            p.copy_(0.5 * randn(*p.shape, seed=100 * seed + i))
    return model


def marglik(model, likelihood, n, structure="kfac", *, prior="layerwise", **options):
    prior = GaussianPrior(model, prior)
    with torch.no_grad():
        prior.log_precision.copy_(0.5 * randn(len(prior.log_precision), seed=9))
    return MarginalLikelihood(
        model, likelihood, n_data=n, prior=prior, structure=structure, blocks="tensor", **options
    )


def assert_equals_exact_blocks(model, likelihood, x, y, setting):
    """KFAC is the exact block of every parameter tensor."""
    values = [
        marglik(model, likelihood, len(y), structure, kfac=setting)(x, y).total.detach()
        for structure in ("kfac", "blockdiag")
    ]
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------ exact regimes


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(2, 3))],
    ids=["one", "deep"],
)
def test_exact_for_linear_networks_with_gaussian_noise(model, setting):
    assert_equals_exact_blocks(seeded(model), Gaussian(0.6), randn(6, 4), randn(6, 3), setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_exact_for_a_single_datum_without_weight_sharing(setting):
    model = seeded(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    assert_equals_exact_blocks(model, "classification", randn(1, 4), torch.tensor([2]), setting)


def test_expand_is_exact_when_every_position_has_its_own_loss():
    model = seeded(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    assert_equals_exact_blocks(model, Gaussian(0.6), randn(5, 2, 4), randn(5, 2, 3), "expand")


def test_reduce_is_exact_when_positions_are_averaged_before_the_loss():
    model = seeded(
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    )
    assert_equals_exact_blocks(model, Gaussian(0.6), randn(5, 2, 4, 4), randn(5, 2), "reduce")
    values = [
        marglik(model, Gaussian(), 5, kfac=s)(randn(5, 2, 4, 4), randn(5, 2)).total.item()
        for s in SETTINGS
    ]
    assert abs(values[0] - values[1]) > 1e-2  # and expand is not


def test_expand_equals_reduce_without_weight_sharing():
    model = seeded(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y = randn(6, 4), torch.arange(6) % 3
    values = [marglik(model, "classification", 6, kfac=s)(x, y).total.detach() for s in SETTINGS]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


# ---------------------------------------------------------------------- against naive recomputation


@pytest.mark.parametrize(
    "name", ["mlp", "mininet", "segmentation", "repeated", "recurrent", "batchnorm", "dict_input"]
)
@pytest.mark.parametrize("columns", [[1], None])
def test_reduce_against_the_reference(name, columns):
    case = by_name[name]
    columns = None if columns is None else torch.tensor(columns)
    for augment in (None, Shift(3)) if case.augmentable else (None,):
        ml, x, y = setup(case, "kfac", kfac="reduce", augment=augment)
        close(ml(x, y, columns).total, expected(ml, case, x, y, columns, sharing="reduce").total)


class CalledTwice(nn.Module):
    """One Linear, used on a vector and on a sequence: positions of all calls count alike."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, C)

    def forward(self, x):
        h = torch.tanh(self.shared(x))
        return self.head(torch.tanh(self.shared(h.mean(1))))


@pytest.mark.parametrize("setting", SETTINGS)
def test_weights_called_several_times(setting):
    model, x, y = seeded(CalledTwice()), randn(5, 3, 4), torch.arange(5) % C
    ml = marglik(model, "classification", 5, kfac=setting)
    assert ml.describe(x).count("kronecker") == 4
    assert_reference_value(ml, model, x, y, setting)


def assert_reference_value(ml, model, x, y, setting, dense=()):
    """The evidence of `ml` (whose weights may have other names) is the reference's for `model`."""
    deltas = [
        ml.prior.log_precision.detach()[ml.prior.groups[n]].exp().expand(w.numel())
        for n, w in ml.weights.items()
    ]
    likelihood = reference.Likelihood("categorical")
    want = reference.evidence(
        model, x, y, likelihood, torch.cat(deltas), structure="kfac", sharing=setting, dense=dense
    )
    torch.testing.assert_close(ml(x, y).total.detach(), want.total.detach(), rtol=1e-9, atol=1e-9)


class Attention(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.head = nn.Linear(6, C)

    def forward(self, x):
        x = x if self.attention.batch_first else x.transpose(0, 1)
        h = self.attention(x, x, x, need_weights=False)[0]
        return self.head(torch.tanh(h if self.attention.batch_first else h.transpose(0, 1)).mean(1))


class ExplicitAttention(nn.Module):
    """The same network written with Linear layers, which the reference can record."""

    def __init__(self, other):
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, C)
        with torch.no_grad():
            for own, theirs in zip(self.double().parameters(), other.parameters(), strict=True):
                own.copy_(theirs)

    def forward(self, x):
        # [n, heads, T, 3]
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        h = (q @ k.mT / 3**0.5).softmax(-1) @ v
        return self.head(torch.tanh(self.out(h.transpose(1, 2).flatten(2))).mean(1))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_projections_are_factorised_like_linear_layers(batch_first, setting):
    model, x, y = seeded(Attention(batch_first)), randn(5, 4, 6), torch.arange(5) % C
    explicit = ExplicitAttention(model)
    torch.testing.assert_close(explicit(x), model(x))
    ml = marglik(model, "classification", 5, kfac=setting)
    table = {line.split()[0]: line for line in ml.describe(x).splitlines()}
    assert all(
        "kronecker" in table[f"attention.{name}"] for name in ("in_proj_weight", "out_proj.weight")
    )
    assert_reference_value(ml, explicit, x, y, setting)


def grouped_kfac(model, x, delta, setting):
    """log-det of conv (2 groups), tanh, mean, linear with Gaussian likelihood: every group has its
    own A (x) B.
    """
    conv, head = model[0], model[-1]
    patches = F.unfold(x, conv.kernel_size, padding=1).mT  # [n, T, channels * 9], channels slowest
    z = conv(x)
    h = torch.tanh(z).mean((2, 3))
    f = head(h)
    g = torch.stack(
        [torch.autograd.grad(f[:, c].sum(), z, retain_graph=True)[0] for c in range(f.shape[1])], 1
    )
    g = g.flatten(3).mT  # [n, C, T, channels]
    if setting == "reduce":
        patches, g = patches.mean(1, keepdim=True), g.sum(2, keepdim=True)
    (n, t), total = patches.shape[:2], 0.0
    for group in range(conv.groups):
        a = patches.chunk(conv.groups, 2)[group]
        b = g.chunk(conv.groups, 3)[group]
        A, B = torch.einsum("ntd,nte->de", a, a) / (n * t), torch.einsum("nctd,ncte->de", b, b)
        total += naive.log_det(torch.kron(B, A), delta[0].expand(len(A) * len(B)))
    total += naive.log_det(torch.einsum("nctd,ncte->de", g, g), delta[1].expand(g.shape[3]))
    A, B = h.mT @ h / n, n * torch.eye(f.shape[1]).to(h)
    total += naive.log_det(torch.kron(B, A), delta[2].expand(len(A) * len(B)))
    return total + naive.log_det(B, delta[3].expand(len(B)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_groups_of_a_convolution_are_separate_blocks(setting):
    conv = nn.Conv2d(4, 6, 3, padding=1, groups=2)
    model = seeded(
        nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    )
    x = randn(5, 4, 3, 3)
    ml = marglik(model, Gaussian(), 5, kfac=setting)
    want = grouped_kfac(model, x, ml.prior.precision.detach(), setting)
    torch.testing.assert_close(ml(x, randn(5, 2)).log_det_ratio.detach(), want.detach())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", [c for c in CASES if c.augmentable], ids=str)
def test_equal_copies_count_as_one(case, setting):
    augment = Shift(3)
    with torch.no_grad():
        augment.eta.zero_()
    (plain, x, y), (copied, _, _) = (
        setup(case, "kfac", kfac=setting, augment=a) for a in (None, augment)
    )
    for columns in (torch.tensor([1]), None):
        close(copied(x, y, columns).log_det_ratio, plain(x, y, columns).log_det_ratio)


# ---------------------------------------------------------------- parameters without Kronecker form


@pytest.mark.parametrize("name", ["fixup", "batchnorm", "raw", "positions", "tied_embedding"])
@pytest.mark.parametrize("exact", [True, False])
def test_other_parameters_get_their_exact_or_diagonal_block(name, exact, monkeypatch):
    if not exact:
        monkeypatch.setattr(asdl_marglik.curvature.cover, "EXACT_BLOCK", 0)
    case = by_name[name]
    ml, x, y = setup(case, "kfac")
    table = {line.split()[0]: line for line in ml.describe(x).splitlines()[1:-1]}
    others = [weight for weight, line in table.items() if "kronecker" not in line]
    assert others
    assert all(
        any(word in table[o] for word in (["dense", "kernel"] if exact else ["diagonal"]))
        for o in others
    )
    got = ml(x, y).log_det_ratio / ml(x, y).n_blocks
    factors = reference.kfac(
        ml.model,
        x,
        reference.cotangents(reference.Likelihood("categorical"), ml.model(x)),
        list(ml.weights),
        dense=others,
    )
    if not exact:
        factors |= {o: (torch.diag(factors[o][0].diagonal()),) for o in others}
    deltas = [ml.prior.precision[i].expand(w.numel()) for i, w in enumerate(ml.weights.values())]
    close(got, reference.kfac_log_det(factors, torch.cat(deltas)))


# ------------------------------------------------------------------------- diagonal prior and noise


class RightProduct(nn.Module):
    """x W with a raw parameter: the same map as a Linear whose weight is W^T."""

    def __init__(self, d, o):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d, o))

    def forward(self, x):
        return x @ self.weight


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(2)), (4, 2, 3, 3)),
    "product": (lambda: RightProduct(4, 3), (5, 4)),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(2)), (4, 2, 3, 3)),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layer", LAYERS)
def test_diagonal_prior_is_exact_for_row_and_column_effects(layer, setting):
    """One precision per element, whose log is (effect of the output) + (effect of the input), as a
    dense product.
    """
    build, shape = LAYERS[layer]
    model, x = seeded(build()), randn(*shape)
    y = randn(*model(x).shape)
    ml = marglik(model, Gaussian(), len(x), prior="diagonal", kfac=setting)
    want = 0.0
    for name, w in ml.weights.items():
        rows, columns = randn(len(w), 1, seed=3), randn(1, w[0].numel(), seed=4) * (w.dim() > 1)
        with torch.no_grad():
            ml.prior.log_precision[ml.prior.groups[name]] = (rows + columns).flatten()
        want += naive.log_det(factored(model, name, x, setting), (rows + columns).exp().flatten())
    torch.testing.assert_close(ml(x, y).log_det_ratio.detach(), want)


def factored(model, name, x, setting):
    """The KFAC block [P, P] of a layer's weight in its own memory order, for f = layer(x) with unit
    noise.
    """
    weight = dict(model.named_parameters())[name]
    if weight.dim() <= 2:
        n, o = len(x), model(x).shape[1] if weight.dim() == 2 else len(weight)
        t = model(x)[0].numel() // o
        if weight.dim() == 1:
            # one unit cotangent per position, at expand and reduce alike
            return n * t * torch.eye(o).double()
        A, B = x.mT @ x / n, n * torch.eye(o).double()
        return torch.kron(A, B) if isinstance(model, RightProduct) else torch.kron(B, A)
    conv = model[0]
    patches = F.unfold(x, conv.kernel_size).mT
    n, t = patches.shape[:2]
    patches = patches.mean(1, keepdim=True) if setting == "reduce" else patches
    blocks = []
    for a in patches.chunk(conv.groups, 2):
        A = torch.einsum("ntd,nte->de", a, a) / (n * patches.shape[1])
        blocks.append(torch.kron(n * t * torch.eye(len(weight) // conv.groups).double(), A))
    return torch.block_diag(*blocks)


def test_the_log_determinant_depends_on_the_noise():
    model, likelihood = seeded(nn.Linear(4, 3)), Gaussian(0.6)
    evidence = marglik(model, likelihood, 6)(randn(6, 4), randn(6, 3))
    (gradient,) = torch.autograd.grad(evidence.log_det_ratio, likelihood.log_sigma)
    full = marglik(model, likelihood, 6, "blockdiag")(randn(6, 4), randn(6, 3))
    (want,) = torch.autograd.grad(full.log_det_ratio, likelihood.log_sigma)
    assert want < -1
    torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("prior", ["layerwise", "diagonal"])
def test_sums_and_products_are_factorised_like_linear_layers(prior, setting):
    """The maps of GPT-2 have their weights transposed; everything else is the same."""
    product, x, y = by_name["addmm"].make()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.head = nn.Linear(3, 5), nn.Linear(5, C)

        def forward(self, x):
            return self.head(torch.tanh(self.map(x)).mean(1))

    linear = Plain().double()
    names = {"map.weight": "map", "map.bias": "shift"}
    names |= {"head.weight": "head", "head.bias": "head_shift"}
    values = []
    with torch.no_grad():
        for name, p in linear.named_parameters():
            own = product.get_parameter(names[name])
            p.copy_(own.mT if own.dim() == 2 else own)
    for model, order in ((linear, {}), (product, {v: k for k, v in names.items()})):
        own = GaussianPrior(model, prior)
        with torch.no_grad():
            for i, (name, w) in enumerate(
                sorted(model.named_parameters(), key=lambda e: order.get(e[0], e[0]))
            ):
                theta = randn(w.numel() if prior == "diagonal" else 1, seed=i)
                if prior == "diagonal" and w.dim() == 2 and order:
                    theta = theta.reshape(w.shape[::-1]).mT.reshape(-1)
                own.log_precision[own.groups[name]] = theta.squeeze()
        ml = MarginalLikelihood(
            model, "classification", n_data=len(y), prior=own, structure="kfac", kfac=setting
        )
        values.append(ml(x, y).total.detach())
        assert all(rule in ("linear", "matmul") for rule in ml._plan.rules.values())
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)


@pytest.mark.quick
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_precision_per_weight_is_exact_in_kfac_where_sides_are_small(structure, monkeypatch):
    """B (x) A as it is; projected on row and column effects the determinant comes out smaller."""
    values = []
    for side in (512, 0):
        monkeypatch.setattr("asdl_marglik.curvature.kron.EXACT_SIDE", side)
        model = mlp()
        prior = GaussianPrior(model, "diagonal")
        with torch.no_grad():
            prior.log_precision.copy_(2 * randn(len(prior.log_precision), seed=3))
        ml = MarginalLikelihood(model, "classification", n_data=6, prior=prior, structure=structure)
        values.append(ml(X, Y).log_det_ratio)
    if structure != "kfac":
        assert values[0] == values[1]
        return
    assert values[1] < 0.999 * values[0]
    assert ml(X, Y).status == "approximation"


@pytest.mark.quick
def test_the_exact_kronecker_determinant_is_that_of_the_dense_product():
    model = nn.Linear(4, 3).double()
    prior = GaussianPrior(model, "diagonal")
    with torch.no_grad():
        prior.log_precision.copy_(randn(15, seed=3))
    ml = MarginalLikelihood(model, Gaussian(1.0), n_data=6, prior=prior, structure="kfac")
    expected = 0.0
    delta = prior.precision.detach()
    for own, a in ((delta[:12], X), (delta[12:], torch.ones(6, 1).double())):
        product = torch.kron(6 * torch.eye(3).double(), a.mT @ a / 6)
        expected += torch.logdet(torch.diag(own) + product) - own.log().sum()
    torch.testing.assert_close(ml(X, randn(6, 3)).log_det_ratio.detach(), expected)
    gradient = torch.autograd.grad(ml(X, randn(6, 3)).log_det_ratio, prior.log_precision)[0]
    assert gradient.isfinite().all() and gradient.any()
