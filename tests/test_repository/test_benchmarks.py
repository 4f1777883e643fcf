"""The smallest instance of every benchmark runs and says what it should, seconds left aside."""

import csv
import math

import calibration
import conditioned
import estimators
import house
import measure
import peers
import pytest
import sampled
import sampled_noise
import torch
from measure import Case
from programs import ROOT, run

from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import check_uses
from ntkmarglik.programs.classify import preflight
from ntkmarglik.programs.classify.config import parse


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch):
    monkeypatch.setattr(measure, "SHORT", 0.0)


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_scaling_measures_every_axis_and_draws_it(tmp_path):
    run(
        "benchmarks/scaling.py",
        "--small",
        "--no-memory",
        "--csv",
        tmp_path / "s.csv",
        "--plot",
        tmp_path / "s.png",
    )
    rows = read(tmp_path / "s.csv")
    assert [*dict.fromkeys(r["axis"] for r in rows)] == ["S", "A", "N", "C"]
    assert all(float(r["units"]) > 0 and float(r["cpu_seconds"]) > 0 for r in rows)
    assert (tmp_path / "s.png").stat().st_size > 5000


def test_the_tables_of_the_documentation_are_those_of_the_rows():
    page = (ROOT / "docs/speed.md").read_text()
    data = ROOT / "illustrations/data"
    for table in (estimators.table(data / "speed.csv"), peers.as_markdown(data / "peers.csv")):
        assert table.count("\n") > 10 and table in page


def test_rows_measured_again_take_the_place_of_the_old(tmp_path):
    target = tmp_path / "speed.csv"
    for only in ("ntk-20-C", "ntk-20-C", "diag-20"):
        row = {"estimator": only, "units": 1.5 if target.exists() else 0.5}
        measure.update_csv(target, [row], "estimator")
    assert [(r["estimator"], r["units"]) for r in read(target)] == [
        ("ntk-20-C", "1.5"),
        ("diag-20", "1.5"),
    ]


def test_the_committed_scaling_names_the_command_of_every_row():
    from scaling import sweeps

    known = {(axis, str(case)) for axis, _, case in sweeps(small=False)}
    rows = read(ROOT / "illustrations/data/scaling.csv")
    assert {(r["axis"], r["case"]) for r in rows} == known
    assert all(
        r["command"] == f'python benchmarks/scaling.py --axes {r["axis"]} --only "{r["case"]}"'
        for r in rows
    )


def test_peers_compute_the_same_numbers_or_say_why_not(tmp_path):
    run("benchmarks/peers.py", "--small", "--no-memory", "--csv", tmp_path / "peers.csv")
    rows = read(tmp_path / "peers.csv")
    assert {"ours", "torch.func", "laplace-torch, Curvlinops"} <= {r["method"] for r in rows}
    for r in rows:
        assert r["note"] or float(r["units"]) > 0
        ours = next(o for o in rows if o["estimator"] == r["estimator"])
        # its KFAC is another one
        if "prior" in r["estimator"] and "BackPack" not in r["method"] and not r["note"]:
            assert float(r["log_det_ratio"]) == pytest.approx(
                float(ours["log_det_ratio"]), rel=2e-3
            )


def test_a_peer_that_fails_says_why():
    def broken(case):
        raise NotImplementedError("no such layer\nand more")

    row = peers.compare("theirs", broken, Case("mininet", "ntk", 2), memory=False)
    assert row["note"] == "NotImplementedError: no such layer"
    assert math.isnan(row["units"])


def test_posteriors_are_compared_with_those_of_laplace_torch(tmp_path):
    target = tmp_path / "posterior.csv"
    run("benchmarks/peers.py", "--posterior", "--small", "--no-memory", "--csv", target)
    rows = read(target)
    assert [row["operation"] for row in rows] == ["fit", "predict"]
    for row in rows:
        assert float(row["ours_seconds"]) > 0 and row["ours_note"] == ""
        assert row["theirs_note"] or float(row["theirs_seconds"]) > 0


