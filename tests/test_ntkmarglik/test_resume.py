"""A run that is killed, at whatever moment, and resumed ends in the numbers of one that was not,
bit for bit.
"""

import json
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from killed_runs import ENVIRONMENT, ROOT, kill
from tiny_runs import TINY, results

from ntkmarglik.learn.methods.laplace import Laplace
from ntkmarglik.learn.train import Trainer
from ntkmarglik.programs.classify.command import main
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.metrics import read_metrics

EAGER = [*TINY, "--checkpoint-seconds", "0"]
VARIANTS = {
    "prior": shlex.split("--epochs 4 --eval-every 2 --temperature 0.7 --learn-temperature"),
    "conditioned": shlex.split(
        "--method ntk-conditioned --subset 12 --outputs 1 --epochs 4 --steps-per-block 2 "
        "--root sampled --root-samples 2"
    ),
    "augmentation": shlex.split("--epochs 4 --augment affine --flip --model mininet --width 0"),
}
# in this order, each continuing after the one before: file, number of its writes that it survives +
# 1
DEATHS = [
    ("run/config.yaml", 1),
    ("run/metrics.jsonl", 2),  # the first makes the empty file; there is no checkpoint yet
    ("run/checkpoint.pt", 1),
    ("run/checkpoint.pt", 3),
    ("run/metrics.jsonl", 3),
    ("run/summary.json", 1),
    ("baseline/checkpoint.pt", 2),
    ("baseline/metrics.jsonl", 2),
    ("baseline/summary.json", 1),
]


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """Flags of a run, and what it computes when nothing happens to it."""
    path = tmp_path_factory.mktemp("uninterrupted") / "run"
    flags = [*EAGER, *VARIANTS[request.param]]
    assert main([*flags, "--out", str(path)]) == 0
    return flags, results(path)


def contents(path):
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def test_killed_again_and_again_while_writing(variant, tmp_path):
    flags, expected = variant
    arguments = [*flags, "--out", str(tmp_path / "run"), "--resume"]
    kill(DEATHS, arguments)
    assert list(tmp_path.rglob("*.partial"))
    assert main(arguments) == 0
    assert results(tmp_path / "run") == expected
    assert not list(tmp_path.rglob("*.partial"))


