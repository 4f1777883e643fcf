"""Figures from csv rows: fronts are computed, curves are means, labels do not meet; wandb as a
source.
"""

import itertools
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.paper.figures import FIGURES, NUMBERS, pareto, scheme, style, traces
from ntkmarglik.runs import records
from ntkmarglik.runs.wandb_runs import download

ILLUSTRATIONS = Path(__file__).parents[2] / "illustrations"
PNG = b"\x89PNG"
LABELS = [
    *("map", "full-N-C", "blockdiag-N-C", "kfac-N-C", "diag-N-C", "ntk-N-1"),
    *(f"{m}-{s}-{k}" for m in ("ntk", "blockdiag", "kfac") for s in (10, 100) for k in ("1", "C")),
    "ntk-100-1 grouped",
]


def row(label, seed, number, **more):
    return {
        "dataset": "mnist",
        "model": "mininet",
        "n_data": 1000,
        "estimator": label,
        "augment": "none",
        "seed": seed,
        "log_marglik": "" if label == "map" and "epoch" in more else -3 + number / 10 + seed / 50,
        "test_log_likelihood": -1 + number / 20 + seed / 50,
        "test_accuracy": 0.9,
        "command": "python x",
        **more,
    }


@pytest.fixture
def data(tmp_path):
    """Csv files of every experiment, with two seeds."""
    numbered = list(enumerate(LABELS))
    for name in ("prior", "lila"):
        runs = [row(label, seed, n) for n, label in numbered for seed in (0, 1)]
        timing = [
            row(label, 0, n, seconds_round=1.5 ** (n * 5 % 7))
            for n, label in numbered
            if label != "map"
        ]
        epochs = [
            row(label, seed, n * e / 9, epoch=e)
            for n, label in numbered
            for seed in (0, 1)
            for e in (3, 6, 9)
        ]
        records.write(tmp_path / f"runs_bound_{name}.csv", records.RUN_COLUMNS, runs)
        records.write(tmp_path / f"runs_timing_{name}.csv", records.RUN_COLUMNS, timing)
        records.write(tmp_path / f"traces_bound_{name}.csv", records.TRACE_COLUMNS, epochs)
    subsets = [
        row(label, 0, n, dataset=dataset, n_data=size)
        for dataset in ("cifar10", "cifar10_r180")
        for n, label in enumerate(("kfac-N-C", "kfac-400-1", "ntk-400-1"))
        for size in (500, 2000)
    ]
    records.write(tmp_path / "runs_cifar_subsets.csv", records.RUN_COLUMNS, subsets)
    records.write(
        tmp_path / "methods.csv", records.RUN_COLUMNS, [row(label, 0, n) for n, label in numbered]
    )
    # measured, not made up
    committed = (
        *("scaling", "bound_grid_prior", "sampled", "sampled_variance", "sampled_count"),
        *("finetune", "conditioned_slack", "alternatives"),
    )
    for name in (f"{stem}.csv" for stem in committed):
        shutil.copy(ILLUSTRATIONS / "data" / name, tmp_path)
    return tmp_path


@pytest.fixture
def drawn(data, monkeypatch):
    """Draws a figure and keeps it."""
    monkeypatch.setattr(plt, "close", lambda *_: None)

    def draw(name):
        FIGURES[name](data, data / "figure.png")
        return plt.gcf()

    yield draw
    monkeypatch.undo()
    plt.close("all")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_and_closed(name, data):
    FIGURES[name](data, data / f"{name}.png")
    assert (data / f"{name}.png").read_bytes().startswith(PNG) and not plt.get_fignums()


def test_the_csv_of_a_grid_is_collected_as_it_is(tmp_path):
    made = ILLUSTRATIONS / "data" / "bound_grid_prior.csv"
    (tmp_path / "runs/bound-grid-prior").mkdir(parents=True)
    shutil.copy(made, tmp_path / "runs/bound-grid-prior/grid.csv")
    records.collect(tmp_path / "runs", tmp_path / "data")
    assert (tmp_path / "data/bound_grid_prior.csv").read_text() == made.read_text()


def test_numbers_of_the_paper_are_figures():
    assert set(NUMBERS.values()) <= set(FIGURES)
    assert set(NUMBERS) == {str(number) for number in range(1, 17)}


def test_absent_data_are_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(NtkMarglikError, match=r"runs_timing_lila\.csv.*--source runs"):
        FIGURES["pareto_lila"](tmp_path, tmp_path / "x.png")


