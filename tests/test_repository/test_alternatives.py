"""The benchmark of alternatives: its smallest instance, its searches, and what its table says."""

import csv
from dataclasses import replace

import alternatives
import diabetes
import plain_fit
import pytest
import torch
from plain_fit import Candidate, Fits
from programs import ROOT

from ntkmarglik.programs.paper.figures.alternatives import FIGURES, compared


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Rows of all studies at their smallest."""
    folder = tmp_path_factory.mktemp("alternatives")
    arguments = ["--quick", "--csv", str(folder / "alternatives.csv"), "--runs", str(folder)]
    alternatives.main(arguments)
    return folder


def test_every_way_of_every_study_has_its_rows(quick):
    rows = read(quick / "alternatives.csv")
    found = {(row["study"], row["way"]) for row in rows}
    for name, study in alternatives.STUDIES.items():
        for way in (*study.people, *study.ours):
            assert (name, way) in found
    posteriors = [row for row in rows if row["kind"] == "posterior"]
    assert len(posteriors) == 5 + 4 + 4 + 1 + 4 + 2 + 1
    assert all(float(row["cpu_seconds"]) > 0 for row in rows)
    assert {row["kind"] for row in rows} == {"people", "grid", "ours", "posterior"}


def test_a_second_call_computes_nothing_again(quick, capsys, monkeypatch):
    before = (quick / "alternatives.csv").read_text()
    monkeypatch.setattr(plain_fit, "fit", None)
    alternatives.main(["--quick", "--csv", str(quick / "alternatives.csv"), "--runs", str(quick)])
    assert (quick / "alternatives.csv").read_text() == before
    assert capsys.readouterr().out == ""


def test_an_interrupted_search_keeps_its_fits(quick, tmp_path, monkeypatch):
    """Without the csv, but with the file of fits, no network is trained again."""
    monkeypatch.setattr(plain_fit, "fit", None)
    target = tmp_path / "again.csv"
    ways = ["--studies", "digits", "--ways", "cross-validated grid"]
    alternatives.main(["--quick", "--csv", str(target), "--runs", str(quick), *ways])
    (again,) = read(target)
    rows = read(quick / "alternatives.csv")
    first = next(r for r in rows if r["study"] == "digits" and r["way"] == ways[-1])
    assert {**again, "command": ""} == {**first, "command": ""}
    assert first["fits"] == "26"


def test_the_table_and_the_picture(quick, capsys):
    alternatives.main(["--table", "--csv", str(quick / "alternatives.csv")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| data | way | seeds ")
    assert len(lines) == 2 + len(read(quick / "alternatives.csv"))
    FIGURES["alternatives"](quick, quick / "alternatives.png")
    assert (quick / "alternatives.png").stat().st_size > 20_000


def test_the_page_shows_the_table_of_the_committed_rows():
    page = (ROOT / "docs/alternatives.md").read_text()
    assert alternatives.table(ROOT / alternatives.CSV) in page


def test_differences_are_paired_by_seed_and_times_in_plain_fits():
    scores = {"grid": (-1.0, -3.0), "ours": (-0.5, -2.7)}
    rows = [
        {
            "way": kind,
            "kind": kind,
            "seed": str(seed),
            "test_log_likelihood": str(score),
            "cpu_seconds": "12" if kind == "grid" else "3",
            "fit_seconds": "2",
        }
        for kind, pair in scores.items()
        for seed, score in enumerate(pair)
    ]
    grid, ours = compared([*rows, {**rows[-1], "seed": "2"}])  # the grid has no third seed
    assert (grid.difference, grid.units) == (0, 6)
    assert ours.difference == pytest.approx(0.4) and ours.units == 1.5
    assert ours.error == pytest.approx(0.1)  # of 0.5 and 0.3


@pytest.fixture
def fits(tmp_path):
    config = alternatives.config_of(alternatives.STUDIES["digits"].small(), seed=0)
    data = alternatives.data_of(config, tmp_path)
    return Fits(config, data, tmp_path / "fits.jsonl")


def test_folds_are_fifths_that_cover_the_training_data_once(fits):
    folds = [plain_fit.fold_of(fits.data, number, seed=3) for number in range(plain_fit.FOLDS)]
    held_out = torch.cat([fold.x_test for fold in folds])
    assert len(held_out) == fits.data.n_data
    assert torch.equal(held_out.flatten(1).sum(0), fits.data.x_train.flatten(1).sum(0))
    assert all(len(fold.x_train) + len(fold.x_test) == fits.data.n_data for fold in folds)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_large_decay_is_felt(fits, decoupled):
    small, large = (
        plain_fit.fit(fits.config, fits.data, Candidate(decay, decoupled=decoupled))
        for decay in (0.0, 100.0)
    )
    assert small["log_likelihood"] != large["log_likelihood"]


def test_decays_of_single_tensors_are_those_of_all_where_they_agree(fits):
    tensors = alternatives._tensors(fits)
    one = plain_fit.fit(fits.config, fits.data, Candidate(0.01))
    each = plain_fit.fit(fits.config, fits.data, Candidate((0.01,) * tensors))
    assert one["log_likelihood"] == pytest.approx(each["log_likelihood"], rel=1e-6)


def test_searches_choose_what_is_best_on_held_out_data(fits, monkeypatch):
    def pretended(config, data, candidate):
        score = -abs(candidate.decay - 1e-3) if len(data.x_test) != 360 else -99.0
        return {"log_likelihood": score, "accuracy": 1.0, "ece": 0.0, "cpu_seconds": 1.0}

    monkeypatch.setattr(plain_fit, "fit", pretended)
    for way, count in ((alternatives.GRID, 6), ("cross-validated grid", 26), ("optuna", 16)):
        (row,) = alternatives.searched(way, fits)
        assert row["fits"] == row["cpu_seconds"] == count
        assert row["test_log_likelihood"] == -99.0 and row["fit_seconds"] == 1.0
        if way != "optuna":
            assert row["chosen"] == "decay 0.001"


def test_rotation_augments_the_plain_fit(fits):
    still = plain_fit.outputs_of(torch.nn.Flatten(), fits.config, Candidate(rotation=0.0))
    turned = plain_fit.outputs_of(torch.nn.Flatten(), fits.config, Candidate(rotation=1.0))
    x = fits.data.x_train[:3]
    assert torch.allclose(still(x), x.flatten(1), atol=1e-5)
    assert not torch.allclose(turned(x), x.flatten(1), atol=1e-2)


def test_diabetes_is_standardised_with_the_training_set():
    split = diabetes.Split.drawn(0)
    assert len(split.y) == 353 and len(split.y_test) == 89
    for values in (split.x, split.y):
        assert torch.allclose(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5)
        assert torch.allclose(values.std(0, correction=0), torch.ones(values.shape[1]), atol=1e-4)
    held_out = split.held_out()
    assert len(held_out.y) + len(held_out.y_test) == len(split.y)


def test_scores_of_normal_predictions():
    y = torch.tensor([0.0, 2.0])
    found = diabetes.scores(torch.tensor([0.0, 1.0]), 1.0, y)
    assert found["log_likelihood"] == pytest.approx(-0.9189385 - 0.25, abs=1e-6)
    assert found["accuracy"] == pytest.approx(0.5)


def test_studies_keep_the_settings_of_the_runner():
    """What a study leaves out is the runner's default: the same decay is learned by everyone."""
    study = alternatives.STUDIES["mnist"]
    config = alternatives.config_of(study, 1, study.ours["conditioned NTK"])
    assert (config.training.epochs, config.problem.n_data, config.run.seed) == (300, 1000, 1)
    assert config.estimator.method == "ntk-conditioned" and config.estimator.subset == 400
    small = replace(study).small()
    assert "--dataset digits" in small.settings and small.seeds == 1
