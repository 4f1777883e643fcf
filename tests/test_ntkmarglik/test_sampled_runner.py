"""--method sampled: the runner learns the prior by EM, predicts with samples, and resumes."""

import shlex

import pytest
import torch
from killed_runs import kill
from sampled_runs import FLAGS
from tiny_runs import results

from laplace_marglik import SampledLaplace
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.learn.methods.sampled import SampledScore
from ntkmarglik.problem.data import load
from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.classify.config import parse
from ntkmarglik.programs.classify.run import prepare, run

DEATHS = [("run/checkpoint.pt", 2), ("run/metrics.jsonl", 3), ("baseline/checkpoint.pt", 2)]


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)


def test_it_learns_the_prior_and_predicts_beside_the_map(tmp_path, capsys):
    runs = run(parse([*FLAGS, "--out", str(tmp_path / "run")]))
    assert list(runs) == ["sampled-2", "MAP baseline"]
    epochs, summary = runs["sampled-2"]
    learned = [line["prior_precision"] for line in epochs if "prior_precision" in line]
    assert learned and learned[-1] == summary["prior_precision"] == summary["sampled_precision"]
    assert all(value != pytest.approx(0.01) for value in summary["prior_precision"].values())
    assert (
        summary["log_marglik_bracket"][0]
        < summary["log_marglik"]
        < summary["log_marglik_bracket"][1]
    )
    for joint in ("test_joint_log_likelihood", "sampled_test_joint_log_likelihood"):
        assert summary[joint] < 0
    assert summary["sample_error"] > 0 and epochs[-1]["seconds_em_step"] > 0
    for kind in ("sampled", "probit"):
        assert summary[f"{kind}_test_log_likelihood"] < 0 <= summary[f"{kind}_test_ece"] <= 1
    shown = capsys.readouterr().out
    assert (
        "test log-likelihood per datum, sampled" in shown
        and "test joint log-likelihood per datum" in shown
    )
    baseline = runs["MAP baseline"][1]
    assert baseline["log_marglik_structure"] == "sampled" and "sampled_test_ece" in baseline
    assert all(value == pytest.approx(0.01) for value in baseline["prior_precision"].values())


def test_scaled_features_leave_the_training_prior_alone():
    flags = [*FLAGS, "--g-prior", "--exclude", "*.bias", "--preconditioner-rows", "4"]
    problem = prepare(parse(flags), load("digits", "data", n_data=64))
    method = METHODS["sampled"](problem)
    assert (
        isinstance(method.baseline(problem), SampledScore) and not method.baseline(problem).learns()
    )
    posterior = method.posterior
    assert isinstance(posterior, SampledLaplace) and posterior.scaling == "g-prior"
    assert posterior.prior is not problem.prior and posterior.solver.rows == 4
    assert not any(name.endswith("bias") for name in posterior.layout.pieces)


def test_killed_and_resumed_it_ends_in_the_same_numbers(tmp_path):
    eager = [
        *FLAGS,
        "--g-prior",
        "--curvature",
        "averaged",
        "--epochs",
        "4",
        "--checkpoint-seconds",
        "0",
    ]
    assert main([*eager, "--out", str(tmp_path / "first")]) == 0
    arguments = [*eager, "--out", str(tmp_path / "run"), "--resume"]
    kill(DEATHS, arguments)
    assert main(arguments) == 0
    assert results(tmp_path / "run") == results(tmp_path / "first")


def test_what_has_not_converged_is_said_and_marked(tmp_path, capsys):
    flags = [*FLAGS, *shlex.split("--solver sgd --solver-steps 2 --no-baseline --out")]
    summary = run(parse([*flags, str(tmp_path / "run")]))["sampled-2"][1]
    said = capsys.readouterr()
    assert not summary["samples_converged"] and "(not converged)" in said.out
    assert said.err.count("have not converged") == 1 and "--solver-steps" in said.err
    assert "not used with --solver sgd: --solver-passes 3" in said.err


def test_samples_start_from_a_precision_of_their_own():
    flags = [
        *FLAGS,
        *shlex.split("--em-precision 300 --solver-tolerance 1 --burnin 1 --epochs 1"),
    ]
    method = METHODS["sampled"](prepare(parse(flags), load("digits", "data", n_data=64)))
    starts = []
    sample = method.sample
    method.sample = lambda: (starts.append(method.posterior.prior.precision.clone()), sample())
    method.learn(1)
    assert starts[0].detach().allclose(torch.tensor(300.0)) and method.posterior.converged


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--solver-steps -1", ["--solver-steps", "at least 0"]),
        ("--augment affine", ["--method sampled", "--augment none"]),
        ("--samples 0", ["--samples", "greater than 0"]),
        ("--ladder 1", ["--ladder", "at least 2"]),
        ("--memory-budget 1e-6", ["2 posterior samples", "fewer --samples"]),
        ("--exclude conv*", ["'conv*' fits no weight"]),
    ],
)
def test_what_cannot_work_is_refused_before_training(flags, parts, tmp_path, capsys):
    assert main([*FLAGS, "--out", str(tmp_path / "run"), *flags.split()]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ") and all(part in message for part in parts), message
    assert not (tmp_path / "run").exists()


def test_a_dry_run_tells_the_cost(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    assert main([*FLAGS, "--dry-run"]) == 0
    assert "rounds x at most" in capsys.readouterr().out and torch.get_num_threads() == before
    assert not list(tmp_path.iterdir())