# ------------------------------------------------------------------------------------- Pareto front


def test_the_front_is_what_nothing_dominates():
    grid = itertools.product([1.0, 2.0, 3.0, 4.0], repeat=2)
    points = [pareto.Point(s, v, 0, f"{s},{v}") for s, v in grid if (s * 7 + v * 5) % 3 != 0]

    def dominated(p):
        return any(
            q.seconds <= p.seconds
            and q.value >= p.value
            and (q.seconds, q.value) != (p.seconds, p.value)
            for q in points
        )

    assert set(pareto.front(points)) == {p for p in points if not dominated(p)}
    assert pareto.front(points[:1]) == points[:1]


def test_dominated_points_are_faint(drawn):
    picture = drawn("pareto_prior")
    evidence = picture.axes[0]
    markers = [
        line
        for line in evidence.lines
        if line.get_marker() not in ("None", "_", "|") and len(line.get_xdata()) == 1
    ]
    faint = [line for line in markers if line.get_alpha() == pareto.FAINT]
    names = {text.get_text() for text in evidence.texts} & set(LABELS)
    best = [line for line in markers if line.get_alpha() == 1 and line.get_color() != "black"]
    assert faint and len(markers) == len(LABELS) - 1 and len(names) >= len(best)
    # all data: black, named and never faint
    black = [line for line in markers if line.get_color() == pareto.OF_ALL_DATA]
    of_all_data = {label for label in LABELS if "-N-" in label}
    written = " ".join(text.get_text() for text in evidence.texts)
    assert len(black) == len(of_all_data) and all(label in written for label in of_all_data)
    assert not set(black) & set(faint)
    assert evidence.get_xscale() == "log"


# ------------------------------------------------------------------------------------------- traces


def test_panels_hold_their_family_in_order():
    assert list(traces.parametric(LABELS)) == ["full-N-C", "blockdiag-N-C", "kfac-N-C", "diag-N-C"]
    curves = traces.by_subset("ntk", "1", LABELS)
    assert [curve.name for curve in curves.values()] == ["S = 10", "S = 100", "S = N"]
    assert "ntk-100-1 grouped" not in curves
    others = traces.by_subset("kfac", "C", LABELS)
    assert others["kfac-100-C"].colour == curves["ntk-100-1"].colour  # one colour for a size
    assert [curve.name for curve in others.values()] == ["S = 10", "S = 100", "S = N"]


def test_single_outputs_of_all_data_stand_in_for_all_outputs_and_look_so():
    few = ["kfac-N-C", "kfac-N-1", "ntk-N-1", "blockdiag-N-1", "ntk-100-C"]
    curves = traces.parametric(few)
    assert {label: curve.line for label, curve in curves.items()} == {
        "kfac-N-C": "-",
        "ntk-N-1": ":",
        "blockdiag-N-1": ":",
    }
    assert "1 output" in curves["ntk-N-1"].name


def test_curves_are_means_over_seeds_and_are_named_at_their_end(drawn):
    picture = drawn("traces_prior")
    evidence, kernel, test, _ = picture.axes
    small, large, whole = kernel.lines
    assert list(small.get_xdata()) == [3, 6, 9]
    assert small.get_ydata()[-1] == pytest.approx(-3 + LABELS.index("ntk-10-C") / 10 + 0.01)
    assert [t.get_text() for t in kernel.texts] == ["S = 100", "S = 10", "S = N"]
    assert len({line.get_color() for line in (small, large, whole)}) == 3
    # NTK-N-C is the full curvature
    assert list(whole.get_ydata()) == list(evidence.lines[0].get_ydata())
    assert "MAP" not in [t.get_text() for t in evidence.texts] and "MAP" in [
        t.get_text() for t in test.texts
    ]


def test_families_without_runs_have_no_panel(drawn, data):
    kept = [
        row
        for row in records.read(data / "traces_bound_prior.csv")
        if "-C" not in row["estimator"] and "-N-" not in row["estimator"]
    ]
    records.write(data / "traces_bound_prior.csv", records.TRACE_COLUMNS, kept)
    titles = [axes.get_title(loc="left") for axes in drawn("traces_prior_doubly").axes]
    assert [title for title in titles if title] == ["NTK, single outputs", "KFAC, single outputs"]
    with pytest.raises(NtkMarglikError, match="no runs of all data"):
        FIGURES["traces_prior"](data, data / "figure.png")


