"""The page of a run: its words, that it needs no network, and that a browser can draw it."""

import html.parser
import json
import math
import shutil
import subprocess

import pytest
import torch

from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.report.folders import page_of
from ntkmarglik.programs.report.run import main
from ntkmarglik.runs.folder import RunFolder
from ntkmarglik.runs.page import FILE, Page, rendered, save, words
from ntkmarglik.runs.page.samples import samples

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
METHODS = ["map", "ntk", "augerino", "elbo", "sampled", "kfac"]


def made_up(method="ntk", **more):
    """The lines and the summary of a run."""
    lines = []
    for epoch in range(1, 7):
        line = {"epoch": epoch, "seconds_weights": 1.0 * epoch, "seconds_hyper": 0.5 * epoch}
        if method != "map":
            line |= {"log_marglik": -3 / epoch, "log_marglik_error": 0.01}
            line["prior_precision"] = {"0.weight": 0.1 * epoch, "2.weight": 4.0 * epoch}
        line |= {"test_log_likelihood": -1 / epoch, "test_accuracy": 0.9}
        lines.append(line)
    summary = {
        **lines[-1],
        "method": method,
        "dataset": "digits",
        "log_marglik": -0.5,
        "log_marglik_status": "approximation",
        "log_marglik_interval": [-0.6, -0.4],
        "initial_prior_precision": 0.6,
        "prior_precision": {"0.weight": 0.6, "2.weight": 24.0},
        "seconds_total": 10.0,
        "versions": {"python": "3.11", "torch": "2.13"},
        "reliability": {"network": [[0.5, 0.4, 1.0]], "posterior": []},
        **more,
    }
    return lines, summary


class Addresses(html.parser.HTMLParser):
    """What a page would load, and its elements."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset")]


def folder_with(path, lines, summary=None, **settings):
    """A run folder as the runner leaves it."""
    folder = RunFolder(path, Config().updated(dataset="digits", **settings))
    for line in lines:
        folder.log(line)
    if summary is not None:
        folder.finish(summary)
    folder.close({})
    return path


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_page_that_loads_nothing(method):
    start, end = [0.05] * 6, [0.1, 0.1, 2.0, 0.0, 0.0, 0.0]
    pictures = samples(start, end, torch.rand(2, 1, 8, 8), flip=False)
    text = rendered(Page("a run", {method: made_up(method)}, {method: "python x"}, pictures))
    found = Addresses(text)
    assert len(found.loaded) == 2
    assert all(address.startswith("data:image/png;base64,") for address in found.loaded)
    assert "python x" in text and "torch 2.13" in text and "Reliability" in text
    assert len(text) < 1.6e6


def test_the_words_say_what_changed():
    sentences = " ".join(words.learned({"ntk": made_up(augmentation=[0, 0, 3.1415, 0.1, 0, 0])}))
    assert "weight decay of layer 2 (2.weight) rose 40-fold" in sentences
    assert "layer 1 (0.weight) stayed about as it was" in sentences
    assert "rotation by any angle" in sentences and "scale x up to ±10 %" in sentences
    assert "weight decay" not in " ".join(words.learned({"map": made_up("map")}))


@pytest.mark.parametrize(
    "before, now, said",
    [(1, 40, "rose 40-fold"), (3, 1, "fell 3.0-fold"), (1, 1.5, "rose by 50 %"), (1, 1, "stayed")],
)
def test_changes_in_words(before, now, said):
    assert said in words.fold(before, now)
    assert "nan" in words.fold(before, math.nan) and "powers of ten" in words.fold(1, 1e9)


@pytest.mark.parametrize("slope, noise, said", [(0.1, 0.01, True), (0, 0.5, False), (0, 0, False)])
def test_the_evidence_still_rises_only_beyond_its_noise(slope, noise, said):
    _, summary = made_up()
    numbers = [
        {"epoch": epoch, "log_marglik": slope * epoch + noise * math.sin(9.7 * epoch)}
        for epoch in range(1, 21)
    ]
    steps = " ".join(words.next_steps({"ntk": (numbers, summary)}))
    assert ("still rising" in steps) == said


def test_names_from_outside_are_escaped():
    evil = "</script><img src=x onerror=alert(1)>"
    text = rendered(Page(evil, {evil: made_up()}, {evil: evil}))
    assert "img" not in Addresses(text).tags and evil not in text


def test_numbers_that_are_not_there_or_not_finite_do_not_matter():
    lines, summary = made_up()
    lines[2]["log_marglik"] = lines[3]["test_log_likelihood"] = math.nan
    summary |= {"log_marglik": None, "test_accuracy": math.nan, "reliability": None}
    summary["prior_precision"] = {"0.weight": math.inf, "2.weight": 0.0}
    assert "Numbers" in rendered(Page("a run", {"a": (lines, summary), "b": ([], {})}))


def test_a_page_from_the_files_of_a_run_and_of_several(tmp_path, capsys):
    one = folder_with(tmp_path / "one", *made_up())
    cut = folder_with(tmp_path / "cut", made_up()[0][:3])  # interrupted
    assert main([str(one)]) == 0 and "rose 40-fold" in (one / FILE).read_text()
    assert "--resume" in rendered(page_of([cut]))
    assert main([str(one), str(cut), "--out", str(tmp_path / "both.html")]) == 0
    text = (tmp_path / "both.html").read_text()
    assert "2 runs compared" in text and "<th>one</th><th>cut</th>" in text
    assert main([str(tmp_path)]) == 2 and "not a run folder" in capsys.readouterr().err


def test_without_the_data_there_are_no_pictures(tmp_path):
    run = made_up(augmentation=[0.1] * 6)
    there = folder_with(tmp_path / "there", *run, augment="affine", n_data=10)
    assert set(page_of([there]).pictures) == {"at the start", "at the end"}
    gone = folder_with(tmp_path / "gone", *run, augment="affine", n_data=10**6)
    assert not page_of([gone]).pictures and "Without pictures" in page_of([gone]).notes[0]


def test_a_full_disk_costs_the_page_only(tmp_path, capsys):
    save(Page("a run", {"ntk": made_up()}), tmp_path / "absent" / FILE)
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (CONTRIBUTING.md)")
def test_a_browser_draws_it_without_complaint(tmp_path):
    (tmp_path / FILE).write_text(rendered(Page("<a run>", {"ntk": made_up()})))
    flags = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    command = [CHROMIUM, *flags.split(), "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / FILE).as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert any("document idle" in line for line in said)  # all plots are drawn
    assert all("INFO:CONSOLE" in line and "rror" not in line for line in said), json.dumps(said)
    assert "bk-Figure" in done.stdout
