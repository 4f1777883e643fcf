"""Sampled linearised Laplace where it used to be wrong without a word: no signal, stale weights,
NaN, brackets.
"""

import math
import time
import warnings

import numpy as np
import pytest
import torch
from exact_posterior import BATCH, ROUGH, Exact, N
from sampled_runs import FLAGS
from torch import nn

from asdl_marglik import checksum
from laplace_marglik import (
    Gaussian,
    GaussianPrior,
    MarginalLikelihood,
    MarglikError,
    SampledLaplace,
)
from laplace_marglik.posterior.sampled import ConjugateGradients, LadderEvidence, Sgd
from laplace_marglik.posterior.sampled.dimension import NEGLIGIBLE, PriorStep
from ntkmarglik.learn.methods.sampled import Sampled
from ntkmarglik.programs.classify.command import main

INPUTS, HIDDEN = 4, 10


class Task:
    """A small network and targets: "noise", "zero", "signal" or "labels", which are random
    classes.
    """

    def __init__(
        self, targets, structure="layerwise", precision=1.0, outputs=1, dtype=torch.float32
    ):
        torch.manual_seed(0)
        outputs = 3 if targets == "labels" else outputs
        self.model = nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)
        ).to(dtype)
        self.x = torch.randn(40, INPUTS, dtype=dtype)
        self.y = {
            "noise": lambda: torch.randn(40, outputs, dtype=dtype),
            "zero": lambda: torch.zeros(40, outputs, dtype=dtype),
            "signal": lambda: 3 * self.x[:, :outputs] + 0.5 * torch.randn(40, outputs, dtype=dtype),
            "labels": lambda: torch.randint(3, (40,)),
        }[targets]()
        self.likelihood = "classification" if targets == "labels" else Gaussian(1.0)
        self.prior = GaussianPrior(self.model, structure, precision)
        self.loader = list(zip(self.x.split(20), self.y.split(20), strict=True))

    def sampled(self, samples=4, solver="cg", **options):
        return SampledLaplace(
            self.model,
            self.likelihood,
            n_data=40,
            prior=self.prior,
            samples=samples,
            solver=solver,
            together=samples,
            generator=torch.Generator().manual_seed(0),
            **options,
        )


def learned(posterior, loader, steps, space="function"):
    """What was said during EM steps, and how long each of them took."""
    seconds = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            start = time.process_time()
            posterior.update_prior(loader, space)
            seconds.append(time.process_time() - start)
    return {str(w.message) for w in caught if "no signal" in str(w.message)}, seconds


def all_finite(posterior, loader):
    evidence = posterior.log_evidence(loader, rungs_=5)
    values = (evidence.total, posterior.prior.precision, posterior.weight_samples, posterior.mode)
    return all(value.isfinite().all() for value in values)


# ---------------------------------------------------------------------------------------- no signal


@pytest.mark.parametrize(
    "targets, structure, options",
    [
        ("zero", "scalar", {}),
        ("zero", "layerwise", {}),
        ("zero", "diagonal", {"samples": 2}),
        ("zero", "layerwise", {"solver": Sgd(tolerance=0.1)}),
        ("zero", "layerwise", {"scaling": "g-prior"}),
        ("zero", "layerwise", {"curvature": "averaged"}),
        ("zero", "layerwise", {"samples": 1}),
        ("noise", "layerwise", {}),
        ("labels", "layerwise", {}),
    ],
)
def test_targets_without_signal_switch_groups_off_and_say_so(targets, structure, options):
    task = Task(targets, structure)
    posterior = task.sampled(**options).fit(task.loader)
    said, seconds = learned(posterior, task.loader, 30)
    assert said and all(
        "prior's group" in message and "check the targets" in message for message in said
    )
    assert all_finite(posterior, task.loader)
    assert task.prior.precision.max() < 1e8
    assert sum(seconds[-5:]) < 2 * sum(seconds[:5]) + 0.2
    before = task.prior.precision.detach().clone()
    learned(posterior, task.loader, 3)
    # it has come to rest
    torch.testing.assert_close(task.prior.precision.detach(), before, rtol=0.5, atol=0)