def test_labels_do_not_meet():
    with plt.rc_context(style.STYLE):
        figure, axes = plt.subplots()
        style.label_ends(
            axes, [(0.5 + 1e-3 * i, str(i), "black") for i in range(8)] + [(0.0, "low", "black")]
        )
        heights = sorted(text.get_position()[1] for text in axes.texts)
        plt.close(figure)
    assert all(b - a > style.GAP - 1e-9 for a, b in itertools.pairwise(heights)) and heights[0] >= 0


# -------------------------------------------------------------------------------------------- wandb


def test_runs_at_wandb_become_run_folders(tmp_path, monkeypatch):
    config = Config().updated(method="kfac", subset=0, out="runs/bound-prior/a", seed=3)
    finished = types.SimpleNamespace(
        name="a",
        config=config.flat(),
        scan_history=lambda: [{"epoch": 1, "loss": 0.5, "_step": 1}, {"_step": 2}],
        summary={"test_accuracy": 0.5, "log_marglik": -1.0, "n_data": 60, "_wandb": {"runtime": 3}},
    )
    broken = types.SimpleNamespace(name="b", config={}, summary={}, scan_history=list)
    tuned = types.SimpleNamespace(
        name="c", config=FinetuneConfig().flat(), summary=finished.summary, scan_history=list
    )
    api = types.SimpleNamespace(
        runs=lambda project: [finished, broken, tuned] if project == "me/it" else 1 / 0
    )
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Api=lambda: api))
    assert download("me/it", tmp_path) == [tmp_path / "bound-prior" / "a"]
    run = records.run_row(tmp_path / "bound-prior" / "a")
    assert (run["estimator"], run["seed"], run["dataset"], run["n_data"]) == (
        "kfac-N-1",
        3,
        "digits",
        60,
    )
    assert json.loads((tmp_path / "bound-prior" / "a" / "metrics.jsonl").read_text()) == {
        "epoch": 1,
        "loss": 0.5,
    }
    with pytest.raises(NtkMarglikError, match="other"):
        download("other", tmp_path)


def test_runs_of_fine_tuning_are_not_taken_for_others(tmp_path):
    folder = tmp_path / "runs" / "finetune" / "a"
    folder.mkdir(parents=True)
    settings = FinetuneConfig().updated(method="map-gs").flat()
    (folder / "config.yaml").write_text(json.dumps(settings, default=str))
    (folder / "summary.json").write_text('{"test_accuracy": 0.5}')
    records.collect(tmp_path / "runs", tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


HOSTILE = ("../../evil", "..", "", "/etc/passwd", "a\\b:c\0d", "x" * 500, "a", "a")


def test_names_at_wandb_lead_to_no_other_folder(tmp_path, monkeypatch):
    """Whoever may write to a project chooses names of runs, and the settings that name folders."""
    target = tmp_path / "below" / "runs"
    runs = [
        types.SimpleNamespace(
            name=name,
            id=f"../{number}",
            config={**Config().flat(), "out": f"/nowhere/../{name}/../.."},
            summary={"test_accuracy": 0.5},
            scan_history=list,
        )
        for number, name in enumerate(HOSTILE)
    ]
    api = types.SimpleNamespace(runs=lambda project: runs)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Api=lambda: api))
    folders = download("me/it", target)
    assert len(set(folders)) == len(HOSTILE)
    for folder in folders:
        assert folder.resolve().parent.parent == target.resolve()
        assert (folder / "summary.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["below"]


def test_wandb_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(NtkMarglikError, match=r"ntk-marglik\[wandb\]"):
        download("me/it", tmp_path)


# ------------------------------------------------------------------------------------------- scheme


def test_the_scheme_partitions_all_weights_and_all_rows():
    whole = scheme._matrix([scheme.P], "black")
    assert (whole == 0).all()
    for sizes in (scheme.LAYERS, [1] * scheme.P):
        picture = scheme._matrix(sizes, "black")
        assert len(picture) == scheme.P and (picture[..., 0] == 0).sum() == sum(
            s * s for s in sizes
        )
    seen = scheme._matrix([2] * 6, "black", seen=0)
    assert (seen[:2, :2] == 0).all() and (seen[2:4, 2:4] > 0).all() and len(seen) == scheme.ROWS


def test_the_overview_has_the_scheme_and_two_families_of_bounds(drawn):
    picture = drawn("overview")
    words = {text.get_text() for axes in picture.findobj(plt.Axes) for text in axes.texts}
    assert {"Theorem 1", "Theorem 2", "Theorem 3", "KFAC", "S = 10", "exact"} <= words