def test_a_posterior_that_takes_too_long_is_measured_on_fewer_data(monkeypatch):
    import peers_posterior

    monkeypatch.setattr(peers_posterior, "LIMIT", 1e-6)
    monkeypatch.setattr(peers_posterior, "FEWEST", 2)
    monkeypatch.setitem(peers_posterior.OPERATIONS, "fit", (peers_posterior.fit_ours, _broken))
    row = peers_posterior.compare("fit", peers_posterior._case("mininet", 8), memory=False)
    assert row["ours_note"] == "2 of 8 data points, scaled" and row["ours_seconds"] > 0
    assert row["theirs_note"] == "NotImplementedError: no such layer"


def _broken(case):
    raise NotImplementedError("no such layer")


def test_the_committed_posterior_table_has_every_row():
    import peers_posterior

    found = read(ROOT / "illustrations/data/peers_posterior.csv")
    known = [
        (case.model, case.weights, peers_posterior.STRUCTURES[case.structure], name)
        for name, case in peers_posterior.cases(small=False)
    ]
    keys = ("model", "weights", "structure", "operation")
    assert [tuple(row[key] for key in keys) for row in found] == known


def test_prior_steps_and_streamed_data_have_rows():
    step, several = estimators.cached(Case("mininet", "ntk", 4), memory=False)
    assert (step.unit, step.target_units) == ("Cholesky and inverse of 4 x 4", 3.0)
    assert several.unit == "pass over the block"
    row = estimators.streamed(Case("mininet", "kfac", 4, 1, None, classes=2), 4, 8, memory=False)
    assert row.units > 0 and "C=2" in row.estimator


def test_a_step_of_the_elbo_has_a_row():
    row = estimators.elbo(Case("mininet", "ntk", 4), memory=False)
    assert 0.5 < row.units < 20 and row.target_units == 1.2 and "mininet" in row.estimator


def test_verdicts():
    assert estimators.Row("a", 1.0, 2.0, "u", 10.0, 5.0).verdict == "memory x2.00"
    assert estimators.Row("a", 3.0, 2.0, "u").verdict == "time x1.50"
    assert estimators.Row("a", 1.0, 2.0, "u", 1.0, 5.0).verdict == "met"
    assert estimators.Row("a", 1.0, math.nan, "u").verdict == "-"


def test_memory_of_an_operation_is_measured_in_a_process_of_its_own():
    small, large = (
        measure.peak_mb(measure.training_step, Case("mininet", "ntk", n)) for n in (4, 200)
    )
    assert 0 <= small < large


def test_the_model_of_many_ranks_starts_at_one_and_loses():
    import distributed

    seconds = {"step": 4e-3, "ntk": 1.3e-2, "kfac": 3e-2, "flop": 1e-11}
    rows = [
        line.strip("| ").split(" | ")
        for line in distributed.table(seconds, distributed.Cluster()).splitlines()[2:]
    ]
    assert len(rows) == 10
    for _, _, first, *rest in rows:
        assert first == "100" and sorted(map(int, rest), reverse=True) == list(map(int, rest))


@pytest.mark.slow
def test_two_ranks_are_measured(tmp_path):
    work = "weight step, batch of 256"
    run(
        "benchmarks/distributed.py",
        "--only",
        work,
        "--rounds",
        "1",
        "--no-model",
        "--csv",
        tmp_path / "d.csv",
    )
    (row,) = read(tmp_path / "d.csv")
    assert row["work"] == work and all(
        float(row[name]) > 0 for name in ("wall_1", "wall_2", "cpu_1", "cpu_2")
    )


def test_a_study_of_samples_has_every_column_of_the_committed_table(tmp_path):
    for study in sampled.STUDIES.values():
        check_uses(study.model, depth=study.depth, width=study.width)
    tiny = sampled.Study("digits", "mlp", 16, 1, 2, 40, 1, 8, batch=16, rungs=2, n_test=20, width=4)
    torch.manual_seed(0)
    row = sampled.study(tiny, "data")
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    for curvature in sampled.CURVATURES:
        low, value, high = (row[f"{curvature}_log_marglik{end}"] for end in ("_low", "", "_high"))
        assert low < value < high
    for _ in range(2):
        sampled.write(row, tmp_path / "sampled.csv")
    assert len(read(tmp_path / "sampled.csv")) == 1
    committed = read(ROOT / "illustrations/data/sampled.csv")
    assert list(committed[0]) == list(row) and {r["dataset"] for r in committed} <= set(
        sampled.STUDIES
    )


