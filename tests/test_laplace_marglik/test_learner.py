"""EvidenceLearner: learned weight decay and rounds of hyperparameter steps in anybody's loop."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from laplace_marglik import (
    Evidence,
    EvidenceLearner,
    Gaussian,
    GaussianPrior,
    InducingPartition,
    MarginalLikelihood,
    MarglikError,
)
from laplace_marglik.moves import LARGEST_LOG_PRECISION
from laplace_marglik.schedule import cosine, is_due

N, C = 24, 3


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


class Shifted(nn.Module):
    """Two copies, one moved by a learned amount."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(self, x):
        return torch.stack([x + self.by, x - self.by], 1)


def marglik(structure="ntk", augment=None, precision=0.5, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)).double()
    prior = GaussianPrior(model, "layerwise", precision)
    return MarginalLikelihood(
        model,
        "classification",
        n_data=N,
        prior=prior,
        structure=structure,
        augment=augment,
        generator=torch.Generator().manual_seed(1),
        **options,
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


def two_groups(parameters):
    weights = list(parameters)
    return torch.optim.Adam([{"params": weights[:2], "lr": 0.05}, {"params": weights[2:]}], 0.01)


# --------------------------------------------------------------------------------- learned decay


@pytest.mark.parametrize("optimizer", [sgd, adam, two_groups])
@pytest.mark.parametrize("parts", [1, 3], ids=["whole batches", "accumulated gradients"])
def test_the_data_loss_with_an_attached_optimiser_is_the_map_loss(optimizer, parts):
    x, y = data()
    trained = []
    for attached in (False, True):
        ml = marglik(precision=3.0)
        steps = optimizer(ml.model.parameters())
        if attached:
            EvidenceLearner(ml, (x, y), rows=8, inducing=0).attach(steps)
        for _ in range(20):
            steps.zero_grad()
            for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
                if attached:
                    loss = ml.data_loss(ml.model(x_part), y_part)
                else:
                    loss = ml.map_loss(x_part, y_part)
                (loss / parts).backward()
            steps.step()
        trained.append(torch.cat([p.detach().flatten() for p in ml.model.parameters()]))
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-11, atol=1e-12)


def test_the_exported_weight_decay_trains_the_same_network():
    x, y = data()
    ml, other = marglik(precision=3.0), marglik(precision=3.0)
    with torch.no_grad():
        for m in (ml, other):
            m.prior.log_precision += torch.linspace(-1, 1, 4)
    attached = sgd(ml.model.parameters())
    EvidenceLearner(ml, (x, y), rows=8, inducing=0).attach(attached)
    plain = torch.optim.SGD(other.prior.weight_decay(N, other.model), 0.1, momentum=0.9)
    for m, optimizer in ((ml, attached), (other, plain)):
        for _ in range(10):
            optimizer.zero_grad()
            m.data_loss(m.model(x), y).backward()
            optimizer.step()
    for a, b in zip(ml.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    decays = ml.prior.weight_decay(N)
    assert decays["0.weight"] == pytest.approx(3.0 * torch.tensor(-1.0).exp().item() / N)


def test_a_prior_that_weight_decay_cannot_express_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(MarglikError, match="precision for each of its elements"):
        GaussianPrior(model, "diagonal").weight_decay(10)
    with pytest.raises(MarglikError, match="mean of 'weight' is not zero"):
        GaussianPrior(model, "scalar", mean="current").weight_decay(10)
    with pytest.raises(MarglikError, match="n_data"):
        GaussianPrior(model).weight_decay(0)


def test_the_decay_pulls_to_the_mean_and_leaves_weights_without_gradient_alone():
    x, y = data()
    ml = marglik()
    learner = EvidenceLearner(ml, (x, y), rows=8, inducing=0)
    optimizer = torch.optim.SGD(ml.model.parameters(), 1.0)
    learner.attach(optimizer)
    before = copy.deepcopy(ml.model.state_dict())
    ml.model[0].weight.grad = torch.zeros_like(ml.model[0].weight)
    optimizer.step()
    after = ml.model.state_dict()
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.5 / N))
    assert torch.equal(after["2.weight"], before["2.weight"])


def test_detach_undoes_it():
    x, y = data()
    ml = marglik()
    learner = EvidenceLearner(ml, (x, y), rows=8, inducing=0)
    optimizer = sgd(ml.model.parameters())
    learner.attach(optimizer)
    learner.detach()
    before = ml.model[0].weight.detach().clone()
    ml.model[0].weight.grad = torch.zeros_like(before)
    optimizer.step()
    assert torch.equal(ml.model[0].weight, before)
    learner.attach(optimizer)  # and again


