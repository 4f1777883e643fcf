"""The launcher as its users meet it: command files, mistakes told first, what is on the screen,
options.
"""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from generators import printed
from grids import TINY as TINY_GRID
from launches import fakes, sweep_of, written
from rich.console import Console
from tiny_runs import TINY

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.grid.command import main as grid_main
from ntkmarglik.programs.launch import run as launch
from ntkmarglik.programs.launch.board import Board, table
from ntkmarglik.programs.launch.lines import (
    FinetuneLine,
    GridLine,
    RunLine,
    latest,
    read_lines,
)

GRID = [
    *TINY_GRID,
    "--points",
    "2",
    "--no-exact",
    "--outputs",
    "all",
    "--out",
    "grid",
    "--structures",
    "diag",
]
SUMMARY = '{"method": "map"}\n'  # of a finished run
LINE = f"python classification_image.py {' '.join(TINY)} --no-baseline"


# -------------------------------------------------------------------------------------------- lines


def test_all_bad_lines_are_told_before_anything_is_submitted(place, monkeypatch, capsys):
    (place / "other").mkdir()
    (place / "other/config.yaml").write_text("epochs: 7\n")
    bad = {
        2: ("--epochs two", "--epochs.*'two'"),
        3: ("--metod map", "--metod"),
        4: ("--method magic", "'magic'"),
        6: ("--burnin 50 --out e", "no epoch for hyperparameter steps"),
        7: ("--dry-run --out f", "--dry-run makes no run"),
        8: ("--out a --seed 3", "folder a is that of line 5"),
        9: ("--out other", "started with epochs = 7"),
        10: ("--config absent.yaml", "absent.yaml"),
        11: ("--help", "--help makes no run"),
        12: ("--out 'b", "quotation"),
    }
    lines = [f"{LINE} {bad[n][0]}" if n in bad else f"{LINE} --out a" for n in range(2, 13)]
    path = written(
        place, "\n".join(["# heading", *lines, "bash x.sh", "python other.py --out x", ""])
    )
    before = sorted(place.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["launch.py", str(path)])
    assert launch.main() == 2
    said = capsys.readouterr().err.splitlines()
    assert "12 of the lines cannot be run" in said[0] and len(said) == 13
    for number, (_, words) in [
        *bad.items(),
        (13, ("", "bash x.sh")),
        (14, ("", r"classification_image\.py .*or")),
    ]:
        (line,) = (line for line in said if line.startswith(f"{path}:{number}:"))
        assert re.search(words, line), line
    assert sorted(place.rglob("*")) == before


def test_files_without_commands_are_told(place):
    with pytest.raises(NtkMarglikError, match="no commands"):
        read_lines(written(place, "# nothing\n\n"))
    with pytest.raises(NtkMarglikError, match="cannot be read"):
        read_lines(place / "absent.sh")


def test_generated_files_are_taken_and_parts_of_a_grid_wait_for_each_other(
    place, capsys, monkeypatch
):
    path = written(
        place, "\n".join(printed("bound", capsys, monkeypatch, "--scale", "small", "--seeds", "0"))
    )
    lines = read_lines(path)
    assert [line.number for line in lines] == [
        n for n, t in enumerate(path.read_text().splitlines(), 1) if t[0] != "#"
    ]
    entries = sweep_of(lines, place).entries
    grids = [entry for entry in entries if isinstance(entry.task, GridLine)]
    last: dict[Path, object] = {}
    for entry in grids:
        assert entry.before is last.get(entry.task.folder)
        last[entry.task.folder] = entry
    assert len(last) == 2 and len(grids) > 4
    assert all(entry.before is None for entry in entries if isinstance(entry.task, RunLine))
    assert len({line.command for line in lines}) == len(lines)
    assert not (place / "runs").exists()


def test_lines_without_resume_or_folder_get_both(place):
    (line,) = read_lines(written(place, f"{LINE} --seed 4  # a comment"))
    assert line.folder == Path("runs/digits-mlp-ntk-16-5-seed4")
    assert {"--resume", "--out"} <= set(line.job().arguments) and line.job().place == place


def test_a_run_is_finished_with_its_baseline(place):
    for baseline in (True, False):
        config = Config().updated(out=place / "run", baseline=baseline)
        (place / "run").mkdir(exist_ok=True)
        (place / "run/summary.json").write_text(SUMMARY)
        assert RunLine(1, config).finished() is not baseline
        assert RunLine(1, config.updated(method="map")).finished()
    (place / "run/baseline").mkdir()
    (place / "run/baseline/summary.json").write_text(SUMMARY)
    assert RunLine(1, Config().updated(out=place / "run")).finished()


