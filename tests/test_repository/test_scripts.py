"""Benchmarks, scripts and figures run from the command line on small instances."""

import csv
import subprocess
import sys

import pytest
from programs import ROOT, run

from ntkmarglik.runs import records


def test_benchmark_prints_units_and_memory_and_writes_a_csv(tmp_path):
    out = run(
        "benchmarks/estimators.py",
        "--only",
        "ntk-150-1 mininet (prior)",
        "--csv",
        tmp_path / "table.csv",
    )
    assert "ntk-150-1 mininet (prior)" in out
    (row,) = csv.DictReader((tmp_path / "table.csv").read_text().splitlines())
    assert 0.1 < float(row["units"]) < 100
    assert 0 < float(row["peak_mb"]) < 2000


def refused(*command):
    """What a program says that ends with an error."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "program",
    ["scripts/summarise_runs.py illustrations", "benchmarks/estimators.py", "benchmarks/peers.py"],
)
def test_a_table_that_cannot_be_written_is_told_before_work_starts(program, tmp_path):
    nowhere = tmp_path / "not" / "there.csv"
    assert "cannot be written (No such file" in refused(*program.split(), "--csv", nowhere)


@pytest.mark.parametrize(
    "program", ["summarise_runs.py {}", "make_tables.py --table 1 {}", "launch.py {}"]
)
def test_what_is_not_there_is_told(program, tmp_path):
    missing = tmp_path / "absent"
    assert str(missing) in refused(*f"scripts/{program.format(missing)}".split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        settings = [
            "--method",
            "ntk",
            "--n-data",
            60,
            "--subset",
            20,
            "--epochs",
            2,
            "--burnin",
            1,
            "--frequency",
            1,
            "--prior-steps",
            2,
        ]
        out = folder / "bound-prior" / str(seed)
        run(ROOT / "classification_image.py", *settings, "--seed", seed, "--out", out, cwd=folder)
    return folder / "bound-prior"


def test_summary_table_and_csv_of_runs(runs, tmp_path):
    out = run(
        "scripts/summarise_runs.py", runs / "0", runs / "1", "--csv", tmp_path / "methods.csv"
    )
    rows = list(csv.DictReader((tmp_path / "methods.csv").read_text().splitlines()))
    assert [r["estimator"] for r in rows] == ["ntk-20-1", "map", "ntk-20-1", "map"]
    assert "| digits-60, cnn | ntk-20-1 | 2 |" in out
    assert "±" in out
    mean = sum(float(r["test_log_likelihood"]) for r in rows if r["estimator"] == "map") / 2
    assert f"{mean:.3f}" in out
    assert all(str(runs) not in r["command"] for r in rows)


def test_traces_have_a_row_for_every_evaluation_and_name_their_command(runs, tmp_path):
    run("scripts/summarise_runs.py", runs, "--traces", tmp_path / "traces.csv")
    rows = list(csv.DictReader((tmp_path / "traces.csv").read_text().splitlines()))
    assert [(r["estimator"], r["seed"], r["epoch"]) for r in rows[:3]] == [
        ("ntk-20-1", "0", "1"),
        ("ntk-20-1", "0", "2"),
        ("map", "0", "1"),
    ]
    assert (
        rows[0]["command"].startswith("python classification_image.py") and rows[1]["command"] == ""
    )
    # MAP estimates none in training
    assert float(rows[1]["log_marglik"]) < 0 and rows[2]["log_marglik"] == ""


def test_figures_are_drawn_from_run_folders(runs, tmp_path):
    source = [
        "--source",
        "runs",
        "--runs",
        runs.parent,
        "--data",
        tmp_path / "data",
        "--out",
        tmp_path,
    ]
    out = run("generate_illustration_figures.py", *source, "--figures", "11")
    assert out.split() == [str(tmp_path / "traces_prior_doubly.png")]
    assert {p.name for p in (tmp_path / "data").iterdir()} == {
        "runs_bound_prior.csv",
        "traces_bound_prior.csv",
    }


def test_rows_of_other_runs_stay_if_asked_to(runs, tmp_path):
    names = ("runs_bound_prior.csv", "traces_bound_prior.csv")
    records.collect(runs.parent, tmp_path)
    before = {name: records.read(tmp_path / name) for name in names}
    for name, columns in zip(names, (records.RUN_COLUMNS, records.TRACE_COLUMNS), strict=True):
        # one that is gone, and others that were run again and gave other numbers
        gone = {**before[name][0], "seed": "7"}
        again = [{**row, "test_accuracy": "0"} for row in before[name]]
        records.write(tmp_path / name, columns, [gone, *again])
    records.collect(runs.parent, tmp_path, keep=True)
    for name in names:
        rows = records.read(tmp_path / name)
        assert [row["seed"] for row in rows].count("7") == 1
        now = [row for row in rows if row["seed"] != "7"]
        assert len(now) == len(before[name]) and all(row in before[name] for row in now)
    records.collect(runs.parent, tmp_path)
    assert {name: records.read(tmp_path / name) for name in names} == before


# figures of single runs, of scripts/rff_demo.py and of an example
BY_OTHER_PROGRAMS = {
    "digits_ntk_500_1.png",
    "mnist_r180_affine.png",
    "out_of_distribution.png",
    "report_page.png",
    "rff_elbo.png",
}


def test_figures_are_drawn_from_the_committed_csv_files(tmp_path):
    run("generate_illustration_figures.py", "--out", tmp_path)
    committed = {path.name for path in (ROOT / "illustrations").glob("*.png")}
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == committed - BY_OTHER_PROGRAMS
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)