def test_optimisers_that_do_not_fit_are_refused():
    x, y = data()
    ml = marglik()
    learner = EvidenceLearner(ml, (x, y), rows=8, inducing=0)
    weights = list(ml.model.parameters())
    with pytest.raises(MarglikError, match=r"weight_decay=0\.1"):
        learner.attach(torch.optim.AdamW(weights, weight_decay=0.1))
    with pytest.raises(MarglikError, match="no weights of this model"):
        learner.attach(sgd([*weights, *ml.hyperparameters()]))
    with pytest.raises(MarglikError, match="no weights of this model"):
        learner.attach(sgd(nn.Linear(2, 2).parameters()))
    learner.attach(torch.optim.AdamW(weights[:2], weight_decay=0.1), also_decays=True)
    learner.attach(sgd(weights[2:]))  # the other weights
    with pytest.raises(MarglikError, match=r"'2\.bias' is attached already"):
        learner.attach(sgd(weights[3:]))


# --------------------------------------------------------------------------------------- rounds


def test_rounds_come_after_burn_in_and_every_few_calls():
    ml = marglik()
    learner = EvidenceLearner(ml, data(), rows=8, inducing=0, steps=2, burn_in=3, every=2)
    happened = [learner.round() is not None for _ in range(8)]
    assert happened == [is_due(call, 3, 2) for call in range(1, 9)]
    assert happened == [False, False, False, True, False, True, False, True]


def test_rates_fall_along_a_cosine_over_all_rounds():
    ml = marglik()
    learner = EvidenceLearner(ml, data(), rows=8, inducing=0, steps=3, lr=0.2, total_rounds=4)
    rates = []
    step = torch.optim.Adam.step

    def noted(self, *args, **options):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **options)

    torch.optim.Adam.step = noted
    try:
        for _ in range(4):
            learner.round()
    finally:
        torch.optim.Adam.step = step
    assert rates == pytest.approx([cosine(number, 12, 0.2, 0.02) for number in range(12)])


# ------------------------------------------------------------------------ the prior's fixed point


def linear_regression():
    """Bayesian linear regression, whose evidence is exact."""
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False).double()
    y = x @ torch.linspace(0.2, 2, 5, dtype=torch.float64)[:, None] + torch.randn(40, 1).double()
    prior = GaussianPrior(model, "scalar", precision=100.0)
    ml = MarginalLikelihood(model, Gaussian(1.0, learn_sigma=False), n_data=40, prior=prior)
    return ml, x, y


def at_mode(ml, x, y):
    """The closed-form weights under the present precision."""
    inverse = torch.linalg.inv(x.mT @ x + ml.prior.precision * torch.eye(5))
    with torch.no_grad():
        ml.model.weight.copy_((inverse @ x.mT @ y).mT)
    return inverse


def test_fixed_point_steps_end_where_mackay_s_update_of_linear_regression_does():
    ml, x, y = linear_regression()
    learner = EvidenceLearner(
        ml, (x, y), rows=None, steps=1, lr=1.0, lr_min=1.0, prior_update="fixed-point"
    )
    expected = 100.0
    for _ in range(6):
        inverse = at_mode(ml, x, y)
        learner.round()
        determined = 5 - expected * inverse.trace().item()  # gamma, in closed form
        expected = determined / ml.model.weight.square().sum().item()
        assert ml.prior.precision.item() == pytest.approx(expected, rel=1e-6)
    at_mode(ml, x, y)
    total = ml(x, y).total
    (gradient,) = torch.autograd.grad(total, ml.prior.log_precision)
    assert abs(gradient.item()) < 1e-2


def test_few_fixed_point_steps_end_where_adam_ends_whatever_the_start():
    """From a precision of a million Adam does not arrive in 4,000 steps."""

    def learned(precision, steps, lr, update):
        ml = marglik(precision=precision)
        learner = EvidenceLearner(
            ml,
            data(),
            rows=N * (C - 1),
            steps=steps,
            lr=lr,
            lr_min=lr / 4,
            prior_update=update,
            steps_per_block=steps,
            total_rounds=1,
        )
        learner.round()
        return ml.prior.log_precision.detach()

    expected = learned(1.0, 400, 0.2, "adam")
    for start in (1e-6, 1.0, 1e6):
        found = learned(start, 20, 0.8, "fixed-point")
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("zero", [True, False])
def test_precisions_of_weights_without_a_maximum_stay_finite(zero):
    """A weight of zero asks for an infinite precision, one that does nothing for none."""
    ml = marglik()
    with torch.no_grad():
        if zero:
            ml.model[2].bias.zero_()
        else:
            ml.model[0].weight.zero_()  # then hidden units are constant
            ml.model[0].weight[:, 0] = 1e-12
    learner = EvidenceLearner(
        ml, data(), rows=20, steps=100, steps_per_block=100, lr=1.0, prior_update="fixed-point"
    )
    for _ in range(2):
        report = learner.round()
    assert report.evidence.total.isfinite()
    assert ml.prior.log_precision.abs().max() <= LARGEST_LOG_PRECISION