def test_a_grid_is_finished_by_its_csv(place):
    def line(*flags):
        (found,) = read_lines(
            written(place, f"python scripts/bound_grid.py {' '.join([*GRID, *flags])}")
        )
        return found

    assert not line().finished()
    assert grid_main(GRID) == 0
    assert line().finished() and re.fullmatch(r"\d+ rows", line().progress())
    assert not line("kfac").finished()
    with pytest.raises(NtkMarglikError, match=r":1: .*other results"):
        line("--lr", "0.5")


def test_a_line_of_finetuning(place):
    """It is checked without its data or the hub, resumes, and is finished by its summary."""
    (place / "net").mkdir()
    (place / "net/config.json").write_text("{}")
    start = "python scripts/finetune.py --dataset digits --checkpoint"
    hub, line = read_lines(
        written(place, f"{start} hub:me/net --out a\n{start} net --method map-gs --seed 4")
    )
    assert isinstance(hub, FinetuneLine) and hub.folder == Path("a")
    assert line.folder == Path("runs/digits-1000-net-map-gs-seed4")
    assert {"--resume", "--out"} <= set(line.job().arguments) and line.job().place == place
    assert line.job().program == "ntkmarglik.programs.finetune.command:main"
    assert line.progress() == "starting" and not line.finished()
    line.folder.mkdir(parents=True)
    metrics = {"fit": 1, "fit_step": 200, "loss": 0.5, "test_accuracy": 0.75}
    (line.folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    assert line.progress() == "fit 2/101, step 200/6000, loss 0.5000, test acc. 75.0 %"
    (line.folder / "summary.json").write_text(SUMMARY)
    assert line.finished()


def test_bad_lines_of_finetuning_are_told(place):
    (place / "net").mkdir()
    (place / "net/config.json").write_text("{}")
    (place / "other").mkdir()
    (place / "other/config.yaml").write_text("steps: 7\n")
    start = "python scripts/finetune.py --dataset digits --checkpoint"
    bad = {
        f"{start} nowhere --out b": "no such folder",
        f"{start} hub:a/b/c --out c": "hub:OWNER/NAME",
        f"{start} net --dataset digit --out d": "Did you mean 'digits'",
        f"{start} net --method la-lml --prior ptyl --out e": "independent weights",
        f"{start} net --steps 0 --out f": "--steps",
        f"{start} net --dry-run --out g": "--dry-run makes no run",
        f"{start} net --out other": "started with steps = 7",
        f"{start} net --out a --seed 2": "folder a is that of line 1",
    }
    path = written(place, "\n".join([f"{start} net --out a", *bad]))
    with pytest.raises(NtkMarglikError) as error:
        read_lines(path)
    said = str(error.value).splitlines()
    assert len(said) == len(bad) + 1
    for number, (words, line) in enumerate(zip(bad.values(), said[1:], strict=True), start=2):
        assert line.startswith(f"{path}:{number}:") and words in line


def test_the_latest_numbers_are_shown(place):
    assert latest(place, 9) == "starting"
    first = {"epoch": 1, "loss": 2.0, "log_marglik": -3.0, "test_accuracy": 0.5}
    (place / "metrics.jsonl").write_text(
        f'{json.dumps(first)}\n{{"epoch": 2, "loss": 1.25}}\n{{"epo'
    )
    assert latest(place, 9) == "epoch 2/9, loss 1.2500, evidence -3.0000, test acc. 50.0 %"


# ---------------------------------------------------------------------------------------- on screen


def test_the_table_shows_what_runs_and_what_failed(place):
    sweep = sweep_of(fakes(Path(), *["waits"] * 5), place)
    for entry, status in zip(
        sweep.entries, ("done", "running", "failed", "queued", "queued"), strict=True
    ):
        entry.status = status
    sweep.entries[1].failures, sweep.entries[2].note = 1, "it was [killed]"
    console = Console(file=io.StringIO(), width=120)
    console.print(table(sweep))
    text = console.file.getvalue()
    assert "2 queued, 1 running, 1 done, 1 failed" in text
    assert re.search(r"2 .*run2 .*running, try 2 .*epoch 2/9, loss 0.5", text)
    assert re.search(r"3 .*run3 .*failed .*it was \[killed\]", text)
    assert "run1" not in text and "run5" not in text
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=120, force_terminal=terminal)
        with Board(sweep, console) as board:
            board.show(["line 1, [x]: done"])
        assert "line 1, [x]: done" in console.file.getvalue()
        assert ("running, try 2" in console.file.getvalue()) is terminal


