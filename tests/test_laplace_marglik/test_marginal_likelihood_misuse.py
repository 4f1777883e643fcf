"""What would give a wrong number is refused with one clear sentence, or made to work."""

import threading

import pytest
import torch
from cases import Jitter
from marginal_likelihoods import X, Y, marglik
from small_networks import filled, mlp, randn
from torch import nn

from asdl_marglik import STRUCTURES, CurvatureError
from laplace_marglik import (
    ClassPartition,
    DataEmphasizedELBO,
    DiagonalLaplace,
    Gaussian,
    GaussianPrior,
    MarginalLikelihood,
    MarglikError,
    Partition,
)

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.quick


# ------------------------------------------------------------------------------- inputs overwritten


class Standardising(nn.Module):
    """A network that changes its input, in place or not."""

    def __init__(self, in_place):
        super().__init__()
        self.net, self.in_place = mlp(), in_place

    def forward(self, x):
        return self.net(x.mul_(0.5).add_(1) if self.in_place else x * 0.5 + 1)


def every_number(ml, x):
    total = ml(x, Y, torch.tensor([1])).total
    streamed = ml.full_batch([(x[:4], Y[:4]), (x[4:], Y[4:])]).total
    cached = ml.cached(x, Y, torch.tensor([1]))().total
    loss = ml.map_loss(x, Y)
    return [total, *torch.autograd.grad(total, ml.hyperparameters()), streamed, cached, loss]


@pytest.mark.parametrize("augment", [None, Jitter])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_that_writes_to_its_inputs(structure, augment):
    found = []
    for in_place in (True, False):
        x = X.clone()
        ml = marglik(
            Standardising(in_place), structure=structure, augment=augment and augment(), chunk=4
        )
        found.append(every_number(ml, x))
        assert torch.equal(x, X)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_variational_and_diagonal_objectives_leave_the_inputs_alone_too():
    found = []
    for in_place in (True, False):
        x, model = X.clone(), Standardising(in_place)
        prior = GaussianPrior(model)
        elbo = DataEmphasizedELBO(
            model,
            "classification",
            n_data=6,
            prior=prior,
            generator=torch.Generator().manual_seed(0),
            antithetic=True,
        )
        laplace = DiagonalLaplace(model, "classification", prior, [(x, Y)])
        found.append([elbo(x, Y), elbo.predict(x, samples=2), laplace.evidence().total])
        assert torch.equal(x, X)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class WritesLater(nn.Module):
    """Changes large inputs only, which the first data points are not."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x.clamp_(max=2.0) if float(x.detach().max()) > 2 else x)


def test_inputs_overwritten_later_than_planned_are_refused():
    x = X.clamp(-1, 1)
    x[4, 0] = 5
    with pytest.raises(CurvatureError, match="changes its input in place"):
        marglik(WritesLater(), chunk=2)(x, Y)


def test_an_augmentation_that_writes_to_its_inputs():
    class Writes(Jitter):
        def forward(self, x):
            return super().forward(x.add_(1))

    x = X.clone()
    ml = marglik(augment=Writes())
    ml(x, Y).total.backward()
    assert torch.equal(x, X)


# ------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("n_data, n_outputs, subset", [(12, 3, 6), (7, 3, 6), (6, 4, 6), (6, 3, 3)])
@pytest.mark.parametrize("outputs", [1, None])
def test_a_block_of_another_partition_is_refused(n_data, n_outputs, subset, outputs):
    block = Partition(n_data, n_outputs, subset, outputs)[0]
    ml = marglik(outputs=outputs)
    for evaluate in (ml, ml.cached):
        with pytest.raises(MarglikError, match=r"the block (is of a partition of|has)"):
            evaluate(X, Y, block=block)


@pytest.mark.parametrize("of_block, of_ml", [(1, None), (None, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", [Partition, ClassPartition])
def test_the_columns_of_a_block_are_taken_whatever_the_estimator_would_draw(kind, of_block, of_ml):
    partition = kind(
        6 if kind is Partition else Y, 3, 3, of_block, generator=torch.Generator().manual_seed(0)
    )
    for block in partition:
        found = marglik(outputs=of_ml)(X[block.index], Y[block.index], block=block)
        explicit = marglik(outputs=of_block)(X[block.index], Y[block.index], block.columns)
        assert found.n_blocks == block.n_blocks
        torch.testing.assert_close(
            found.log_det_ratio / found.n_blocks, explicit.log_det_ratio / explicit.n_blocks
        )


# -------------------------------------------------------------------------------------------- prior


def test_hyperparameters_that_the_prior_takes_for_weights():
    model = mlp()
    words = r"'0\.bias' is a hyperparameter.*weight of the prior.*hyper="
    with pytest.raises(MarglikError, match=words):
        marglik(model, prior=GaussianPrior(model), hyper=["0.bias"])
    with pytest.raises(MarglikError, match=words):
        DataEmphasizedELBO(
            model, "classification", n_data=6, prior=GaussianPrior(model), hyper=["0.bias"]
        )


# -------------------------------------------------------------------------------------------- hooks


def test_hooks_on_weights_do_not_change_curvature():
    plain, hooked = marglik(augment=Jitter()), marglik(augment=Jitter())
    for p in hooked.model.parameters():
        p.register_hook(lambda g: 10 * g)
    recurrent = [nn.Sequential(Cells(), nn.Linear(3, 3)).double() for _ in range(2)]
    recurrent[1].load_state_dict(recurrent[0].state_dict())
    for p in recurrent[1].parameters():
        p.register_hook(lambda g: 10 * g)
    for a, b in ((plain, hooked), [marglik(net, augment=Jitter()) for net in recurrent]):
        first, second = a(X, Y).total, b(X, Y).total
        torch.testing.assert_close(first, second)
        gradients = [torch.autograd.grad(t, m.augment.size) for t, m in ((first, a), (second, b))]
        torch.testing.assert_close(*gradients)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 3)

    def forward(self, x):
        return self.cell(x)


class Hooked(nn.Module):
    """Puts a hook on its own activations, as gradient clipping inside a network does."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        h = self.net[1](self.net[0](x))
        handle = h.register_hook(lambda g: 10 * g) if h.requires_grad else None
        f = self.net[2](h)
        assert handle is None or hasattr(handle, "remove")
        return f


