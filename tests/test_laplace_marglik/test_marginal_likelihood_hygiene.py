"""The user's model is left as it was, mistakes are named, and nothing depends on what was evaluated
before.
"""

import pytest
import torch
from marginal_likelihoods import STRUCTURES, X, Y, by_name, close, marglik
from small_networks import filled, mlp, randn
from torch import nn

from asdl_marglik import CurvatureError
from laplace_marglik import Gaussian, GaussianPrior, MarginalLikelihood

NAN, INF = float("nan"), float("inf")
every_structure = pytest.mark.parametrize("structure", STRUCTURES)


IMAGES = randn(6, 1, 3, 3)


# ----------------------------------------------------------------------------------- left as it was


class Boom(Exception):
    pass


class Fails(nn.Module):
    """Passes its input on, except in call number `at`."""

    def __init__(self):
        super().__init__()
        self.at, self.calls = None, 0

    def forward(self, x):
        self.calls += 1
        if self.calls - 1 == self.at:
            raise Boom
        return x


class Everything(nn.Module):
    """Batch norm, dropout, a raw and a frozen parameter, and a place that can fail."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Dropout(0.5)
        self.raw, self.frozen = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.head, self.fails = nn.Linear(8, 3), Fails()
        self.frozen.requires_grad_(False)
        filled(self)

    def forward(self, x):
        h = self.drop(torch.tanh(self.norm(self.conv(x)))).flatten(1)
        return self.head(self.fails(torch.tanh(self.frozen(h) * self.raw.exp())))


class Jitter(nn.Module):
    """A random augmentation with a learnable size, and a place that can fail."""

    def __init__(self):
        super().__init__()
        self.size, self.fails = nn.Parameter(torch.tensor(0.3).double()), Fails()

    def forward(self, x):
        return self.fails(
            x.unsqueeze(1) + self.size * torch.randn(len(x), 2, *x.shape[1:], dtype=x.dtype)
        )


HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
]


def state(model):
    """Everything that must not change, as one comparable value."""
    modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    return (
        [(m.training, *(list(getattr(m, h)) for h in HOOKS)) for m in modules],
        [sorted(k for k in vars(m) if k != "calls") for m in modules],
        [(id(t), t.requires_grad, t.tolist(), t._backward_hooks) for t in tensors],
        [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()],
        torch.get_rng_state().tolist(),
        (
            torch._C._len_torch_function_stack(),
            torch.is_grad_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
        ),
    )


def evaluate(ml):
    total = ml(IMAGES, Y, torch.tensor([1])).total
    return [total.detach(), *torch.autograd.grad(total, ml.hyperparameters())]


def everything(structure):
    model = Everything().train()
    model.norm.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    return marglik(model, structure=structure, augment=Jitter())


@every_structure
def test_nothing_is_left_on_the_model_after_success(structure):
    ml = everything(structure)
    handle = ml.model.head.register_forward_hook(lambda *_: None)  # the user's own hook stays
    before = state(ml.model), state(ml.augment)
    evaluate(ml)
    ml.cached(IMAGES, Y)().total.backward(inputs=[ml.prior.log_precision])
    ml.full_batch([(IMAGES, Y)])
    ml.describe(IMAGES)
    assert (state(ml.model), state(ml.augment)) == before
    handle.remove()


@pytest.mark.parametrize("place", ["model", "augment"])
@pytest.mark.parametrize("structure", ["ntk", "kfac"])
def test_nothing_is_left_on_the_model_after_an_exception_in_any_call(structure, place):
    want = evaluate(everything(structure))
    for at in range(100):
        ml = everything(structure)
        getattr(ml, place).fails.at = at
        before = state(ml.model), state(ml.augment)
        try:
            evaluate(ml)
            break
        except Boom:
            assert (state(ml.model), state(ml.augment)) == before
        getattr(ml, place).fails.at = None
        ml.generator.manual_seed(0)
        for got, value in zip(evaluate(ml), want, strict=True):  # and it works afterwards
            torch.testing.assert_close(got, value)
    assert at >= 2


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x + 0.1 * torch.randn(x.shape[1:], dtype=x.dtype))


def test_random_state_is_untouched_by_a_model_that_draws():
    ml, before = marglik(filled(Noise())), torch.get_rng_state()
    ml(X, Y).total.backward()
    assert torch.equal(torch.get_rng_state(), before)


@every_structure
def test_dropout_and_batch_statistics_are_off(structure):
    training, ml = everything(structure), everything(structure)
    ml.model.eval()
    for ours, theirs in zip(evaluate(training), evaluate(ml), strict=True):
        assert torch.equal(ours, theirs)


def test_frozen_parameters_are_constants():
    ml = everything("ntk")
    assert not any("frozen" in name for name in [*ml.weights, *ml.prior.groups])
    assert "frozen" not in ml.describe(IMAGES)
    scatter = ml(IMAGES, Y).scatter
    close(
        scatter,
        sum(w.detach().square().sum() for n, w in ml.model.named_parameters() if "frozen" not in n),
    )


# ----------------------------------------------------------------------------------------- mistakes


@every_structure
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("datum", [0, 4])
def test_a_bad_input_is_named(structure, value, datum):
    ml, bad = marglik(mlp(), structure=structure), X.clone()
    bad[datum, 1] = value
    with pytest.raises(CurvatureError, match=f"input {datum}.*NaN or infinity"):
        ml(bad, Y)
    with pytest.raises(CurvatureError, match=f"input {datum}.*NaN or infinity"):
        ml.full_batch([(bad[:3], Y[:3]), (bad[3:], Y[3:])])
    # and nothing is remembered
    close(ml(X, Y).total, marglik(mlp(), structure=structure)(X, Y).total)


@every_structure
def test_a_bad_weight_is_named(structure):
    model, unused = mlp(), by_name["raw"].make()[0]
    ml, other = marglik(model, structure=structure), marglik(unused, structure=structure)
    with torch.no_grad():
        model[2].weight[1, 1] = NAN
        unused.unused[0] = NAN  # in the scatter, though not in the outputs
    with pytest.raises(CurvatureError, match=r"'2\.weight'.*NaN"):
        ml(X, Y)
    with pytest.raises(CurvatureError, match=r"'unused'.*NaN"):
        other(X, Y)


def test_a_bad_target_is_named():
    y = randn(6, 3)
    y[2, 1] = NAN
    with pytest.raises(CurvatureError, match="2"):
        marglik(mlp(), Gaussian())(X, y)


@every_structure
def test_a_bad_precision_is_not_silent(structure):
    ml = marglik(mlp(), structure=structure)
    ml.prior.log_precision.data[1] = NAN
    with pytest.raises(CurvatureError, match=r"precision|NaN"):
        ml(X, Y)


MISTAKES = {
    "empty block": (lambda: marglik(mlp())(X[:0], Y[:0]), "at least one datum.*0"),
    "lengths": (lambda: marglik(mlp())(X[:5], Y), r"as many inputs as targets.*\[5\].*6"),
    "lengths in loader": (
        lambda: marglik(mlp()).full_batch([(X, Y[:5])]),
        "as many inputs as targets",
    ),
    "too many data": (lambda: marglik(mlp(), n_data=5)(X, Y), "6 data points.*n_data=5.*whole"),
    "too many outputs": (lambda: marglik(mlp(), outputs=4)(X, Y), "outputs=4.*only 3"),
    "no outputs": (lambda: marglik(mlp(), outputs=0), "outputs.*at least 1"),
    "column range": (lambda: marglik(mlp())(X, Y, torch.tensor([3])), "columns.*0..2.*3"),
    "column twice": (lambda: marglik(mlp())(X, Y, torch.tensor([1, 1])), "distinct"),
    "column rows": (
        lambda: marglik(mlp())(X, Y, torch.zeros(5, 1).long()),
        r"columns.*\[6, K\].*\(5, 1\)",
    ),
    "column kind": (lambda: marglik(mlp())(X, Y, torch.tensor([0.5])), "columns must be integers"),
    "structure": (lambda: marglik(mlp(), structure="kron"), "structure.*ntk.*kfac.*'kron'"),
    "root": (lambda: marglik(mlp(), root="eig"), "root.*eigen.*'eig'"),
    "columns": (lambda: marglik(mlp(), columns="own"), "columns.*shared.*iid"),
    "kfac": (lambda: marglik(mlp(), kfac="both"), "kfac.*expand.*reduce"),
    "blocks": (lambda: marglik(mlp(), blocks="layer"), "blocks.*tensor.*module.*patterns"),
    "likelihood": (
        lambda: marglik(mlp(), "multiclass"),
        "likelihood.*classification.*'multiclass'",
    ),
    "prior": (lambda: marglik(mlp(), prior="layers"), "scalar.*layerwise.*'layers'"),
    "hyper": (lambda: marglik(mlp(), hyper=["head.*"]), "'head.*' fits no parameter"),
    "other prior": (
        lambda: MarginalLikelihood(
            mlp(), "classification", n_data=6, prior=GaussianPrior(nn.Linear(4, 3))
        ),
        "no group for '0.weight'",
    ),
    "labels": (lambda: marglik(mlp())(X, Y + 1), "0..2.*1..3"),
    "float labels": (lambda: marglik(mlp())(X, Y.double()), "integer class indices"),
    "targets": (lambda: marglik(mlp(), "regression")(X, X), r"targets \(6, 4\).*outputs \(6, 3\)"),
    "augmentation": (
        lambda: marglik(mlp(), augment=nn.Identity())(X, Y),
        r"copies \[n, A, ...\].*, 4\).*unsqueeze",
    ),
    "inputs": (lambda: marglik(mlp())([X], Y), "tensor or a mapping.*list"),
    "empty loader": (lambda: marglik(mlp()).full_batch([]), "loader is empty"),
    "one-shot loader": (
        lambda: marglik(mlp()).full_batch(iter([(X[:3], Y[:3]), (X[3:], Y[3:])])),
        "loader",
    ),
    "short loader": (
        lambda: marglik(mlp()).full_batch([(X[:4], Y[:4])]),
        "4 data points.*n_data=6",
    ),
    "long loader": (
        lambda: marglik(mlp()).full_batch([(X, Y), (X, Y)]),
        "12 data points.*n_data=6",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    call, words = MISTAKES[mistake]
    with pytest.raises(CurvatureError, match=words):
        call()
