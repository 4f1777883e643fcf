"""Benchmarks, scripts and figures run from the command line on small instances."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command, cwd=ROOT):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmark_prints_units_and_memory_and_writes_a_csv(tmp_path):
    out = run("benchmarks/estimators.py", "--only", "ntk-150-1 mininet (prior)", "--csv", tmp_path / "table.csv")
    assert "ntk-150-1 mininet (prior)" in out
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert 0.1 < float(row["units"]) < 100
    assert 0 < float(row["peak_mb"]) < 2000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        settings = ["--n-data", 60, "--subset", 20, "--epochs", 2, "--burnin", 1, "--frequency", 1, "--prior-steps", 2]
        run(ROOT / "classification_image.py", *settings, "--seed", seed, "--out", folder / str(seed), cwd=folder)
    return folder


def test_summary_table_and_csv_of_runs(runs, tmp_path):
    out = run("scripts/summarise_runs.py", runs / "0", runs / "1", "--csv", tmp_path / "methods.csv")
    rows = list(csv.DictReader((tmp_path / "methods.csv").open()))
    assert [r["estimator"] for r in rows] == ["ntk-20-1", "map", "ntk-20-1", "map"]
    assert "| digits-60, cnn | ntk-20-1 | 2 |" in out
    assert "±" in out
    mean = sum(float(r["test_log_likelihood"]) for r in rows if r["estimator"] == "map") / 2
    assert f"{mean:.3f}" in out
    assert all(str(runs) not in r["command"] for r in rows)


def test_figures_are_drawn_from_the_committed_csv_files(tmp_path):
    run("generate_illustration_figures.py", "--out", tmp_path)
    committed = {path.name for path in (ROOT / "illustrations").glob("*.png")}
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn
    assert drawn <= committed
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)
