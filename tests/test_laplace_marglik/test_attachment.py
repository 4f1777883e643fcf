"""The learned weight decay in optimisers as people have them."""

import pytest
import torch
from torch import nn

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood, MarglikError

N = 24
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=GENERATOR, dtype=torch.float64)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def marglik(dtype=torch.float64, precision=3.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    prior = GaussianPrior(model, precision=precision, **options)
    with torch.no_grad():
        prior.log_precision += torch.linspace(-1, 1, 4)
    return MarginalLikelihood(model, "classification", n_data=N, prior=prior)


def attached(ml, optimizer, **options):
    x = X.to(next(ml.model.parameters()).dtype)
    EvidenceLearner(ml, (x, Y), rows=8, inducing=0).attach(optimizer, **options)
    return optimizer


def weights_of(ml):
    return torch.cat([p.detach().flatten() for p in ml.model.parameters()])


def trained(ml, step, loss, steps=15):
    for _ in range(steps):
        step(loss)
    return weights_of(ml)


def plain_steps(ml, make):
    """Training by the MAP loss, the definition."""
    optimizer = make(ml.model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = ml.map_loss(X, Y)
        loss.backward()
        return loss

    for _ in range(15):
        optimizer.step(closure)
    return weights_of(ml)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, 0.5, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("make", [sgd, lbfgs, lambda p: torch.optim.Adam(p, 0.01)])
@pytest.mark.parametrize("form", ["positional", "keyword"])
def test_gradients_made_by_a_closure_inside_the_step(make, form):
    want = plain_steps(marglik(), make)
    ml = marglik()
    optimizer = attached(ml, make(ml.model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = ml.data_loss(ml.model(X), Y)
        loss.backward()
        return loss

    for _ in range(15):
        value = ml.map_loss(X, Y)
        loss = optimizer.step(closure) if form == "positional" else optimizer.step(closure=closure)
        torch.testing.assert_close(loss, value)
    torch.testing.assert_close(weights_of(ml), want, rtol=1e-9, atol=1e-10)


def test_a_closure_may_leave_a_step_out():
    ml = marglik()
    optimizer = attached(ml, sgd(ml.model.parameters()))
    before = weights_of(ml)
    assert optimizer.step(lambda: None) is None
    assert torch.equal(weights_of(ml), before)


# ----------------------------------------------------------------------------------- decoupled


def test_decoupled_decay_is_that_of_adamw():
    ml, other = marglik(), marglik()
    optimizer = attached(ml, torch.optim.Adam(ml.model.parameters(), 0.05), decoupled=True)
    adamw = torch.optim.AdamW(other.prior.weight_decay(N, other.model), 0.05)
    for m, steps in ((ml, optimizer), (other, adamw)):
        for _ in range(20):
            steps.zero_grad()
            m.data_loss(m.model(X), Y).backward()
            steps.step()
    torch.testing.assert_close(weights_of(ml), weights_of(other), rtol=1e-11, atol=1e-12)
    coupled = marglik()
    plain = attached(coupled, torch.optim.Adam(coupled.model.parameters(), 0.05))
    for _ in range(20):
        plain.zero_grad()
        coupled.data_loss(coupled.model(X), Y).backward()
        plain.step()
    assert not torch.allclose(weights_of(coupled), weights_of(ml), rtol=1e-3)


def test_decoupled_decay_pulls_to_the_mean_at_the_rate_of_each_group():
    ml = marglik(mean="current")
    with torch.no_grad():
        for p in ml.model.parameters():
            p += 1.0
    first, *others = ml.model.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": others, "lr": 0.1}]
    optimizer = attached(ml, torch.optim.SGD(groups), decoupled=True)
    before = [p.detach().clone() for p in ml.model.parameters()]
    for p in ml.model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    precisions = list(ml.prior.precisions().values())
    rates = [0.5, 0.1, 0.1, 0.1]
    for p, old, precision, rate in zip(
        ml.model.parameters(), before, precisions, rates, strict=True
    ):
        torch.testing.assert_close(old - p.detach(), torch.full_like(p, rate * precision / N))


def test_decoupled_decay_is_not_defined_for_lbfgs():
    ml = marglik()
    with pytest.raises(MarglikError, match=r"LBFGS.*decoupled=False"):
        attached(ml, lbfgs(ml.model.parameters()), decoupled=True)


# ------------------------------------------------------------------------------------- scalers


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
def test_scaled_gradients(fused, decoupled):
    """A fused optimiser unscales inside its step; the pull is the same."""
    results = []
    for scaled in (False, True):
        ml = marglik(torch.float32)
        x = X.float()
        adam = torch.optim.Adam(ml.model.parameters(), 0.01, fused=fused)
        optimizer = attached(ml, adam, decoupled=decoupled)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for _ in range(10):
            optimizer.zero_grad()
            scaler.scale(ml.data_loss(ml.model(x), Y)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(weights_of(ml))
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_that_a_scaler_leaves_out_has_no_decay(fused):
    ml = marglik(torch.float32)
    adam = torch.optim.Adam(ml.model.parameters(), 0.01, fused=fused)
    optimizer = attached(ml, adam, decoupled=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = weights_of(ml)
    scaler.scale(ml.data_loss(ml.model(X.float()), Y)).backward()
    ml.model[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    assert torch.equal(weights_of(ml), before)


# ------------------------------------------------------------------------------------- wrappers


def test_an_optimiser_that_accelerate_has_wrapped():
    accelerate = pytest.importorskip("accelerate")
    want = plain_steps(marglik(), sgd)
    ml = marglik()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(ml.model, sgd(ml.model.parameters()))
    attached(ml, optimizer)
    for _ in range(15):
        optimizer.zero_grad()
        accelerator.backward(ml.data_loss(model(X), Y))
        optimizer.step()
    torch.testing.assert_close(weights_of(ml), want, rtol=1e-11, atol=1e-12)


def test_optimisers_that_are_refused_by_name():
    ml = marglik()

    class DeepSpeedOptimizerWrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    with pytest.raises(MarglikError, match=r"DeepSpeedOptimizerWrapper.*DistributedDataParallel"):
        attached(ml, DeepSpeedOptimizerWrapper(sgd(ml.model.parameters())))
    with pytest.raises(MarglikError, match=r"expected a torch.optim.Optimizer.*got list"):
        attached(ml, [sgd(ml.model.parameters())])


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    prior = GaussianPrior(model)
    ml = MarginalLikelihood(model, "classification", n_data=N, prior=prior)
    x = torch.arange(N) % 5
    learner = EvidenceLearner(ml, (x, Y), rows=4, inducing=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    learner.attach(optimizer)
    ml.data_loss(model(x), Y).backward()
    with pytest.raises(MarglikError, match="'weight' is sparse"):
        optimizer.step()


def test_weights_of_half_precision_feel_a_small_pull():
    """Precision / N would round to nothing in half precision."""
    ml = marglik(torch.bfloat16, precision=1e-3)
    optimizer = attached(ml, torch.optim.SGD(ml.model.parameters(), 1.0))
    for p in ml.model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        pulls = dict(ml.prior.pulls(ml.weights, N))
    assert ml.prior.log_precision.dtype == torch.float32
    for name, p in ml.model.named_parameters():
        torch.testing.assert_close(p.grad.float(), pulls[name], rtol=1e-2, atol=1e-6)


def test_weights_that_join_the_optimiser_later_are_pulled_too():
    ml = marglik()
    first, *others = ml.model.parameters()
    optimizer = attached(ml, torch.optim.SGD([first], 1.0))
    optimizer.add_param_group({"params": others})
    before = weights_of(ml)
    for p in ml.model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (weights_of(ml) != before).all()