def test_runs_end_in_their_tables(place):
    lines = []
    for number, (name, dataset) in enumerate([("small/cifar", "cifar10"), ("mine", "digits")]):
        config = Config().updated(dataset=dataset, out=Path("runs") / name / "a", baseline=False)
        config.run.out.mkdir(parents=True)
        flat = config.flat()
        (config.run.out / "config.yaml").write_text(json.dumps({**flat, "out": None}))
        numbers = (
            "test_accuracy",
            "test_log_likelihood",
            "test_ece",
            "train_log_likelihood",
            "log_marglik",
        )
        costs = dict.fromkeys((*numbers, "seconds_weights", "seconds_hyper"), 0.5)
        summary = {
            "dataset": dataset,
            "model": "cnn",
            "n_data": 9,
            "seed": 0,
            "log_marglik_status": "bound",
            **costs,
        }
        (config.run.out / "summary.json").write_text(json.dumps(summary))
        lines.append(RunLine(number, config))
    tuned = FinetuneConfig().updated(out=Path("runs/tuned"))
    tuned.run.out.mkdir()
    (tuned.run.out / "config.yaml").write_text(
        json.dumps({**tuned.flat(), "out": None}, default=str)
    )
    scores = ("test_accuracy", "test_log_likelihood", "test_ece", "objective")
    summary = {
        **dict.fromkeys((*scores, "seconds_total", "seconds_cpu"), 0.5),
        **{"method": "de-elbo", "dataset": "digits", "classes": [], "checkpoint": "hub:me/net"},
        **{"n_data": 7, "seed": 0, "held_out_score": None, "fits": [{}], "rate": 0.1},
        "prior_variance": {"backbone": 1.0, "head": 1.0},
    }
    (tuned.run.out / "summary.json").write_text(json.dumps(summary))
    lines.append(FinetuneLine(2, tuned))
    paper, other, finetuning = launch.tables(lines)
    assert "| digits-7 | de-elbo | 1 | 50.0 | 0.500 | - |" in finetuning
    assert paper.startswith("**Table 1.**") and "50.0" in paper and "digits" not in paper
    assert "digits-9, cnn" in other and "cifar10" not in other


def test_options_are_read(place, monkeypatch, capsys):
    assert [launch.minutes(t) for t in ("90", "12:00:00", "1-00:30", "0:00:01")] == [
        90,
        720,
        1470,
        1,
    ]
    assert launch.setting("account=a=b") == ("slurm_account", "a=b")
    path = str(written(place, f"{LINE} --out a"))
    monkeypatch.setattr(launch, "_gpus", lambda: (0, 1))
    for flags, words in (
        (["--array"], "--array is for --executor slurm"),
        (["--gpus", "3"], "this machine has 2"),
        (["--gpus", "2", "--max-parallel", "2"], "2 GPUs are for 1"),
        (["--executor", "slurm"], "no srun"),
    ):
        monkeypatch.setattr(sys, "argv", ["launch.py", path, *flags])
        assert launch.main() == 2 and words in capsys.readouterr().err
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _: None)
    assert launch.main() == 2 and "pip install 'ntk-marglik[launch]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, words",
    [
        ("python classification_image.py --dataset mnits", "Did you mean 'mnist'"),
        ("python classification_image.py --dataset ../..", "not the name of one folder"),
        ("python scripts/bound_grid.py --points 0", "--points must be greater than 0"),
        ("python scripts/bound_grid.py --dataset nothing", "Unknown data set"),
        ("torchrun --nproc-per-node x classification_image.py", "nproc-per-node"),
        ("torchrun --nproc-per-node 0 classification_image.py", "nproc-per-node"),
        ("torchrun --nnodes -1 classification_image.py", "nnodes"),
        ("python classification_image.py --lr nan", "--lr must be finite"),
    ],
)
def test_what_would_be_refused_is_not_submitted(line, words, place):
    with pytest.raises(NtkMarglikError, match=re.escape(words)):
        read_lines(written(place, f"{line}\n"))