def test_a_learned_noise_moves_beside_the_fixed_point():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(N, 4, dtype=torch.float64)
    prior = GaussianPrior(model, "layerwise")
    ml = MarginalLikelihood(model, Gaussian(1.0), n_data=N, prior=prior)
    learner = EvidenceLearner(ml, (x, x[:, :1]), rows=12, prior_update="fixed-point")
    before = [p.detach().clone() for p in ml.hyperparameters()]
    learner.round()
    for old, new in zip(before, ml.hyperparameters(), strict=True):
        assert not torch.equal(old, new)
    prior.log_precision.requires_grad_(False)
    again = EvidenceLearner(ml, (x, x[:, :1]), rows=12, prior_update="fixed-point")
    fixed = prior.log_precision.clone()
    again.round()
    assert torch.equal(fixed, prior.log_precision)


def test_an_unknown_update_is_refused():
    with pytest.raises(MarglikError, match="prior_update must be adam or fixed-point, got 'sgd'"):
        EvidenceLearner(marglik(), data(), rows=8, prior_update="sgd")


@pytest.mark.parametrize("inducing", [0.0, 0.5])
def test_learning_raises_the_evidence(inducing):
    ml = marglik(precision=100.0)
    learner = EvidenceLearner(ml, data(), rows=20, inducing=inducing, lr=0.3)
    before = learner.measure().total
    for _ in range(10):
        report = learner.round()
    after = learner.measure()
    assert after.total > before + 5
    assert report.steps == 10 and report.seconds > 0 and isinstance(report.evidence, Evidence)
    assert (after.interval is not None) == (inducing > 0)


def test_a_report_of_conditioned_blocks_contains_the_exact_evidence():
    ml = marglik()
    learner = EvidenceLearner(ml, data(), rows=16)
    exact = marglik()(*data()).total.item()
    lower, upper = learner.measure(20).interval
    assert lower < exact < upper


@pytest.mark.parametrize("augment", [None, Shifted()], ids=["plain", "augmented"])
def test_a_report_has_the_log_likelihood_of_all_data(augment, monkeypatch):
    ml = marglik(augment=augment)
    reports = []
    call = MarginalLikelihood.__call__

    def noted(self, *args, likelihood_batch=None, **options):
        reports.append(0 if likelihood_batch is None else len(likelihood_batch[1]))
        return call(self, *args, likelihood_batch=likelihood_batch, **options)

    monkeypatch.setattr(MarginalLikelihood, "__call__", noted)
    found = EvidenceLearner(ml, data(), rows=12).measure(5).log_likelihood
    x, y = data()
    copies = x.unsqueeze(1) if augment is None else augment(x)
    outputs = ml.model(copies.flatten(0, 1)).unflatten(0, copies.shape[:2]).mean(1)
    torch.testing.assert_close(found, -nn.functional.cross_entropy(outputs, y, reduction="sum"))
    # copies are drawn anew for every block
    assert reports.count(N) == (1 if augment is None else 5)


def test_steps_on_one_block_cost_one_pass(monkeypatch):
    ml = marglik()
    calls = []
    single_block = ml._single_block

    def counted(*args, **options):
        calls.append(options.get("reuse", False))
        return single_block(*args, **options)

    monkeypatch.setattr(ml, "_single_block", counted)
    EvidenceLearner(ml, data(), rows=12, steps=10, steps_per_block=4).round()
    assert calls == [True, True, True]