def test_nothing_is_lost_where_a_precision_stops():
    """At rest the evidence is that of an infinite precision, of N(0, I) without the network's
    linear part.
    """
    task = Task("zero", dtype=torch.float64)
    posterior = task.sampled(16).fit(task.loader)
    learned(posterior, task.loader, 20)
    with torch.no_grad():
        f = task.model(task.x)
        flat = torch.cat([p.flatten() for p in task.model.parameters()])
    pushed = posterior.linear.jvp(task.x, flat.unsqueeze(0))[1][0]
    limit = task.likelihood.log_prob(f - pushed, task.y).sum().item()
    assert posterior.log_evidence(task.loader).total.item() == pytest.approx(
        limit, abs=2 * NEGLIGIBLE
    )


@pytest.mark.parametrize("start", [1e-3, 1.0, 1e8])
def test_where_there_is_signal_every_start_leads_to_the_same_prior(start):
    task = Task("signal", "scalar", precision=start)
    posterior = task.sampled(8, ConjugateGradients(max_iterations=500)).fit(task.loader)
    said, _ = learned(posterior, task.loader, 25)
    assert not said
    reference = Task("signal", "scalar")
    best = reference.sampled(8).fit(reference.loader)
    learned(best, reference.loader, 25)
    assert task.prior.precision.item() == pytest.approx(reference.prior.precision.item(), rel=0.02)


@pytest.mark.parametrize("space", ["function", "weight", "pull"])
def test_groups_of_one_weight_learn_from_the_data(space):
    """The bias of a linear model, against MacKay's fixed point by matrices."""
    task = Task("signal", dtype=torch.float64)
    task.model, task.loader = nn.Linear(INPUTS, 1).double(), [(task.x, task.y + 1)]
    task.prior = GaussianPrior(task.model, "layerwise")
    j, delta = torch.cat([task.x, torch.ones(40, 1)], 1), torch.ones(2, dtype=torch.float64)
    for _ in range(50):
        inverse = torch.linalg.inv(j.mT @ j + torch.diag(delta[[0] * INPUTS + [1]]))
        squares, kept = (
            (inverse @ j.mT @ (task.y + 1)).flatten().square(),
            (inverse @ j.mT @ j).diagonal(),
        )
        delta = torch.stack([kept[:-1].sum() / squares[:-1].sum(), kept[-1] / squares[-1]])
    posterior = task.sampled(200, ROUGH).fit(task.loader)
    said, _ = learned(posterior, task.loader, 10, space)
    assert not said and kept[-1] > 0.9
    torch.testing.assert_close(task.prior.precision.detach(), delta, rtol=0.2, atol=0)


def test_the_pull_of_the_data_is_the_effective_dimension():
    """Unbiased in every group, and with a relative variance of at most 2 / k however small that
    is.
    """
    for precision in (0.7, 1e5):
        exact, k = Exact("regression", precision=precision), 1500
        found, truth = (
            exact.sampled(k, ROUGH).fit(exact.loader).effective_dimension("pull"),
            exact.gammas(),
        )
        assert ((found.groups - truth).abs() < 5 * found.group_errors).all()
        assert (found.group_errors * k**0.5 < 1.15 * 2**0.5 * truth).all()


def test_a_precision_rises_only_while_it_matters():
    gamma = torch.tensor([2.0, 1e-9, 0.0, 2.0], dtype=torch.float64)
    wanted = torch.tensor([1.1, 5.0, 1e9, 1e12], dtype=torch.float64)
    step = PriorStep.towards(wanted, gamma, torch.zeros(4))
    assert step.change.exp().tolist() == pytest.approx([1.1, 1.0, 1.0, 1000.0])
    assert step.switched_off.tolist() == [False, True, False, False]
    down = PriorStep.towards(
        torch.full((1,), 1e-2, dtype=torch.float64), torch.full((1,), 1e-9), torch.zeros(1)
    )
    assert down.change.exp().item() == pytest.approx(1e-2) and not down.switched_off.any()


