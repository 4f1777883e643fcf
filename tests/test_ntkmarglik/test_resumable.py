"""What every resumable run has in common, with a run that only counts."""

import json
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.runs import checkpoint, resumable
from ntkmarglik.runs.folder import RunFolder, read_summary
from ntkmarglik.runs.metrics import read_metrics
from ntkmarglik.runs.origin import origin
from ntkmarglik.runs.resumable import how_to_continue, resumable_run
from ntkmarglik.settings import Settings


@dataclass(frozen=True)
class Counting:
    goal: int = 4
    wandb: bool = False
    tensorboard: bool = False


@dataclass(frozen=True)
class CountingConfig(Settings):
    script = "count.py"

    counting: Counting = field(default_factory=Counting)


class Counter:
    """Counts to its goal; `fails_at` interrupts it after a count, once its checkpoint is there."""

    unit = "count"
    ranks = None
    identity: ClassVar = {"data": "the numbers from 1 on"}

    def __init__(self, goal=4, fails_at=0):
        self.config = CountingConfig(Counting(goal))
        self.position = 0
        self.total = goal
        self.fails_at = fails_at

    @property
    def place(self):
        return f"count {self.position}"

    @property
    def finished(self):
        return self.position == self.total

    def restore(self, state):
        self.position = state["position"]

    def run(self, folder, progress=None):
        while not self.finished:
            self.position += 1
            folder.log({"count": self.position, "loss": 1 / self.position})
            folder.save({"position": self.position, "settings": self.config.flat()})
            progress({"loss": 1 / self.position})
            if self.position == self.fails_at:
                raise KeyboardInterrupt


def summarise(counter):
    return {"counted": counter.position}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def closed(monkeypatch):
    """The summaries with which folders were closed."""
    summaries = []
    close = RunFolder.close

    def recorded(self, summary):
        summaries.append(summary)
        close(self, summary)

    monkeypatch.setattr(RunFolder, "close", recorded)
    return summaries


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


LINES = [{"count": n, "loss": 1 / n} for n in (1, 2, 3, 4)]


def test_a_fresh_run_goes_to_its_end_and_says_nothing(path, closed, capsys):
    assert resumable_run(Counter(), summarise, path, resume=False) == (LINES, {"counted": 4})
    assert read_metrics(path) == LINES and read_summary(path) == {"counted": 4}
    assert closed == [{"counted": 4}]
    assert capsys.readouterr().err == ""


def test_resuming_where_there_is_no_checkpoint_starts_and_says_so(path, capsys):
    resumable_run(Counter(), summarise, path, resume=True, label="counting")
    message = f"counting: there is no checkpoint in {path} yet, starting from the first count\n"
    assert capsys.readouterr().err == message


def test_an_interrupted_run_closes_its_folder_and_is_continued(path, closed, capsys):
    with pytest.raises(KeyboardInterrupt):
        resumable_run(Counter(fails_at=2), summarise, path, resume=False)
    assert closed == [{}] and read_summary(path) is None
    counter = Counter()
    assert resumable_run(counter, summarise, path, resume=True) == (LINES, {"counted": 4})
    assert capsys.readouterr().err == "continuing after count 2\n"
    assert read_metrics(path) == LINES


def test_a_finished_run_is_read_from_its_folder(path, monkeypatch, capsys):
    resumable_run(Counter(), summarise, path, resume=False)
    (path / "summary.json").write_text(json.dumps({"counted": "as it was written"}))
    before = contents(path)
    monkeypatch.setattr(Counter, "run", lambda *_: pytest.fail("a finished run was run again"))
    results = resumable_run(Counter(), summarise, path, resume=True)
    assert results == (LINES, {"counted": "as it was written"})
    assert contents(path) == before and capsys.readouterr().err == ""


def test_a_run_that_lacks_only_its_summary_gets_it(path):
    resumable_run(Counter(), summarise, path, resume=False)
    (path / "summary.json").unlink()
    assert resumable_run(Counter(), summarise, path, resume=True) == (LINES, {"counted": 4})


