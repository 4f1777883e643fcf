"""Predictions of the posterior beside the network's own, in runs."""

import json

import pytest
import torch
from tiny_runs import TINY
from torch import nn

from laplace_marglik import GaussianPrior, MarginalLikelihood
from ntkmarglik.learn.evaluate import calibration_error, metrics, reliability
from ntkmarglik.learn.predictive import posterior_scores
from ntkmarglik.programs.classify.command import main

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long()
BATCHES = list(zip(X.split(15), Y.split(15), strict=True))


def marglik(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    prior = GaussianPrior(model, "layerwise")
    return MarginalLikelihood(model, "classification", n_data=40, prior=prior, **options)


@pytest.mark.parametrize("structure", ["kfac", "diag", "full", "blockdiag"])
def test_the_scores_are_those_of_the_posteriors_predictions(structure):
    ml = marglik(structure=structure)
    with torch.no_grad():
        logits = ml.model(X)
    found = posterior_scores(ml, structure, BATCHES, BATCHES, logits)
    want = metrics(ml.posterior(BATCHES).predict(X).log(), Y)
    assert found["probit_test_log_likelihood"] == pytest.approx(want["log_likelihood"])
    assert found["probit_test_ece"] == pytest.approx(want["ece"])
    assert found["probit_test_size"] == 40
    assert found["reliability"]["network"] == reliability(logits.softmax(1), Y)


def test_a_posterior_that_does_not_fit_costs_its_numbers_only():
    ml = marglik(structure="full", memory_budget=1000)
    found = posterior_scores(ml, "full", BATCHES, BATCHES, ml.model(X).detach())
    assert list(found) == ["probit_note"] and "memory" in found["probit_note"]


def test_reliability_and_calibration_error_are_of_the_same_bins(generator):
    p = torch.rand(500, 3, generator=generator).softmax(1)
    y = torch.randint(3, (500,), generator=generator)
    bins = reliability(p, y)
    assert sum(share for *_, share in bins) == pytest.approx(1)
    error = sum(share * abs(confidence - accuracy) for confidence, accuracy, share in bins)
    assert error == pytest.approx(calibration_error(p, y))


def summary(path, *flags):
    assert main([*TINY, *flags, "--out", str(path)]) == 0
    return json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize("method", ["ntk", "kfac", "diag", "full"])
def test_a_run_that_learned_a_prior_reports_them(method, tmp_path, capsys):
    found = summary(tmp_path, "--method", method)
    assert found["probit_test_log_likelihood"] < 0 <= found["probit_test_ece"]
    assert found["probit_test_size"] == 360
    assert {"network", "posterior"} == set(found["reliability"])
    assert "posterior (probit)" in capsys.readouterr().out
    baseline = json.loads((tmp_path / "baseline/summary.json").read_text())
    assert "probit_test_ece" not in baseline
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_they_can_be_left_out(tmp_path, capsys):
    found = summary(tmp_path, "--predict", "none", "--no-baseline")
    assert "reliability" not in found and "posterior (probit)" not in capsys.readouterr().out


def test_with_augmentation(tmp_path):
    found = summary(tmp_path, "--method", "kfac", "--augment", "affine", "--no-baseline")
    assert found["probit_test_log_likelihood"] < 0


def test_a_variational_posterior_predicts_by_its_draws(tmp_path, capsys):
    found = summary(tmp_path, "--method", "de-elbo", "--no-baseline")
    assert found["sampled_test_log_likelihood"] < 0
    assert "log-likelihood per datum, sampled" in capsys.readouterr().out
