"""The runner as its users meet it: what it prints, writes, refuses and survives."""

import errno
import json
import resource
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import ROOT, TINY, results

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.learn.methods.map import Map
from ntkmarglik.learn.methods.mode import AtMode
from ntkmarglik.learn.schedule import hyper_epochs
from ntkmarglik.learn.train import Trainer
from ntkmarglik.machine import device as machine
from ntkmarglik.problem.data import Dataset, load
from ntkmarglik.problem.models import DEPTH, MODELS
from ntkmarglik.programs.classify import preflight
from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.classify.run import baseline_of, prepare, run
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.folder import RunFolder
from ntkmarglik.runs.metrics import read_metrics
from ntkmarglik.runs.summary import summarise

SUMMARY = [
    "method",
    "subset",
    "outputs",
    "seed",
    "n_data",
    "n_parameters",
    "test_accuracy",
    "test_log_likelihood",
    "test_ece",
    "train_log_likelihood",
    "log_marglik",
    "log_marglik_status",
    "seconds_total",
    "seconds_weights",
    "seconds_hyper",
    "peak_memory_bytes",
    "prior_precision",
    "augmentation",
    "versions",
    "commit",
]
METRICS = [
    "epoch",
    "loss",
    "map_gradient_norm",
    "log_marglik",
    "log_marglik_error",
    "log_marglik_status",
    "evidence_log_likelihood",
    "evidence_scatter",
    "evidence_log_det_ratio",
    "prior_precision",
    "train_log_likelihood",
    "test_log_likelihood",
    "test_accuracy",
    "seconds_weights",
    "seconds_hyper",
    "peak_memory_bytes",
]


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def undrawn(monkeypatch):
    """Without figure and page, which take most of the time of a tiny run and have own tests."""
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)


