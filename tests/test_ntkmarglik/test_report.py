"""The table and the picture at the end of a run."""

import io

import pytest
import torch
from matplotlib import pyplot as plt
from rich.console import Console

from ntkmarglik.learn.evaluate import calibration_error, evaluate, metrics
from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.runs import report

PNG = b"\x89PNG"


def made_up(label, *, tensors=4, learned=True, augmented=False):
    """A run of twenty epochs as the runner records it."""
    epochs = []
    for epoch in range(1, 21):
        line = {"epoch": epoch, "loss": 1 / epoch}
        if learned and epoch >= 10:
            line |= {"log_marglik": -30 / epoch}
            if augmented:
                line["augmentation"] = [0.01 * epoch] * 2 + [0.15 * epoch] + [0.0] * 3
        if epoch % 2 == 0:
            line["test_log_likelihood"] = -5 / epoch
        epochs.append(line)
    names = [f"{i // 2}.{'bias' if i % 2 else 'weight'}" for i in range(tensors)]
    summary = {
        "test_accuracy": 0.98765,
        "test_log_likelihood": -0.25,
        "test_ece": 0.0123,
        "train_log_likelihood": -0.01,
        "log_marglik": -1.5 if learned else -17.9,
        "method": "ntk",
        "log_marglik_status": "approximation",
        "log_marglik_error": 0.0212,
        "seconds_total": 12345.6,
        "prior_precision": {name: 10.0**i for i, name in enumerate(names)},
        "initial_prior_precision": 1.0,
        "augmentation": None,
    }
    return {label: (epochs, summary)}


def printed(runs, width):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(report.table(runs))
    return console.file.getvalue()


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws a figure and keeps its axes."""
    monkeypatch.setattr(plt, "close", lambda *_: None)

    def draw(runs, **options):
        plt.rcdefaults()
        report.figure(runs, tmp_path / "figure.png", **options)
        assert (tmp_path / "figure.png").read_bytes().startswith(PNG)
        return plt.gcf()

    yield draw
    monkeypatch.undo()
    plt.close("all")


@pytest.mark.parametrize("width", [100, 80])
def test_the_table_has_every_number_and_fits(width):
    text = printed(made_up("ntk-500-1") | made_up("MAP baseline", learned=False), width)
    assert max(map(len, text.splitlines())) <= width
    for part in (
        "ntk-500-1",
        "MAP baseline",
        "98.77 %",
        "-0.2500",
        "0.0123",
        "-0.0100",
        "-1.5000 ± 0.0212",
        "12345.6",
    ):
        assert part in text  # on one line: not broken in two
    assert "an approximation" in text


def test_a_narrow_table_keeps_its_numbers_whole():
    text = printed(made_up("ntk-500-1") | made_up("MAP baseline", learned=False), 60)
    assert max(map(len, text.splitlines())) <= 60
    assert all(part in text for part in ("98.77 %", "-0.2500", "-1.5000", "-17.9000"))


def test_an_exact_evidence_has_no_error():
    runs = made_up("full-N-C")
    runs["full-N-C"][1].update(log_marglik_status="exact", log_marglik_error=None)
    assert "exact" in printed(runs, 80) and "±" not in printed(runs, 80)


def test_the_picture_shows_curves_ends_and_precisions(drawn):
    picture = drawn(made_up("ntk-500-1") | made_up("MAP baseline", learned=False))
    evidence, test, prior = picture.axes
    assert "evidence" in evidence.get_title("left") and "log-likelihood" in test.get_title("left")
    low, high = evidence.get_ylim()
    assert low < -17.9 < -1.5 < high  # where both runs end, also the one that has no curve
    assert prior.get_xscale() == "log" and [t.get_text() for t in prior.get_yticklabels()][:2] == [
        "0.weight",
        "0.bias",
    ]
    for axes in picture.axes:
        box, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
        assert not box.overlaps(legend)  # beside the data, not over them


def test_many_tensors_have_no_names(drawn):
    picture = drawn(made_up("ntk-500-1", tensors=60))
    assert "0.weight" not in [t.get_text() for t in picture.axes[2].get_yticklabels()]


@pytest.mark.parametrize("channels", [1, 3])
def test_an_augmentation_adds_its_ranges_and_examples(channels, drawn):
    augment = AffineAugmentation(2, init=[0.1, 0.1, 2.0, 0, 0, 0])
    picture = drawn(
        made_up("ntk", augmented=True), augment=augment, example=torch.randn(channels, 12, 12)
    )
    ranges, sheet = picture.axes[3:]
    labels = [text.get_text() for text in ranges.get_legend().get_texts()]
    assert labels == ["shift x", "shift y", "rotation", "scale x", "scale y", "shear"]
    assert sheet.images[0].get_array().shape[2] == 3


def test_a_run_of_one_epoch_can_be_drawn(drawn):
    runs = made_up("map", learned=False)
    drawn({"map": (runs["map"][0][:1], runs["map"][1])})


def test_a_full_disk_costs_the_picture_only(tmp_path, capsys):
    report.save(made_up("ntk"), tmp_path / "absent" / "figure.png")
    assert "cannot be written" in capsys.readouterr().err


def test_the_users_matplotlib_settings_stay():
    before = dict(plt.rcParams)
    report.figure(made_up("ntk"), io.BytesIO())
    assert dict(plt.rcParams) == before and not plt.get_fignums()


def test_metrics_of_known_predictions():
    logits = torch.tensor([[0.0, 100.0], [0.0, 100.0], [0.0, 0.0], [0.0, 0.0]])
    found = metrics(logits, torch.tensor([1, 0, 0, 1]))
    assert found["accuracy"] == 0.5 and found["log_likelihood"] == pytest.approx(
        (-100 - 2 * 0.6931472) / 4
    )
    # half of the sure ones are wrong, the others are calibrated
    assert found["ece"] == pytest.approx(0.25)


def test_calibration_is_zero_for_honest_probabilities(generator):
    p = torch.rand(200_000, generator=generator, dtype=torch.float64)
    y = (torch.rand(200_000, generator=generator) < p).long()
    assert calibration_error(torch.stack([1 - p, p], 1), y) < 5e-3


def test_evaluation_does_not_depend_on_the_batch_size(generator):
    x, y = torch.randn(101, 10, generator=generator, dtype=torch.float64), torch.arange(101) % 10
    whole = evaluate(lambda part: part, x, y, 1000)
    assert evaluate(lambda part: part, x, y, 7) == whole