def test_weights_that_the_data_do_not_see_keep_their_precision():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(INPUTS, 1), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.used(x) + 0 * self.idle.sum()

    task = Task("signal")
    task.model = Idle()
    task.prior = GaussianPrior(task.model, "layerwise", 0.3)
    posterior = task.sampled().fit(task.loader)
    learned(posterior, task.loader, 10)
    precisions = task.prior.precisions()
    assert precisions["idle"].item() == pytest.approx(0.3) and precisions[
        "used.weight"
    ].item() != pytest.approx(0.3)
    assert all_finite(posterior, task.loader)


def test_a_stiff_group_does_not_hide_the_others_from_the_solver():
    """Precisions of 1 and 1e8: samples of the loose groups are as exact as with it left out."""
    task = Task(
        "signal", precision={"0.weight": 1.0, "0.bias": 1.0, "2.weight": 1.0, "2.bias": 1e8}
    )
    posterior = task.sampled().fit(task.loader)
    assert posterior.diagnostics()["steps"] < 60 and max(posterior.diagnostics()["errors"]) < 0.05


@pytest.mark.parametrize("fault", ["precision", "samples", "mode"])
def test_a_step_that_fails_leaves_everything_as_it_was(fault, monkeypatch):
    task = Task("signal")
    posterior = task.sampled().fit(task.loader)
    learned(posterior, task.loader, 1)
    prior, z, mode = (
        t.detach().clone() for t in (task.prior.precision, posterior.weight_samples, posterior.mode)
    )
    expected, prediction = posterior.diagnostics(), posterior.predict(task.x)
    where = "laplace_marglik.posterior.sampled"
    if fault == "precision":
        monkeypatch.setattr(
            f"{where}.posterior.mackay", lambda gamma, squares, counts: gamma * math.nan
        )
    elif fault == "samples":
        monkeypatch.setattr(
            f"{where}.samples.conjugate_gradients",
            lambda product, b, z, *_: z.fill_(math.nan) is None,
        )
    else:
        broken = SampledLaplace._solve_mode
        monkeypatch.setattr(
            SampledLaplace, "_solve_mode", lambda self, system: broken(self, system.at(math.nan))
        )
    with pytest.raises(MarglikError, match=r"prior's groups? .*0\.weight"):
        posterior.update_prior(task.loader)
    monkeypatch.undo()
    assert torch.equal(task.prior.precision, prior) and torch.equal(posterior.weight_samples, z)
    assert torch.equal(posterior.mode, mode) and posterior.diagnostics() == expected
    assert torch.equal(posterior.predict(task.x), prediction)
    posterior.update_prior(task.loader)
    assert all_finite(posterior, task.loader)


