"""Several ranks compute what one does, and lose nothing when one of them dies or hangs; all by real
torchrun.
"""

import os
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from distributed_runs import RUNS, differences
from tiny_runs import results

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.launch.lines import read_lines
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs.metrics import read_metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")]),
}
LIBRARY = ("estimates", "blocks", "samples", "bounds", "refusals")
LONG = [
    *(
        "--model",
        "mlp",
        "--width",
        "6",
        "--n-data",
        "49",
        "--subset",
        "16",
        "--epochs",
        "60",
        "--burnin",
        "1",
    ),
    *(
        "--frequency",
        "10",
        "--prior-steps",
        "1",
        "--batch-size",
        "24",
        "--precision",
        "float64",
        "--lr",
        "1e-3",
    ),
    *(
        "--blocks-per-step",
        "2",
        "--checkpoint-seconds",
        "0",
        "--eval-every",
        "50",
        "--no-baseline",
        "--threads",
        "1",
    ),
]


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)


def torchrun(ranks, *arguments, **options):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        *map(str, arguments),
    ]
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )


def check(ranks, folder, *names):
    process = torchrun(ranks, ROOT / "tests/support/distributed_programs.py", folder, *names)
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    assert [name for name in names if f"{name}: " in said] == list(names)


@pytest.mark.parametrize(
    "ranks, names",
    [
        (2, [*LIBRARY, *(name for name in RUNS if name != "sampled-sgd")]),
        (3, ["wide", "blocks", "ntk", "ntk-large", "conditioned", "kfac", "elbo"]),
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
    return next(
        p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == str(rank)
    )


def some_epochs(path, process, number=5):
    while len(read_metrics(path)) < number:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the run computes when nothing happens to it, on one process."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main([*LONG, "--out", str(path)]) == 0
    return results(path)


def agree(path, expected):
    (summaries, epochs), (expected_summaries, expected_epochs) = results(path), expected
    assert len(epochs[0]) == len(expected_epochs[0]) == 60
    for summary in summaries:  # as many processes as before need not have continued it
        summary.pop("continued", None)
    assert not differences(list(summaries), list(expected_summaries))
    assert not differences(epochs, expected_epochs)


def test_a_killed_rank_is_started_again_and_nothing_is_lost(undisturbed, tmp_path):
    path = tmp_path / "run"
    process = torchrun(
        2, "--max-restarts", 2, ROOT / "classification_image.py", *LONG, "--out", path
    )
    some_epochs(path, process)
    worker(process, 1).kill()
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert (
        "got no answer in the step" in said
        and "of epoch" in said
        and "continuing after epoch" in said
    )
    agree(path, undisturbed)


def test_a_rank_that_hangs_ends_the_run_and_any_number_of_ranks_continues_it(undisturbed, tmp_path):
    path = tmp_path / "run"
    flags = [*LONG, "--collective-timeout", "8", "--out", str(path)]
    process = torchrun(2, ROOT / "classification_image.py", *flags)
    some_epochs(path, process)
    while checkpoint.load(path / "checkpoint.pt")["epoch"] < 5:  # its line comes before it
        time.sleep(0.05)
    stopped = worker(process, 1)
    stopped.send_signal(signal.SIGSTOP)
    said = ""
    while "error:" not in said:
        said += process.stdout.readline()
    stopped.kill()  # torchrun would give it half a minute
    said += process.communicate(timeout=300)[0]
    assert process.returncode != 0
    assert (
        f"--resume --out {path}" in said
        and "Timed out waiting 8000ms" in said
        and "of epoch" in said
    )
    assert 5 <= checkpoint.load(path / "checkpoint.pt")["epoch"] < 60
    assert main([*flags, "--resume"]) == 0
    agree(path, undisturbed)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["abc", "-1", "", "1e3", "9" * 30])
def test_an_environment_that_torchrun_would_not_make_is_refused(
    variable, value, monkeypatch, capsys
):
    monkeypatch.setenv(variable, value)
    assert main([*LONG, "--method", "map"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {variable} in the environment must be") and "torchrun" in said


def test_a_rank_beyond_their_number_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert main([*LONG, "--method", "map"]) == 2
    assert "RANK=3, but WORLD_SIZE=1" in capsys.readouterr().err


OTHER_DATA = """
import dataclasses, os, sys
from ntkmarglik.programs.classify import command, run

load = run.load

def other(*arguments, **options):
    data = load(*arguments, **options)
    if os.environ["RANK"] == "0":
        return data
    if "CHANGE" == "pixel":
        data.x_train[3, 0, 2, 2] += 1
        return data
    return dataclasses.replace(data, x_train=data.x_train[:-1], y_train=data.y_train[:-1])

run.load = other
sys.exit(command.main())
"""


@pytest.mark.parametrize("change", ["pixel", "number"])
def test_ranks_with_different_data_are_refused(change, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(OTHER_DATA.replace("CHANGE", change))
    process = torchrun(2, program, *LONG, "--out", tmp_path / "run")
    said = process.communicate(timeout=300)[0]
    assert process.returncode != 0
    for rank in ("error:", "error on rank 1:"):
        assert f"{rank} The processes have different data" in said
    assert "SIGABRT" not in said and not (tmp_path / "run").exists()


LINE = (
    "torchrun --nproc-per-node 2 classification_image.py --method map --subset 20 --n-data 20 "
    "--epochs 2 --model mlp"
)


def test_lines_of_torchrun_are_launched_as_others_are(place):
    table = place / "table.sh"
    table.write_text(f"{LINE} --out run\n")
    (line,) = read_lines(table)
    assert line.folder == Path("run") and not line.finished()
    start, _, flags = line.command.partition(" classification_image.py ")
    # a port of its own
    assert start == "torchrun --standalone --nproc-per-node 2" and "--resume" in flags.split()
    assert line.job().program == "ntkmarglik.programs.launch.processes:main"
    table.write_text(
        f"torchrun --machines 3 {LINE.partition(' ')[2]}\ntorchrun -m {LINE.split(' ', 3)[3]}\n"
    )
    with pytest.raises(NtkMarglikError, match=r"(?s)2 of the lines.*--machines.*without -m"):
        read_lines(table)


@pytest.mark.slow
def test_a_job_of_torchrun_runs(place):
    table = place / "table.sh"
    table.write_text(f"{LINE} --out run\n{LINE} --lr 1e9 --prior-precision 1e30 --out broken\n")
    good, broken = read_lines(table)
    assert good.job()() == 0 and good.finished()
    assert broken.job()() == 2 and not broken.finished()


def test_the_documents_show_lines_that_can_be_launched(place):
    text = (ROOT / "docs/clusters.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("torchrun ")]
    (place / "table.sh").write_text("\n".join(lines))
    assert len(read_lines(place / "table.sh")) == len(lines) >= 3


@pytest.mark.parametrize(
    "program", ["ntkmarglik.programs.grid.command", "ntkmarglik.programs.finetune.command"]
)
def test_other_programs_refuse_several_processes(program, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--checkpoint", "x"] if "finetune" in program else []
    assert pkgutil.resolve_name(f"{program}:main")(flags) == 2
    assert "start it with python instead of torchrun" in capsys.readouterr().err


def test_settings_of_several_ranks_are_checked(tmp_path, capsys):
    assert main([*LONG, "--collective-timeout", "0", "--out", str(tmp_path / "run")]) == 2
    assert main([*LONG, "--blocks-per-step", "-1", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "--collective-timeout" in said and "--blocks-per-step" in said