def test_killed_from_outside_while_training(variant, tmp_path):
    flags, expected = variant
    arguments = [*flags, "--out", str(tmp_path / "run")]
    command = [sys.executable, str(ROOT / "classification_image.py"), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    while len(read_metrics(tmp_path / "run")) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert main([*arguments, "--resume"]) == 0
    assert results(tmp_path / "run") == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stop", [2, 6])
def test_an_interrupt_saves_the_epoch_it_falls_in(
    variant, number, stop, tmp_path, monkeypatch, capsys
):
    """Once in the run and once in its baseline; the epochs of both are counted."""
    flags, expected = variant
    path, epoch, count = tmp_path / "run", Trainer._epoch, 0

    def interrupted(self):
        nonlocal count
        count += 1
        if count == stop:
            signal.raise_signal(number)
        return epoch(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_epoch", interrupted)
        assert main([*flags, "--out", str(path)]) == 130
    said = capsys.readouterr().err
    assert "stopping after this epoch" in said and f"--resume --out {path}" in said
    folder = path if stop == 2 else path / "baseline"
    assert checkpoint.load(folder / "checkpoint.pt")["epoch"] == len(read_metrics(folder)) == 2
    assert main([*flags, "--out", str(path), "--resume"]) == 0
    assert results(path) == expected


def test_a_second_interrupt_stops_at_once(tmp_path, monkeypatch):
    def interrupted(self, round_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Laplace, "learn", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main([*EAGER, "--out", str(tmp_path / "run")]) == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_resuming_a_finished_run_reads_it(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    assert main([*EAGER, "--out", str(path)]) == 0
    table, before = capsys.readouterr().out, contents(path)
    monkeypatch.setattr(Trainer, "run", lambda *_: pytest.fail("trained again"))
    assert main([*EAGER, "--out", str(path), "--resume"]) == 0
    assert capsys.readouterr().out == table and contents(path) == before


def test_a_baseline_can_be_added_later(tmp_path):
    path = tmp_path / "run"
    assert main([*EAGER, "--out", str(path), "--no-baseline"]) == 0
    before = contents(path)
    assert main([*EAGER, "--out", str(path), "--resume"]) == 0
    after = contents(path)
    assert before == {name: after[name] for name in before} and "baseline/summary.json" in after


def test_seconds_go_on_counting(tmp_path, monkeypatch):
    path = tmp_path / "run"
    assert main([*EAGER, "--method", "map", "--out", str(path)]) == 0
    state = checkpoint.load(path / "checkpoint.pt")
    state["seconds"] = {"total": 1000.0, "weights": 600.0, "hyper": 0.0}
    checkpoint.save(path / "checkpoint.pt", state)
    (path / "summary.json").unlink()
    assert main([*EAGER, "--method", "map", "--out", str(path), "--resume"]) == 0
    summary = json.loads((path / "summary.json").read_text())
    assert 1000 < summary["seconds_total"] < 1010 and summary["seconds_weights"] == 600


# ------------------------------------------------------------------------------ what is not resumed


def damaged(path):
    path.write_bytes(path.read_bytes()[:-200])


def empty(path):
    path.write_bytes(b"")


def foreign(path):
    torch.save({"epoch": 3, "model": {}}, path)


def a_pickle(path):
    torch.save({"format": checkpoint.FORMAT, "function": damaged}, path)


def text(path):
    path.write_text("not a checkpoint")


@pytest.mark.parametrize("spoil", [damaged, empty, foreign, a_pickle, text])
def test_a_checkpoint_that_is_none_leaves_everything_untouched(spoil, tmp_path, capsys):
    path = tmp_path / "run"
    assert main([*EAGER, "--method", "map", "--out", str(path)]) == 0
    spoil(path / "checkpoint.pt")
    checkpoint.previous(path / "checkpoint.pt").unlink()  # else the run goes on from there
    before = contents(path)
    assert main([*EAGER, "--method", "map", "--out", str(path), "--resume", "--tensorboard"]) == 2
    message = capsys.readouterr().err
    assert "checkpoint.pt" in message and "--out" in message
    assert contents(path) == before


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, capsys):
    """The run ends in the same numbers, from an earlier epoch."""
    whole, path = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, path):
        assert main([*EAGER, "--method", "map", "--out", str(folder)]) == 0
    damaged(path / "checkpoint.pt")
    (path / "summary.json").unlink()
    assert main([*EAGER, "--method", "map", "--out", str(path), "--resume"]) == 0
    assert "the one before" in capsys.readouterr().err
    assert results(path) == results(whole)


def test_a_run_with_other_settings_is_not_continued(tmp_path, capsys):
    path = tmp_path / "run"
    assert main([*EAGER, "--method", "map", "--out", str(path)]) == 0
    before = contents(path)
    assert main([*EAGER, "--method", "map", "--out", str(path), "--resume", "--lr", "0.5"]) == 2
    message = capsys.readouterr().err
    assert "lr = 0.005" in message and "0.5" in message and "config.yaml" in message
    assert contents(path) == before
    free = ["--threads", "1", "--device", "cpu", "--checkpoint-seconds", "5"]
    assert main(["--config", str(path / "config.yaml"), "--out", str(path), "--resume", *free]) == 0


def test_a_finished_run_without_checkpoint_is_not_started_again(tmp_path, monkeypatch):
    path = tmp_path / "run"
    assert main([*EAGER, "--method", "map", "--out", str(path)]) == 0
    for file in path.glob("checkpoint*"):
        file.unlink()
    before = contents(path)
    monkeypatch.setattr(Trainer, "run", lambda *_: pytest.fail("it was started again"))
    assert main([*EAGER, "--method", "map", "--out", str(path), "--resume"]) == 0
    assert contents(path) == before


def test_without_a_name_the_last_run_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = [*EAGER, "--method", "map", "--epochs", "1"]
    assert main([*quick, "--resume"]) == main(quick) == 0
    (tmp_path / "runs/digits-mlp-map-seed0.2/summary.json").unlink()
    assert main([*quick, "--resume"]) == 0
    assert (
        sorted(p.name for p in (tmp_path / "runs").glob("*/summary.json")) == ["summary.json"] * 2
    )
    assert "there is no checkpoint" in capsys.readouterr().err