def test_a_finished_run_without_its_checkpoint_is_what_its_files_say(path, monkeypatch):
    resumable_run(Counter(), summarise, path, resume=False)
    for file in path.glob("checkpoint*"):
        file.unlink()
    before = contents(path)
    monkeypatch.setattr(Counter, "run", lambda *_: pytest.fail("a finished run was run again"))
    assert resumable_run(Counter(), summarise, path, resume=True) == (LINES, {"counted": 4})
    with pytest.raises(NtkMarglikError, match="goal = 4"):
        resumable_run(Counter(goal=9), summarise, path, resume=True)
    assert contents(path) == before


def test_damaged_lines_and_settings_of_a_finished_run_are_restored(path, capsys):
    resumable_run(Counter(), summarise, path, resume=False)
    before = contents(path)
    (path / "metrics.jsonl").write_text("")
    (path / "config.yaml").write_text("goal: 4\n")
    assert resumable_run(Counter(), summarise, path, resume=True) == (LINES, {"counted": 4})
    assert contents(path) == before
    assert capsys.readouterr().err.count("was damaged: restored") == 2


@pytest.mark.parametrize("lost", ["position", "lines", "origin", "settings"])
def test_a_checkpoint_with_missing_entries_gives_way_to_the_one_before(path, lost, capsys):
    with pytest.raises(KeyboardInterrupt):
        resumable_run(Counter(fails_at=3), summarise, path, resume=False)
    file = path / "checkpoint.pt"
    state = checkpoint.load(file)
    del state[lost]
    file.unlink()  # which the one before may be another name of
    torch.save(state, file)
    assert resumable_run(Counter(), summarise, path, resume=True) == (LINES, {"counted": 4})
    said = capsys.readouterr().err
    assert "is not a checkpoint of this run" in said and "continuing after count 2" in said


def test_other_data_are_refused_and_other_circumstances_are_told(path, monkeypatch, capsys):
    with pytest.raises(KeyboardInterrupt):
        resumable_run(Counter(fails_at=2), summarise, path, resume=False)
    before = contents(path)
    monkeypatch.setattr(Counter, "identity", {"data": "the numbers from 2 on"})
    with pytest.raises(NtkMarglikError, match="The data of the run to resume"):
        resumable_run(Counter(), summarise, path, resume=True)
    assert contents(path) == before
    monkeypatch.undo()
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    _, summary = resumable_run(Counter(), summarise, path, resume=True)
    (change,) = summary["continued"]
    assert change["after"] == "count 2" and change["with"][0].startswith("threads 77 instead of")
    assert "will not be bit for bit" in capsys.readouterr().err
    assert resumable_run(Counter(), summarise, path, resume=True)[1] == summary


def test_a_folder_that_holds_a_run_is_refused_without_resume(path):
    resumable_run(Counter(), summarise, path, resume=False)
    before = contents(path)
    with pytest.raises(NtkMarglikError, match="already holds a run"):
        resumable_run(Counter(), summarise, path, resume=False)
    assert contents(path) == before


def test_a_checkpoint_of_other_settings_is_refused_before_anything_is_written(path):
    with pytest.raises(KeyboardInterrupt):
        resumable_run(Counter(fails_at=2), summarise, path, resume=False)
    before = contents(path)
    with pytest.raises(NtkMarglikError, match="goal = 4"):
        resumable_run(Counter(goal=9), summarise, path, resume=True)
    assert contents(path) == before


def test_an_interrupt_tells_how_to_continue(path, capsys):
    with pytest.raises(KeyboardInterrupt), how_to_continue(path):
        raise KeyboardInterrupt
    message = f"the same command with --resume --out {path} continues this run\n"
    assert capsys.readouterr().err == message
    with pytest.raises(NtkMarglikError), how_to_continue(path):
        raise NtkMarglikError("something to mend first")
    assert capsys.readouterr().err == ""


def test_the_bar_shows_the_whole_run_its_part_and_its_numbers(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    counter = Counter()
    counter.position = 1
    with resumable._progress_bar(counter, "counting") as progress:
        progress({"loss": 0.5, "log_marglik": -2.0})
        progress({"loss": 0.25}, "second part")
    shown = capsys.readouterr().err.rpartition("\r")[2]
    assert shown.startswith("second part:") and "3/4" in shown
    assert "loss=0.2500" in shown and "evidence=-2.0000" in shown


def test_what_a_checkpoint_says_of_its_origin_is_plain_text():
    """Classes of their own, as that of torch's version, are refused when it is read."""
    assert {type(value) for value in origin({"data": "x"}, 2).values()} == {str}