@pytest.mark.parametrize("structure", STRUCTURES)
def test_hooks_on_activations_do_not_change_curvature(structure):
    hooked = Hooked()
    values = [marglik(net, structure=structure)(X, Y).total for net in (hooked, hooked.net)]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("when", ["before", "after"])
def test_backward_hooks_of_modules_are_refused(when):
    ml = marglik(augment=Jitter())
    if when == "after":
        ml(X, Y)
    ml.model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CurvatureError, match=r"module '0' has a backward hook.*remove"):
        ml(X, Y)


def test_hooks_on_hyperparameters_that_would_act_twice_are_refused():
    ml = marglik(augment=Jitter())
    handle = ml.augment.size.register_hook(lambda g: 2 * g)
    with pytest.raises(MarglikError, match="act twice"):
        ml(X, Y)
    handle.remove()
    ml.prior.log_precision.register_hook(lambda g: 2 * g)  # acts once, as anywhere
    ml(X, Y).total.backward()


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1.5, "6", True, None])
def test_the_number_of_data_is_a_whole_number(value):
    model = mlp()
    options = {"n_data": value, "prior": GaussianPrior(model)}
    with pytest.raises(MarglikError, match="n_data must be a whole number"):
        MarginalLikelihood(model, "classification", **options)
    with pytest.raises(MarglikError, match="n_data must be a whole number"):
        DataEmphasizedELBO(model, "classification", **options)


@pytest.mark.parametrize("value", [1000.0, -1000.0, NAN, INF, 81.0])
def test_scales_that_overflow_are_refused(value):
    ml = marglik(likelihood=Gaussian(learn_temperature=True))
    for parameter, words in (
        (ml.prior.log_precision, "log precision of group '0.weight'"),
        (ml.likelihood.log_sigma, "log_sigma"),
        (ml.likelihood.log_temperature, "log_temperature"),
    ):
        before = parameter.detach().clone()
        parameter.data.fill_(value)
        with pytest.raises(MarglikError, match=f"{words}.*overflow"):
            ml(X, randn(6, 3))
        parameter.data.copy_(before)
    assert ml(X, randn(6, 3)).total.isfinite()


class Powers(nn.Module):
    """Its first derivative at zero is zero, its second one infinite."""

    def forward(self, x):
        return x + (0.0 * x) ** 1.5


def test_a_gradient_that_is_not_finite_is_refused():
    model = filled(nn.Sequential(nn.Linear(4, 5), Powers(), nn.Linear(5, 3)))
    ml = marglik(model, augment=Jitter())
    with pytest.raises(CurvatureError, match="gradient is NaN or infinite"):
        ml(X, Y).total.backward()


# ------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize("structure", ["ntk", "kfac"])
def test_threads_leave_the_modes_alone_and_get_the_same_numbers(structure):
    model = mlp().train()
    model[1].eval()
    ml = marglik(model, structure=structure, augment=Jitter())
    want = marglik(model, structure=structure, augment=Jitter())(X, Y, torch.tensor([1])).total
    found, failures = [], []

    def work():
        try:
            for _ in range(5):
                own = marglik(model, structure=structure, augment=Jitter())
                total = own(X, Y, torch.tensor([1])).total
                torch.autograd.grad(total, own.hyperparameters())
                found.append(total.detach())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [m.training for m in model] == [True, False, True] and model.training
    assert len(found) == 20 and all(torch.equal(t, want.detach()) for t in found)
    assert ml(X, Y).total.isfinite()


