"""Runs of elbo and de-elbo: records, resuming, comparison and refusals."""

import contextlib

import pytest
import torch
from killed_runs import kill
from tiny_runs import TINY, results
from trained_runs import DEATHS, trained

from ntkmarglik.problem.data import load
from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.classify.config import parse
from ntkmarglik.programs.classify.run import run
from ntkmarglik.programs.paper.experiments import estimator, label_of
from ntkmarglik.runs.metrics import read_metrics

DE_ELBO = [*TINY, "--method", "de-elbo"]


def test_a_run_records_the_bound_the_prior_and_the_width(tmp_path, capsys):
    out = tmp_path / "run"
    runs = run(parse([*DE_ELBO, "--out", str(out)]))
    printed = capsys.readouterr().out
    assert (
        "a lower bound (ELBO)" in printed
        and "posterior width sigma" in printed
        and "emphasis kappa" in printed
    )
    assert list(runs) == ["de-elbo", "MAP baseline"] and (out / "figure.png").stat().st_size > 5000
    epochs, summary = runs["de-elbo"]
    n_weights = summary["n_parameters"]
    assert summary["kappa"] == n_weights / 64 and summary["log_marglik_structure"] == "elbo"
    assert summary["emphasised_elbo"] < summary["log_marglik"] and summary["log_marglik_error"] > 0
    assert (
        runs["MAP baseline"][1]["log_marglik_structure"] == "ntk"
        and "sigma" not in runs["MAP baseline"][1]
    )
    assert len(epochs) == 3
    for line in epochs:
        assert {"log_marglik", "sigma", "kappa", "emphasised_elbo", "prior_precision"} <= set(line)
    widths = [line["sigma"]["1.weight"] for line in epochs]
    assert len(set(widths)) == 3 and len(set(epochs[-1]["sigma"].values())) == 1
    assert len(set(summary["prior_precision"].values())) == 4
    assert summary["prior_precision"] == pytest.approx(epochs[-1]["prior_precision"])


def test_the_reported_prior_is_the_closed_form():
    trainer = trained([*DE_ELBO, "--precision", "float64", "--posterior", "group"], load_digits())
    method, weights = trainer.method, dict(trainer.problem.model.named_parameters())
    method.evidence()
    sigma = dict(zip(weights, method.objective.sigma.tolist(), strict=True))
    for name, precision in trainer.problem.prior.precisions().items():
        assert 1 / precision.item() == pytest.approx(
            weights[name].square().mean().item() + sigma[name] ** 2
        )
    assert (
        trainer.steps == {"weights": 6, "prior": 6, "augment": 0} and len(set(sigma.values())) == 4
    )


def load_digits():
    return load("digits", "data", n_data=64, dtype=torch.float64)


@pytest.mark.parametrize(
    "flags", ["--posterior diagonal --prior diagonal", "--augment affine --antithetic"]
)
def test_other_posteriors_and_augmentations_train(flags):
    data = load("digits", "data", n_data=64)
    trainer = trained([*DE_ELBO, *flags.split()], data)
    assert torch.isfinite(trainer.method.evidence().total)
    if trainer.problem.augment is not None:
        assert trainer.problem.augment.eta.tolist() != [0.05] * 6 and trainer.steps["augment"] == 6


def test_evaluations_do_not_change_the_training():
    data = load("digits", "data", n_data=64)
    rare, often = (trained([*DE_ELBO, "--eval-every", n], data) for n in ("3", "1"))
    assert all(map(torch.equal, rare.problem.model.parameters(), often.problem.model.parameters()))


def test_learning_digits_by_the_emphasised_elbo():
    flags = [
        "--method",
        "de-elbo",
        "--model",
        "mlp",
        "--width",
        "32",
        "--epochs",
        "25",
        "--eval-every",
        "25",
    ]
    trainer = trained(flags, load("digits", "data"))
    assert trainer.evaluate("test")["accuracy"] > 0.85


def test_killed_and_resumed_it_ends_in_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)
    eager = [
        *DE_ELBO,
        "--posterior",
        "group",
        "--epochs",
        "4",
        "--checkpoint-seconds",
        "0",
        "--eval-every",
        "2",
    ]
    assert main([*eager, "--out", str(tmp_path / "whole")]) == 0
    arguments = [*eager, "--out", str(tmp_path / "run"), "--resume"]
    kill(DEATHS, arguments)
    assert main(arguments) == 0
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    # another run
    assert main([*eager, "--kappa", "2", "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert [line["epoch"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--method elbo --kappa 5", ["--kappa 5", "de-elbo"]),
        ("--method de-elbo --kappa -1", ["--kappa", "at least 0"]),
        ("--method de-elbo --sigma 0", ["--sigma", "greater than 0"]),
        ("--method de-elbo --posterior full", ["--posterior", "'full'"]),
    ],
)
def test_what_cannot_be_is_refused(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) if "full" in flags else contextlib.nullcontext():
        assert main([*TINY, "--out", str(tmp_path / "run"), *flags.split()]) == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(word in message for word in words) and not (tmp_path / "run").exists()


def test_names():
    for name in ("elbo", "de-elbo"):
        assert estimator(name.upper()) == {"method": name}
        assert label_of(parse(["--method", name])) == name
    assert main([*DE_ELBO, "--dry-run"]) == 0
