"""Tables of the paper: layout, published numbers, relative times, and an honest caption."""

import sys

import pytest
from generators import script

from ntkmarglik.programs.paper import tables
from ntkmarglik.programs.paper.experiments import label_of
from ntkmarglik.runs import records


def made_up(generator, tmp_path, scale="small", seeds=(0, 1, 2), without=()):
    """A csv of runs with known numbers, for the real commands of an experiment."""
    rows = []
    for experiment in script(f"generate_{generator}_commands").experiments(scale):
        for number, config in enumerate(experiment.configs):
            for seed in seeds:
                rows.append(
                    {
                        "dataset": config.problem.dataset,
                        "estimator": label_of(config),
                        "seed": seed,
                        "augment": config.hyperparameters.augment,
                        "test_accuracy": 0.5 + number / 100 + seed / 1000,
                        "test_log_likelihood": -1 - number / 10 - seed / 100,
                        "log_marglik": -2 - number / 10,
                        "log_marglik_status": "approximation",
                        "seconds_weights": 10.0,
                        "seconds_hyper": 10.0 * number,
                        "command": config.updated(seed=seed).command(),
                    }
                )
    path = tmp_path / f"{generator}.csv"
    tmp_path.mkdir(exist_ok=True)
    records.write(
        path, records.RUN_COLUMNS, [row for row in rows if row["estimator"] not in without]
    )
    return path


@pytest.fixture
def table(capsys, monkeypatch):
    def make(*arguments):
        monkeypatch.setattr(sys, "argv", ["make_tables.py", *map(str, arguments)])
        tables.main()
        return capsys.readouterr().out

    return make


def test_table_1_has_the_layout_of_the_paper(table, tmp_path):
    text = table(made_up("cifar", tmp_path), made_up("lila", tmp_path))
    caption, _, heading, _, *lines = text.splitlines()
    assert "CIFAR-10 log q" in heading and "CIFAR-100 time" in heading
    names = [line.split(" | ")[1] for line in lines]
    assert names == [
        "MAP",
        "NTK-500-1",
        "KFAC-500-1",
        "KFAC-500-C",
        "KFAC-N-1",
        "KFAC-N-C",
        "KFAC-500-10",
        "NTK-150-1",
        "KFAC-150-1",
        "KFAC-N-1",
        "KFAC-N-C",
    ]
    assert [line.split(" | ")[0] for line in lines] == ["| prior"] * 7 + ["| invariance"] * 4
    cells = lines[1].split(" | ")
    assert cells[2:6] == [
        "**-2.10 ± 0.00** (-0.87 ± 0.02)",
        "-1.11 ± 0.01 (-0.53 ± 0.01)",
        "51.1 ± 0.1 (86.8 ± 0.1)",
        "33% (60%)",
    ]
    assert lines[0].split(" | ")[2] == "-"  # MAP has no evidence
    assert "100% (100%)" in lines[5] and "(out of memory)" in lines[10] and "(~100%)" in lines[10]
    for part in (
        "not the paper's size",
        "cifar10 n_data all -> 2000",
        "cifar100 n_data all -> 1000",
        "model wrn -> resnet",
        "epochs 300 -> 60",
        "3 seeds",
    ):
        assert part in caption


def test_a_run_at_the_papers_size_is_said_to_be_one(table, tmp_path):
    text = table(made_up("cifar", tmp_path, "full"))
    assert "Prior: the paper's settings, 3 seeds. Invariance: not run." in text
    whole = table(made_up("cifar", tmp_path, "full"), made_up("lila", tmp_path, "full"))
    assert "Invariance: the paper's settings, 3 seeds." in whole
    mixed = table(
        made_up("cifar", tmp_path, "full"),
        made_up("tiny", tmp_path),
        made_up("cifar", tmp_path / "small"),
    )
    # a reduced run is never hidden
    assert "in some runs also" in mixed and "the paper's settings" not in mixed
    # variants without a published number
    assert "| prior | NTK-500-1 IID |" in text and "GROUPED" in text


def test_what_was_not_run_shows_the_published_number_alone(table, tmp_path):
    text = table(made_up("cifar", tmp_path, seeds=(0,), without=["kfac-N-C"]))
    line = next(line for line in text.splitlines() if "| KFAC-N-C |" in line)
    assert "| - (-0.79 ± 0.01) |" in line and "1 seed." in text
    assert "| - (60%) |" in text  # no time without the estimator it is relative to


def test_table_2_counts_outputs_drawn_per_datum_as_its_ntk(table, tmp_path):
    text = table(made_up("tiny", tmp_path), "--table", "2")
    line = next(line for line in text.splitlines() if "| NTK-70-1 |" in line)
    assert "(-3.15 ± 0.08)" in line and not line.split(" | ")[2].startswith("-  ")
    assert "| invariance | partitioned | - | - (48.6 ± 0.0) |" in text
    assert "(41.1 ± 0.2)" in text and "IID" not in text


def test_latex_is_escaped_and_has_the_same_numbers(table, tmp_path):
    text = table(made_up("cifar", tmp_path), made_up("lila", tmp_path), "--format", "latex")
    assert text.count(r"\midrule") == 2 and r"\multicolumn{4}{c}{CIFAR-100}" in text
    assert r"\textbf{-2.10 $\pm$ 0.00} (-0.87" in text and "**" not in text
    assert r"33\% (60\%)" in text and r"$\pm$" in text and "±" not in text and r"n\_data" in text
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in lines[1:]} == {9}


def test_bold_is_what_overlaps_with_the_best_of_its_block(tmp_path):
    made = {"ntk-500-1": (-1.0, -1.2), "kfac-500-1": (-1.1, -1.3), "kfac-N-C": (-1.5, -1.6)}
    rows = [
        {"dataset": "cifar10", "estimator": label, "seed": seed, "test_log_likelihood": value}
        for label, numbers in {**made, "map": (-0.5,)}.items()
        for seed, value in enumerate(numbers)
    ]
    without_map = [row for row in rows if row["estimator"] != "map"]
    # errors of 0.1: -1.1 and -1.2 overlap, -1.55 ± 0.05 does not
    assert {label for label, _, _ in tables._best(tables.LAYOUTS["1"], without_map)} == {
        "ntk-500-1",
        "kfac-500-1",
    }
    # a single number has no error, and what is printed alike is as good
    alike = [{**row, "estimator": "ntk-N-C"} for row in rows if row["estimator"] == "map"]
    alike[0]["test_log_likelihood"] -= 0.004
    assert len(tables._best(tables.LAYOUTS["1"], [*rows, *alike])) == 2
    assert tables._best(tables.LAYOUTS["1"], rows) == {("map", "cifar10", "test_log_likelihood")}
    assert not tables._best(tables.LAYOUTS["1"], rows[:2])  # nothing to compare with


def test_no_runs_is_an_error(table, tmp_path, capsys):
    with pytest.raises(SystemExit):
        table(tmp_path)
    assert "no finished runs" in capsys.readouterr().err


def test_published_numbers_have_their_source():
    rows = records.read(tables.PUBLISHED)
    assert len(rows) == 27 and all(row["source"] for row in rows)