def test_the_pictures_of_samples_have_the_columns_of_the_committed_ones(tmp_path):
    tiny = sampled_noise.Study(
        *("digits", "mlp", 12, 20, (1, 2), (1.0, 100.0), (2, 4), (0, 3), 2.0, (1, 2)),
        seeds=1,
        width=4,
    )
    data = load("digits", "data", n_data=12)
    for make, name in sampled_noise.PICTURES.values():
        torch.manual_seed(0)
        rows = make(tiny, data)
        sampled_noise.write(rows, tmp_path / name)
        committed = read(ROOT / "illustrations/data" / name)
        assert list(read(tmp_path / name)[0]) == list(committed[0])
    measured = [row for row in sampled_noise.variance(tiny, data) if row["kind"] == "measured"]
    assert len(measured) == 2 * 3 and all(row["data"] > 0 < row["prior"] for row in measured)
    start = {row["batch"]: row["data"] / row["prior"] for row in measured if row["step"] == 0}
    assert all(ratio > 0.5 for ratio in start.values())


@pytest.mark.parametrize("lines, is_long", [(38, False), (39, True)])
def test_long_functions_are_counted_without_their_docstrings(lines, is_long, tmp_path, monkeypatch):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    body = ["def f(", "):", '    """One.', "", "    More.", '    """', *["    x = 1"] * lines]
    (tmp_path / "module.py").write_text("\n".join(body))
    assert house.long_functions(tmp_path) == (["module.py:1 f"] if is_long else [])


def test_conditioned_blocks_are_measured_beside_plain_ones(monkeypatch):
    """The slack of a small network, a few draws of each kind."""
    monkeypatch.setattr(conditioned, "DRAWS", 4)
    monkeypatch.setattr(conditioned, "N_DIGITS", 60)
    study = conditioned.Slack(conditioned.Network.on_digits(1.0))
    plain = study.plain("fisher", 20)
    (conditioned_row,) = study.streamed("fisher", 20, [20])
    assert conditioned_row["slack_percent"] < plain["slack_percent"]
    assert 0.2 < study.time_ratio("eigen", 20)["time_ratio"] < 5


def test_every_study_of_learning_is_a_command_of_the_runner():
    for settings, by_name in conditioned.STUDIES.values():
        for flags in by_name.values():
            preflight.check_settings(parse([*settings.split(), *flags.split()]))


def test_the_trainer_benchmark_runs(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run("benchmarks/trainer.py", "--small", "--csv", tmp_path / "trainer.csv")
    rows = read(tmp_path / "trainer.csv")
    assert len(rows) == 3 and all(float(row["ratio"]) > 0 for row in rows)


def test_calibration_scores_predictions_and_tells_other_data_by_their_entropy(monkeypatch):
    """On a small network: three posteriors of it, and scores of probabilities that are known."""
    sure = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    unsure = torch.full((2, 2), 0.5)
    found = calibration.scored(sure, torch.tensor([0, 1]), unsure)
    assert found["auroc"] == 1
    assert found["log_likelihood"] == pytest.approx((math.log(0.9) + math.log(0.8)) / 2)
    monkeypatch.setattr(calibration, "INDUCING", 10)
    monkeypatch.setattr(conditioned, "N_DIGITS", 60)
    network = conditioned.Network.on_digits(1.0)
    names = []
    for name, posterior in calibration.posteriors(network):
        names.append(name)
        for kind in calibration.KINDS:
            p = calibration.predicted(posterior, network.x[:6], kind)
            torch.testing.assert_close(p.sum(1), torch.ones(6, dtype=p.dtype))
    assert names == ["kfac", "ntk, 10 rows", "last layer, full"]