# -------------------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_what_it_promises(out, capsys):
    assert main([*TINY, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "ntk-16-5" in printed.out and "MAP baseline" in printed.out and str(out) in printed.out
    # no progress bar without a terminal
    unused = "--aug-samples 2, --aug-steps 2"
    assert printed.err == f"warning: not used with --method ntk and --augment none: {unused}\n"
    files = {"config.yaml", "metrics.jsonl", "summary.json"}
    files |= {"checkpoint.pt", "checkpoint.previous.pt"}
    assert {p.name for p in out.iterdir()} == files | {"figure.png", "report.html", "baseline"}
    assert {p.name for p in (out / "baseline").iterdir()} == files
    (learned, fixed), (epochs, _) = results(out)
    whole = json.loads((out / "summary.json").read_text())
    assert set(SUMMARY) <= set(whole)
    assert whole["seconds_total"] > whole["seconds_weights"] + whole["seconds_hyper"] > 0
    assert [line["epoch"] for line in epochs] == [1, 2, 3] and set(METRICS) <= set(
        read_metrics(out)[-1]
    )
    assert (learned["method"], fixed["method"], learned["augmentation"]) == ("ntk", "map", None)
    assert list(fixed["prior_precision"].values()) == pytest.approx(
        [Config().hyperparameters.prior_precision] * 4
    )
    assert len(set(learned["prior_precision"].values())) == len(learned["prior_precision"]) == 4
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert state["epoch"] == 3
    assert parse(["--config", str(out / "config.yaml")]).estimator.subset == 16


def test_two_runs_of_a_seed_are_identical_and_other_seeds_are_not(tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    affine = [*TINY, "--augment", "affine", "--flip"]
    for seed in ("0", "0", "1"):
        assert main([*affine, "--seed", seed]) == 0
    name = "runs/digits-mlp-ntk-16-5-seed"
    first, second, other = (results(Path(f"{name}{suffix}")) for suffix in ("0", "0.2", "1"))
    assert first == second and first[0][0]["augmentation"] is not None
    assert first[0][0]["log_marglik"] != other[0][0]["log_marglik"]


def test_an_existing_run_is_not_overwritten(out, capsys, undrawn):
    arguments = [*TINY, "--method", "map", "--epochs", "1", "--out", str(out)]
    assert main(arguments) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err
    assert before == {p.name: p.read_bytes() for p in out.iterdir()}


SETTINGS = {
    "kfac, all data and outputs": "--method kfac --subset 0 --outputs 0",
    "kfac reduce, all data": "--method kfac --kfac reduce --subset 0",
    "a precision per weight": "--prior diagonal",
    "one precision": "--prior scalar --method blockdiag",
    "layers with the same parent": "--method blockdiag --weight-blocks parent",
    "float64": "--precision float64 --method full",
    "true root, own outputs, by class": "--root eigen --columns iid --partition class",
    "gradients of the data": "--root empirical --outputs 1 --augment affine",
    "gradients of drawn labels": "--root sampled --root-samples 2 --outputs 0 --method kfac",
    "gradients, conditioned": "--root sampled --outputs 1 --inducing 0.5",
    "a fixed temperature": "--temperature 0.5 --method kfac",
    "a learned temperature": "--temperature 0.5 --learn-temperature",
    "sgd": "--optimizer sgd --model resnet --depth 10 --width 2 --lr 0.1",
    "augmentation, blocks": "--augment affine",
    "augmentation, all data": "--augment affine --subset 0 --outputs 0 --aug-steps 1",
    "augmentation without prior steps": "--augment affine --prior-steps 0 --method kfac",
    "augmentation of all data by kfac": "--augment affine --flip --subset 0 --method kfac",
}


@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_combinations_run(flags, out, undrawn):
    config = parse([*TINY, "--epochs", "2", "--no-baseline", "--out", str(out), *flags.split()])
    ((epochs, summary),) = run(config).values()
    assert summary["log_marglik"] < 0 and epochs[-1]["log_marglik"] < 0
    learned = config.hyperparameters.learn_temperature
    temperature = pytest.approx(config.hyperparameters.temperature)
    assert (summary["temperature"] == temperature) != learned
    assert ("temperature" in epochs[-1]) == learned
    if config.hyperparameters.augment == "affine":
        assert summary["augmentation"] != [config.hyperparameters.aug_init] * 6
    start, values = config.hyperparameters.prior_precision, summary["prior_precision"].values()
    assert any(v != pytest.approx(start) for v in values) == (config.training.prior_steps > 0)


def test_the_baseline_learns_nothing_and_is_measured_like_the_run():
    config = parse([*TINY, "--augment", "affine", "--method", "kfac"])
    fixed = baseline_of(config)
    assert (fixed.estimator.method, fixed.hyperparameters.augment) == ("map", "none")
    flipped = baseline_of(config.updated(flip=True))
    assert (flipped.hyperparameters.augment, flipped.hyperparameters.aug_init) == ("affine", 0.0)
    problem = prepare(fixed, load("digits", "data", n_data=64))
    assert (
        Map(problem, METHODS["kfac"](prepare(config, problem.data)).structure).ml.structure
        == "kfac"
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_temperature_divides_the_log_likelihood_of_every_loss(method):
    data = load("digits", "data", n_data=16)
    losses = []
    for temperature in (1.0, 0.25):
        config = Config().updated(
            method=method, model="mlp", width=4, n_data=16, subset=8, temperature=temperature
        )
        if method == "augerino":
            config = config.updated(augment="affine", aug_samples=2)
        own = METHODS[method](prepare(config, data))
        losses.append(own.loss(data.x_train, data.y_train).item())
    f = own.outputs(data.x_train)
    log_p = f.log_softmax(1).gather(1, data.y_train[:, None]).mean().item()
    # weights of variational posteriors and copies are drawn
    assert losses[1] - losses[0] == pytest.approx(-3 * log_p, rel=0.05)


def test_a_temperature_is_learned_by_the_evidence_alone(out, capsys, undrawn):
    assert main([*TINY, "--method", "elbo", "--learn-temperature", "--out", str(out)]) == 2
    assert "grows without limit" in capsys.readouterr().err
    flags = ["--method", "map", "--learn-temperature", "--temperature", "2", "--epochs", "1"]
    assert main([*TINY, *flags, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "--learn-temperature" in printed.err and "temperature" in printed.out
    assert json.loads((out / "summary.json").read_text())["temperature"] == pytest.approx(2)
    config = parse([*TINY, "--learn-temperature"])
    fixed = prepare(baseline_of(config), load("digits", "data", n_data=64))
    assert not fixed.likelihood.log_temperature.requires_grad


# ------------------------------------------------------------------------------ every model, method

SMALL = {"mlp": 8, "resnet": 2, "resnet50": 4, "wrn": 1, "resnet_norm": 2}


@pytest.mark.filterwarnings("ignore:the targets hold no signal")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_two_steps_with_every_method(model, method, tmp_path):
    few = load("digits", "data", n_data=8)
    data = Dataset("digits", few.x_train, few.y_train, few.x_test[:8], few.y_test[:8], 10)
    config = Config().updated(
        model=model,
        method=method,
        width=SMALL.get(model, 0),
        depth=10 if "depth" in MODELS[model].uses else DEPTH,
        n_data=8,
        batch_size=4,
        subset=4,
        outputs=10,
        epochs=1,
        burnin=1,
        frequency=1,
        prior_steps=1,
        samples=1,
        solver_passes=1,
        ladder=2,
    )
    problem = prepare(config, data)
    preflight.check_sizes(config, problem)
    trainer = Trainer(problem, METHODS[method](problem))
    trainer.run(RunFolder(tmp_path, config))
    learned = trainer.method.learns_by == "evidence" or "elbo" in method
    assert trainer.steps["weights"] == 2 and ("log_marglik" in read_metrics(tmp_path)[0]) == learned
    assert torch.tensor(summarise(trainer)["log_marglik"]).isfinite()


# ---------------------------------------------------------------------------------- before training


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--subset 65", ["--subset 65", "64 training", "--subset 64"]),
        ("--outputs 11", ["--outputs 11", "10 classes", "--outputs 10"]),
        ("--root empirical", ["--root empirical", "leave out --outputs"]),
        ("--root sampled --outputs 1 --columns iid", ["--root sampled", "--columns"]),
        ("--root-samples 2", ["--root-samples 2", "--root sampled", "auto"]),
        ("--n-data 2000", ["2000", "1437"]),
        ("--dataset mnist --data-root nowhere", ["nowhere/mnist", "train-images-idx3-ubyte.gz"]),
        ("--dataset mnits", ["'mnits'", "'mnist'"]),
        ("--subset 64 --outputs 10 --memory-budget 1e-3", ["64 data", "--outputs 1 or", "kfac"]),
        (
            "--method full --subset 64 --memory-budget 1e-4",
            ["full", "--subset ", "--memory-budget"],
        ),
        ("--model resnet --depth 20", ["20", "18"]),
        ("--burnin 9", ["--epochs 3", "--burnin 1 --frequency 1", "--method map"]),
        ("--lr 0", ["--lr", "greater than 0"]),
        ("--frequency 0", ["--frequency", "greater than 0"]),
        ("--lr-hyp nan", ["--lr-hyp", "nan"]),
        ("--flip", ["--flip", "--augment affine"]),
        ("--threads -1", ["--threads", "-1"]),
        ("--threads 99999999", ["--threads", "at most 1024"]),
        ("--width 2000000000", ["--width 2000000000", "weights", "GB are free"]),
        ("--batch-size 64 --augment affine --aug-samples 2000000000", ["copies", "--aug-samples"]),
        ("--dataset ../..", ["Unknown data set"]),
    ],
)
def test_what_cannot_work_is_refused_before_training(flags, parts, out, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([*TINY, "--out", str(out), *flags.split()]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ") and all(part in message for part in parts), message
    assert not out.exists()


FIRST_TRY = shlex.split(
    "--n-data 20 --epochs 1 --burnin 1 --frequency 1 --model mlp --width 4 --prior-steps 1 "
    "--aug-samples 2 --augment affine --solver-passes 2 --ladder 2 --samples 1"
)


@pytest.mark.filterwarnings("ignore:the targets hold no signal")
@pytest.mark.parametrize("method", METHODS)
def test_a_small_first_try_works_with_every_method(method, out, capsys, undrawn):
    augment = [] if method != "sampled" else ["--augment", "none"]
    assert main([*FIRST_TRY, "--method", method, "--out", str(out), *augment]) == 0
    config = Config().updated(method=method)
    most = 180 if config.estimator.inducing else 20  # rows of ten classes less one, or data
    default = config.estimator.subset
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    if "subset" in METHODS[method].uses(config):
        assert len(notes) == 1 and f"--subset {default}" in notes[0] and f"{most}" in notes[0]
    else:
        assert not notes
    stored = yaml.safe_load((out / "config.yaml").read_text())
    assert stored["subset"] == most
    again = [*FIRST_TRY, "--method", method, "--out", str(out), *augment, "--resume"]
    assert main(again) == 0


def test_a_subset_that_is_asked_for_stays(out, capsys, undrawn, tmp_path):
    (tmp_path / "own.yaml").write_text("subset: 500\n")
    for flags in (["--subset", "500"], ["--subset=500"], ["--config", str(tmp_path / "own.yaml")]):
        assert main([*FIRST_TRY, "--method", "map", "--out", str(out), *flags]) == 2
        assert "--subset 500, but there are 20 training data" in capsys.readouterr().err
    unused = ["--method", "elbo", "--no-baseline", "--subset", "400"]
    assert main([*FIRST_TRY, *unused, "--out", str(out)]) == 0
    assert "not used with --method elbo" in capsys.readouterr().err


def test_the_subset_that_is_suggested_for_the_memory_is_accepted(out, capsys):
    tight = [
        *TINY,
        "--n-data",
        "640",
        "--subset",
        "640",
        "--memory-budget",
        "0.01",
        "--out",
        str(out),
        "--dry-run",
    ]
    assert main(tight) == 2
    suggested = capsys.readouterr().err.split("--subset ")[1].split()[0]
    assert main([*tight, "--subset", suggested]) == 0
    with pytest.raises(NtkMarglikError, match="Nothing smaller fits"):
        run(parse([*tight, "--memory-budget", "1e-7"]))


def test_a_larger_memory_budget_reaches_the_library(out):
    problems = []
    for flags in ([], ["--memory-budget", "1e6"]):
        config = parse([*TINY, "--out", str(out), *flags])
        problems.append(prepare(config, load("digits", "data", n_data=64)))
    assert [p.marginal_likelihood("ntk").memory_budget for p in problems] == [None, 1e15]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--method kfac --subset 0 --augment affine",
        "--method map",
        "--root sampled --root-samples 2 --outputs 1",
    ],
)
def test_a_dry_run_tells_sizes_and_writes_nothing(flags, out, capsys):
    assert main([*TINY, "--dry-run", *flags.split()]) == 0
    printed = capsys.readouterr().out
    for part in (
        "epochs: 3",
        "64 training",
        "610 parameters",
        "rows",
        "GB allowed",
        "3 epochs x 2 steps",
        "s in all",
    ):
        assert part in printed, part
    assert list(out.parent.iterdir()) == []


def test_a_small_network_gets_one_thread(monkeypatch):
    config = parse(TINY)
    data = load("digits", "data", n_data=64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert machine.threads_for(config, data, 610) == 1
    assert machine.threads_for(config, data, 1_000_000) == 8
    augmented = config.updated(augment="affine", aug_samples=1000)
    assert machine.threads_for(augmented, data, 610) == 8
    assert machine.threads_for(config.updated(threads=3), data, 610) == 3
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert machine.threads_for(config, data, 1_000_000) == 7  # a core for the other programs


def test_blocks_are_drawn_independently_of_batches():
    problem = prepare(parse(TINY), load("digits", "data", n_data=64))
    batches = Trainer(problem, Map(problem)).batches
    assert not torch.equal(
        torch.randperm(64, generator=problem.generator), torch.randperm(64, generator=batches)
    )


def test_rounds_follow_burnin_and_frequency():
    training = Config().updated(epochs=21, burnin=10, frequency=5).training
    assert list(hyper_epochs(training)) == [10, 15, 20]


# ------------------------------------------------------------------------------ what a run survives


def test_a_loss_that_is_not_a_number_ends_the_run_and_keeps_the_metrics(out, capsys, monkeypatch):
    loss = AtMode.loss

    def failing(self, x, y):
        self.calls = getattr(self, "calls", 0) + 1
        return loss(self, x, y) * (float("nan") if self.calls > 4 else 1)

    monkeypatch.setattr(AtMode, "loss", failing)
    assert main([*TINY, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "weights are not finite after epoch 3" in message and "up to epoch 2" in message
    assert "A smaller --lr " in message and "prior" not in message.splitlines()[-1]
    assert [line["epoch"] for line in read_metrics(out)] == [1, 2]
    # the next would have been due later
    assert checkpoint.load(out / "checkpoint.pt")["epoch"] == 1


def test_an_absurd_learning_rate_is_an_error_message(out, capsys):
    assert main([*TINY, "--lr", "1e30", "--out", str(out)]) == 2
    assert main([*TINY, "--lr-hyp", "1e30", "--out", str(out) + "2"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_a_full_disk_costs_files_but_not_the_result(tmp_path):
    """Really full: the process may write files of 500 bytes only."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))"
    code = (
        f"{limit}\nimport sys\nfrom ntkmarglik.programs.classify.command import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *TINY, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    assert "checkpoint.pt, config.yaml, metrics.jsonl, summary.json" in done.stderr.splitlines()[-1]
    assert "test accuracy" in done.stdout and "MAP baseline" in done.stdout
    for name in ("checkpoint.pt", "metrics.jsonl", "summary.json", "figure.png"):
        assert done.stderr.count(str(tmp_path / "run" / name)) == 1  # said once
    assert not list(tmp_path.rglob("*.partial"))


def test_lines_that_found_no_room_are_written_when_there_is_some(out, monkeypatch):
    folder = RunFolder(out, Config())
    folder.log({"epoch": 1})
    full = OSError(errno.ENOSPC, "No space left on device")

    def cut_off(path, text):
        path.write_text(path.read_text() + text[:5])
        raise full

    monkeypatch.setattr("ntkmarglik.runs.folder._append", cut_off)
    folder.log({"epoch": 2})
    assert [line["epoch"] for line in read_metrics(out)] == [1]
    folder.log({"epoch": 3})
    assert read_metrics(out) == folder.epochs == [{"epoch": 1}, {"epoch": 2}, {"epoch": 3}]


@pytest.mark.parametrize("fails", ["import", "init", "log", "finish", "never"])
def test_wandb_never_stops_a_run(fails, out, capsys, monkeypatch, undrawn):
    class Fake(types.ModuleType):
        summary: dict = {}
        logged: list = []

        def _step(self, name):
            if fails == name:
                raise ConnectionError(f"{name} failed")

        def login(self, *, prompt, verify):
            assert not prompt and not verify  # there may be nobody to ask, and no network
            return False

        def init(self, mode, **_):
            assert mode == "offline"  # nobody is logged in: it must not ask
            self._step("init")
            return self

        def log(self, metrics, step):
            self._step("log")
            self.logged.append(metrics)

        def finish(self):
            self._step("finish")

    fake = Fake("wandb")
    monkeypatch.setitem(sys.modules, "wandb", None if fails == "import" else fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert main([*TINY, "--method", "map", "--wandb", "--tensorboard", "--out", str(out)]) == 0
    assert ("warning: Wandb" in capsys.readouterr().err) == (fails != "never")
    assert (out / "summary.json").exists() and len(read_metrics(out)) == 3
    if fails == "never":
        assert fake.logged[0]["loss"] == read_metrics(out)[0]["loss"] and "test_ece" in fake.summary


def test_no_git_is_no_commit(monkeypatch):
    from ntkmarglik.runs.summary import commit

    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_peak_memory_is_that_of_the_process():
    used = machine.peak_memory(torch.device("cpu"))
    assert 2**26 < used <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
