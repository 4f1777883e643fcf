"""Several ranks compute what one does, and lose nothing when one of them dies or hangs; all by real torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from distributed_runs import RUNS, differences
from test_runner import results

from ntkmarglik import checkpoint
from ntkmarglik.run import main
from ntkmarglik.track import read_metrics

ROOT = Path(__file__).parent.parent
PATHS = [ROOT, ROOT / "tests", ROOT / "dependencies/asdl", ROOT / "dependencies/laplace"]
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]),
}  # fmt: skip
LIBRARY = ("estimates", "blocks", "samples", "bounds", "refusals")
LONG = [
    *("--model", "mlp", "--width", "6", "--n-data", "49", "--subset", "16", "--epochs", "150", "--burnin", "1"),
    *("--frequency", "5", "--prior-steps", "1", "--batch-size", "24", "--precision", "float64", "--lr", "1e-3"),
    *("--blocks-per-step", "2", "--checkpoint-seconds", "0", "--eval-every", "50", "--no-baseline", "--threads", "1"),
]


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    monkeypatch.setattr("ntkmarglik.report.save", lambda *_, **__: None)


def torchrun(ranks, *arguments, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )


def check(ranks, folder, *names):
    process = torchrun(ranks, ROOT / "tests/distributed_programs.py", folder, *names)
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    assert [name for name in names if f"{name}: " in said] == list(names)


@pytest.mark.parametrize(
    "ranks, names",
    [
        (2, [*LIBRARY, *(name for name in RUNS if name != "sampled-sgd")]),
        (3, ["wide", "blocks", "ntk", "ntk-large", "kfac", "elbo", "sampled"]),
    ],
)
def test_ranks_compute_what_one_does(ranks, names, tmp_path):
    """Every method, uneven parts and empty ones included, to rounding."""
    check(ranks, tmp_path, *names)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_computes_what_one_does(ranks, tmp_path):
    check(ranks, tmp_path, *LIBRARY, "fixup", *RUNS)


def worker(process, rank):
    """A rank's process, once some epochs are done."""
    return next(p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == str(rank))


def some_epochs(path, process, number=5):
    while len(read_metrics(path)) < number:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the run computes when nothing happens to it, on one process."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main([*LONG, "--out", str(path)]) == 0
    return results(path)


def agree(path, expected):
    (summaries, epochs), (expected_summaries, expected_epochs) = results(path), expected
    assert len(epochs[0]) == len(expected_epochs[0]) == 150
    assert not differences(list(summaries), list(expected_summaries))
    assert not differences(epochs, expected_epochs)


def test_a_killed_rank_is_started_again_and_nothing_is_lost(undisturbed, tmp_path):
    path = tmp_path / "run"
    process = torchrun(2, "--max-restarts", 2, ROOT / "classification_image.py", *LONG, "--out", path)
    some_epochs(path, process)
    worker(process, 1).kill()
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert "got no answer in the step" in said and "of epoch" in said and "continuing after epoch" in said
    agree(path, undisturbed)


def test_a_rank_that_hangs_ends_the_run_and_any_number_of_ranks_continues_it(undisturbed, tmp_path):
    path = tmp_path / "run"
    flags = [*LONG, "--collective-timeout", "2", "--out", str(path)]
    process = torchrun(2, ROOT / "classification_image.py", *flags)
    some_epochs(path, process)
    stopped = worker(process, 1)
    stopped.send_signal(signal.SIGSTOP)
    said = ""
    while "error:" not in said:
        said += process.stdout.readline()
    stopped.kill()  # torchrun would give it half a minute
    said += process.communicate(timeout=300)[0]
    assert process.returncode != 0
    assert f"--resume --out {path}" in said and "Timed out waiting 2000ms" in said and "of epoch" in said
    assert 5 <= checkpoint.load(path / "checkpoint.pt")["epoch"] < 150
    assert main([*flags, "--resume"]) == 0
    agree(path, undisturbed)


def test_settings_of_several_ranks_are_checked(tmp_path, capsys):
    assert main([*LONG, "--collective-timeout", "0", "--out", str(tmp_path / "run")]) == 2
    assert main([*LONG, "--blocks-per-step", "-1", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "--collective-timeout" in said and "--blocks-per-step" in said