@pytest.mark.parametrize("steps_per_block", [1, 2, 3, 10])
def test_inducing_rows_are_chosen_anew_after_every_block(steps_per_block, monkeypatch):
    """Also after one on which a round ends before all of its steps are taken."""
    learner = EvidenceLearner(marglik(), data(), rows=12, steps=5, steps_per_block=steps_per_block)
    updates = []
    update = learner.partition.update

    def counted(*args):
        updates.append(args)
        update(*args)

    monkeypatch.setattr(learner.partition, "update", counted)
    learner.round()
    assert len(updates) == -(-5 // steps_per_block)


def test_steps_of_the_augmentation_take_a_new_block_each(monkeypatch):
    ml = marglik(augment=Shifted())
    calls = []
    single_block = ml._single_block

    def counted(*args, **options):
        calls.append(options.get("reuse", False))
        return single_block(*args, **options)

    monkeypatch.setattr(ml, "_single_block", counted)
    before = ml.augment.by.item()
    EvidenceLearner(ml, data(), rows=12, steps=6, augment_steps=2, steps_per_block=4).round()
    assert calls == [False, False, True]
    assert ml.augment.by.item() != before


def test_hyperparameters_that_move_outputs_take_the_likelihood_of_more_data():
    few = EvidenceLearner(marglik(augment=Shifted()), data(), rows=12)
    assert few.on_blocks.likelihood_batch >= N and few.round() is not None
    assert EvidenceLearner(marglik(), data(), rows=12).on_blocks.likelihood_batch == 0
    own = EvidenceLearner(marglik(augment=Shifted()), data(), rows=12, likelihood_batch=6)
    assert own.on_blocks.likelihood_batch == 6
    assert own.round() is not None


@pytest.mark.parametrize("structure", ["kfac", "diag", "ntk"])
def test_all_data_in_one_block(structure):
    ml = marglik(structure, augment=Shifted())
    learner = EvidenceLearner(ml, data(), rows=None, steps=3, augment_steps=1, batch_size=7)
    report = learner.round()
    assert report.evidence.n_blocks == 1
    assert ml.augment.by.item() != 0.1


class Noisy(Dataset):
    """A data set whose transform draws random numbers at every reading."""

    def __init__(self):
        self.x, self.y = data()
        self.read = []

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.read.append(i)
        return self.x[i] + 0.01 * torch.randn(4, dtype=torch.float64), self.y[i]


def test_a_block_of_a_data_set_with_random_transforms_is_read_once():
    """Both passes see the same tensors; otherwise the second would be refused."""
    dataset = Noisy()
    ml = marglik(augment=Shifted())
    learner = EvidenceLearner(ml, dataset, rows=8, inducing=0, steps=2, likelihood_batch=0)
    dataset.read.clear()
    learner.round()
    assert len(dataset.read) == 16


def test_data_sets_of_several_kinds():
    x, y = data()
    for given in ((x, y), TensorDataset(x, y), list(zip(x, y, strict=True))):
        assert EvidenceLearner(marglik(), given, rows=12, steps=1).round() is not None
    with pytest.raises(MarglikError, match="map-style"):
        EvidenceLearner(marglik(), iter([(x, y)]))
    with pytest.raises(MarglikError, match=r"24 examples|n_data"):
        EvidenceLearner(marglik(), (x[:5], y[:5]))
    with pytest.raises(MarglikError, match="a pair"):
        EvidenceLearner(marglik(), list(zip(x, y, y, strict=True)), rows=12)


def test_structures_without_rows_are_refused_at_once():
    with pytest.raises(MarglikError, match="kfac curvature has no rows"):
        EvidenceLearner(marglik("kfac"), data(), rows=12)


# ---------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("inducing", [0.0, 0.5])
@pytest.mark.parametrize("augmented", [False, True])
def test_a_restored_learner_goes_on_bit_for_bit(inducing, augmented, tmp_path):
    def learner():
        ml = marglik(augment=Shifted() if augmented else None)
        return EvidenceLearner(
            ml, data(), rows=10, inducing=inducing, steps=4, steps_per_block=2, total_rounds=6
        )

    def state(of):
        return [p.detach().clone() for p in of.ml.hyperparameters()]

    whole = learner()
    for _ in range(6):
        whole.round()
    first = learner()
    for _ in range(3):
        first.round()
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = learner()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(3):
        second.round()
    for a, b in zip(state(second), state(whole), strict=True):
        assert torch.equal(a, b)
    if isinstance(whole.partition, InducingPartition):
        assert torch.equal(second.partition.inducing_rows, whole.partition.inducing_rows)


def test_the_state_of_another_kind_of_learner_is_refused():
    conditioned = EvidenceLearner(marglik(), data(), rows=12)
    plain = EvidenceLearner(marglik(), data(), rows=12, inducing=0)
    with pytest.raises(MarglikError, match="other blocks"):
        plain.load_state_dict(conditioned.state_dict())
    with pytest.raises(MarglikError, match="partition with"):
        conditioned.load_state_dict(EvidenceLearner(marglik(), data(), rows=14).state_dict())