# ------------------------------------------------------------------------------ models as they come


class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = mlp(), kind

    def forward(self, x):
        f = self.net(x)
        return {"dict": {"scores": [f]}, "no batch": f.mean(0), "none": None}[self.kind]


@pytest.mark.parametrize(
    "kind, words",
    [
        ("dict", r"got dict with the entries \['scores'\].*wrap"),
        ("no batch", r"leading batch axis.*\(3,\)"),
        ("none", "got NoneType.*wrap"),
    ],
)
def test_other_outputs_than_a_tensor_are_named(kind, words):
    with pytest.raises(CurvatureError, match=words):
        marglik(Returning(kind))(X, Y)
    with pytest.raises(CurvatureError, match=words):
        marglik(Returning(kind)).map_loss(X, Y)


def test_weights_frozen_or_unfrozen_after_the_prior():
    ml = marglik()
    ml.model.requires_grad_(False)
    with pytest.raises(MarglikError, match="all weights of the model are frozen"):
        ml(X, Y)
    model = mlp()
    model[0].requires_grad_(False)
    ml = marglik(model)
    ml(X, Y)
    model[0].requires_grad_(True)
    with pytest.raises(MarglikError, match=r"no group for '0.weight'.*unfreezing"):
        ml(X, Y)


def test_inference_mode():
    ml = marglik()
    with torch.inference_mode():
        with pytest.raises(MarglikError, match=r"inference_mode.*no_grad"):
            ml(X, Y)
        x, y = X.clone(), Y.clone()
    torch.testing.assert_close(ml(x, y).total, ml(X, Y).total)  # tensors made in it are fine
    with torch.no_grad():
        assert not ml(X, Y).total.requires_grad


@pytest.mark.parametrize("structure", STRUCTURES)
def test_autocast_does_not_reach_the_evidence(structure):
    model = mlp().float()
    ml = marglik(model, structure=structure, augment=lambda x: torch.stack([x, x + 0.1], 1))
    want = ml(X.float(), Y, torch.tensor([1])).total
    slope = torch.autograd.grad(want, ml.prior.log_precision)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ml(X.float(), Y, torch.tensor([1])).total
        assert torch.equal(found, want)
        torch.testing.assert_close(torch.autograd.grad(found, ml.prior.log_precision), slope)
        ml.map_loss(X.float(), Y).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


NORMS = {
    "module": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
    "function": lambda: Functional(),
}


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.batch_norm(self.layer(x), None, None, training=True)


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_of_the_batch_are_refused(kind):
    with pytest.raises(CurvatureError, match=r"running statistics|outputs of each datum alone"):
        marglik(filled(NORMS[kind]()))(X, Y)


@pytest.mark.parametrize(
    "batch, words",
    [
        ((X, Y, Y), "a tuple of 3 entries"),
        ({"x": X, "y": Y}, r"a dict with the keys \['x', 'y'\].*labels="),
        (X, "a Tensor"),
    ],
    ids=["triple", "dict", "tensor"],
)
def test_batches_that_are_not_pairs(batch, words):
    for read in (
        marglik().full_batch,
        lambda loader: DiagonalLaplace(mlp(), "classification", GaussianPrior(mlp()), loader),
    ):
        with pytest.raises(
            MarglikError, match=f"pair \\(inputs, targets\\) or a mapping.*got {words}"
        ):
            read([batch])


def test_targets_from_numpy_and_functions_as_augmentations():
    torch.testing.assert_close(marglik()(X, Y.numpy()).total, marglik()(X, Y).total)
    torch.testing.assert_close(marglik().map_loss(X, Y.numpy()), marglik().map_loss(X, Y))
    streamed = marglik().full_batch([(X, Y.numpy())]).total
    torch.testing.assert_close(streamed, marglik()(X, Y).total)
    with pytest.raises(MarglikError, match=r"targets must be a tensor, got list.*as_tensor"):
        marglik()(X, Y.tolist())
    with pytest.raises(CurvatureError, match=r"inputs must be a tensor.*ndarray.*as_tensor"):
        marglik()(X.numpy(), Y)
    twice = marglik(augment=lambda x: torch.stack([x, x], 1))
    torch.testing.assert_close(twice(X, Y).total, marglik()(X, Y).total)
    with pytest.raises(MarglikError, match=r"augment must be a module or a function.*got str"):
        marglik(augment="crop")
