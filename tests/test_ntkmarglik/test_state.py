"""What a launcher writes down: found again, also when the list is damaged."""

import json

import pytest

pytest.importorskip("submitit")
from launches import fakes, follow, sweep_of, until

from ntkmarglik.programs.launch.executors import Ticket
from ntkmarglik.programs.launch.state import NOTE, STATE, State, note_tickets, read_state

DAMAGES = {
    "empty": b"",
    "cut": b'{"executor": "local", "pla',
    "noise": b"\x00\xff\x17",
    "list": b"[1, 2]",
    "other names": b'{"a": 1}',
    "other kinds": b'{"executor": 3, "place": [], "lines": {"a": 7}}',
    "no tickets": b'{"executor": "local", "place": "/", "lines": {"a": {"failures": 0}}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_from_a_damaged_list_jobs_are_found_by_their_notes(damage, tmp_path, capsys):
    tickets = {}
    for number in range(2):
        folder = tmp_path / "jobs" / str(number)
        folder.mkdir(parents=True)
        tickets[f"run {number}"] = Ticket(str(folder), str(100 + number))
    note_tickets("local", tickets)
    (tmp_path / STATE).write_bytes(DAMAGES[damage])
    state = read_state(tmp_path)
    assert state.executor == "local" and state.tickets() == tickets
    assert "is damaged" in capsys.readouterr().err
    (tmp_path / "jobs/1" / NOTE).write_bytes(DAMAGES[damage])
    assert read_state(tmp_path).tickets() == {"run 0": tickets["run 0"]}
    assert "are not known" in capsys.readouterr().err


def test_a_list_is_read_as_it_was_written(tmp_path):
    assert read_state(tmp_path) is None
    state = State("local", "/here", {"a": {"failures": 2, "ticket": None}})
    state.write(tmp_path)
    assert read_state(tmp_path) == state and state.tickets() == {}


def test_jobs_of_a_damaged_list_can_be_stopped(place):
    (task,) = fakes(place, "waits")
    sweep = sweep_of([task], place)
    sweep.step()
    until(task.log)
    (place / "table.launch" / STATE).write_text("damaged")
    renewed = sweep_of([task], place)
    assert renewed.stop() == 1
    until(lambda: "interrupted" in task.log())
    assert json.loads((place / "table.launch" / STATE).read_text())["lines"] == {}
    (task.folder / "go").touch()
    follow(sweep_of([task], place))
    assert task.finished()