def test_samples_that_moved_before_a_failure_have_to_be_fitted_again(monkeypatch):
    task = Task("signal")
    posterior = task.sampled(3)
    posterior.linear.together = 1
    posterior.fit(task.loader)
    prior, solve, calls = task.prior.precision.detach().clone(), SampledLaplace._move, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return solve(*arguments)

    monkeypatch.setattr(SampledLaplace, "_move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        posterior.update_prior(task.loader)
    assert torch.equal(task.prior.precision, prior)
    with pytest.raises(MarglikError, match="call refit"):
        posterior.predict(task.x)
    posterior.refit(task.loader).predict(task.x)


# ---------------------------------------------------------------------------------- changed weights


def change(posterior, how):
    weight = posterior.model[0].weight
    if how == "added":
        with torch.no_grad():
            weight += 0.1
    elif how == "data":
        weight.data += 0.1
    elif how == "one":
        weight.data[0, 0] = torch.nextafter(
            weight.data[0, 0], torch.tensor(9.0, dtype=weight.dtype)
        )
    elif how == "sign":
        weight.data[0].neg_()
    elif how == "swap":
        weight.data[0] = weight.data[0].flip(0)
    elif how == "replaced":
        posterior.model[0].weight = nn.Parameter(weight.detach() + 0.1)
    elif how == "prior":
        posterior.prior.log_precision.data += 0.1
    else:
        posterior.likelihood.log_sigma.data += 0.1


@pytest.mark.parametrize(
    "how", ["added", "data", "one", "sign", "swap", "replaced", "prior", "noise"]
)
def test_what_has_changed_since_the_fit_is_noticed(how):
    exact = Exact("regression")
    posterior = exact.sampled(2, ROUGH).fit(exact.loader)
    change(posterior, how)
    precision = exact.prior.precision.detach().clone()
    for use in (
        lambda: posterior.update_prior(exact.loader),
        lambda: posterior.log_evidence(exact.loader),
        lambda: posterior.predict(exact.x),
        lambda: posterior.sample_logits(exact.x),
        lambda: posterior.covariance(exact.x),
        lambda: posterior.joint_log_prob(exact.x, exact.y),
    ):
        with pytest.raises(MarglikError, match=r"have changed .* call refit"):
            use()
    assert torch.equal(exact.prior.precision, precision)
    posterior.refit(exact.loader).update_prior(exact.loader)
    posterior.predict(exact.x)


def test_checksums_are_those_of_values():
    values = torch.randn(70_000)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensor = values.to(dtype)
        assert torch.equal(checksum([tensor]), checksum([tensor.clone()]))
        moved = tensor.clone()
        moved[-1] += 1
        assert not torch.equal(checksum([tensor]), checksum([moved]))
    assert len(checksum([values, torch.zeros(0), torch.ones(())])) == 3


# ----------------------------------------------------------------------------------------- NaN data


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what, message", [("x", "input 17"), ("y", "datum 17")])
@pytest.mark.parametrize("solver", [ROUGH, Sgd(tolerance=5.0)])
def test_data_that_are_not_finite_are_named(what, message, value, solver):
    exact = Exact("regression")
    posterior = exact.sampled(2, solver).fit(exact.loader)
    bad = {"x": exact.x.clone(), "y": exact.y.clone()}
    bad[what][17, 0] = value
    loader = list(zip(bad["x"].split(BATCH), bad["y"].split(BATCH), strict=True))
    z, precision = posterior.weight_samples.clone(), exact.prior.precision.detach().clone()
    for use in (
        posterior.refit,
        posterior.update_prior,
        posterior.log_evidence,
        exact.sampled(2, solver).fit,
    ):
        with pytest.raises(Exception, match=message):
            use(loader)
    assert torch.equal(posterior.weight_samples, z) and torch.equal(
        exact.prior.precision, precision
    )
    posterior.update_prior(exact.loader)
    if what == "x":
        for use in (posterior.predict, posterior.sample_logits, posterior.covariance):
            with pytest.raises(Exception, match="input 17 contains NaN or infinity"):
                use(bad["x"])


def test_averaged_curvature_names_the_datum_too():
    exact = Exact()
    posterior = exact.sampled(2, ROUGH, curvature="averaged").fit(exact.loader)
    exact.x[20, 0] = math.nan
    for use in (posterior.refit, posterior.update_prior, posterior.log_evidence):
        with pytest.raises(Exception, match="input 20"):
            use(exact.loader)


class Root(nn.Module):
    """Outputs exp(w x) overflow for large x; the root of |w x| has no derivative at 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 2))

    def forward(self, x):
        return (x @ self.w.T).abs().sqrt() + torch.exp(x @ self.w.T)


def test_outputs_and_derivatives_that_are_not_finite_are_named():
    x, y, model = torch.rand(6, 2) + 0.1, torch.randn(6, 1), Root()
    prior = GaussianPrior(model)
    posterior = SampledLaplace(model, "regression", n_data=6, prior=prior, samples=2).fit([(x, y)])
    large, flat = x.clone(), x.clone()
    large[4], flat[3] = 1e3, 0.0
    for use in (lambda: posterior.predict(large), lambda: posterior.refit([(large, y)])):
        with pytest.raises(Exception, match="output for datum 4 is not finite"):
            use()
    for use in (lambda: posterior.predict(flat), lambda: posterior.refit([(flat, y)])):
        with pytest.raises(MarglikError, match="derivative of the network's output for datum 3"):
            use()
    assert posterior.predict(x).isfinite().all()
    with torch.no_grad():
        prior.log_precision.fill_(math.inf)
    with pytest.raises(MarglikError, match="precision of the prior's group 'w' is not finite"):
        posterior.refit([(x, y)])


# ----------------------------------------------------------------------------------------- evidence


def test_the_interval_is_the_bracket_and_two_standard_errors():
    parts = (torch.tensor(-3.0), torch.tensor(1.0), torch.tensor(2.0), 1.0, "approximation")
    evidence = LadderEvidence(*parts, 0.5, bracket=(-5.0, -4.0))
    assert evidence.interval == (-6.0, -3.0)
    assert "LadderEvidence(total=-4.5 +- 0.5" in repr(evidence) and "interval=(-6, -3)" in repr(
        evidence
    )
    single = LadderEvidence(*parts, None, bracket=(-5.0, -4.0))
    assert single.interval is None and "interval=unknown: one sample" in repr(single)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_interval_covers_the_evidence(kind):
    covered = 0
    for seed in range(10):
        exact = Exact(kind, seed=seed)
        ml = MarginalLikelihood(
            exact.model, exact.likelihood, n_data=N, prior=exact.prior, structure="full"
        )
        truth = ml(exact.x, exact.y).total.item()
        found = (
            exact.sampled(8, ROUGH, seed=seed)
            .fit(exact.loader)
            .log_evidence(exact.loader, at="weights")
        )
        covered += found.interval[0] <= truth <= found.interval[1]
        assert found.interval[0] < found.bracket[0] < found.bracket[1] < found.interval[1]
    assert covered >= 9


# ----------------------------------------------------------------------------- arguments and runner


@pytest.mark.parametrize("name", ["n_data", "samples", "together"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 2.5, "3", None, 0, -1])
def test_counts_are_whole_numbers(name, value):
    exact = Exact()
    options = {"n_data": N, "samples": 2, "together": 1, name: value}
    with pytest.raises(MarglikError, match=f"{name} must be .*at least 1, got"):
        SampledLaplace(exact.model, exact.likelihood, prior=exact.prior, **options)
    options[name] = np.int64(2)
    SampledLaplace(exact.model, exact.likelihood, prior=exact.prior, **options)
    with pytest.raises(MarglikError, match="at must be mode or weights"):
        exact.sampled(1, ConjugateGradients(0.1)).fit(exact.loader).log_evidence(
            exact.loader, at="centre"
        )


@pytest.mark.parametrize("name", ["prior_precision", "effective_dimension"])
def test_the_runner_refuses_to_go_on_with_what_is_not_finite(name, tmp_path, monkeypatch, capsys):
    learn = Sampled.learn

    def broken(self, epoch):
        learned = learn(self, epoch)
        if learned is not None:
            value = {"0.weight": math.nan} if name == "prior_precision" else math.inf
            learned.metrics[name] = value
        return learned

    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)
    monkeypatch.setattr(Sampled, "learn", broken)
    assert main([*FLAGS, "--out", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert (
        "became infinite or NaN in epoch" in message
        and "--em-steps" in message
        and "--lr-hyp" not in message
    )
