"""The doctor: what it finds, what it calls a problem, and that its self-test can fail."""

import pytest

from ntkmarglik.programs.doctor import run as doctor
from ntkmarglik.programs.doctor import selftest

ASKED = [
    "torch>=2.13",
    'tyro>=0.9; extra == "runner"',
    'ntk-marglik[runner]; extra == "launch"',
    'submitit>=1.5.2; extra == "launch"',
    'pytest>=8.0; extra == "dev"',
]


def test_what_is_there_and_what_is_not(tmp_path, capsys):
    mnist = tmp_path / "mnist"
    mnist.mkdir()
    for name in ("train", "t10k"):
        (mnist / f"{name}-images-idx3-ubyte.gz").touch()
        (mnist / f"{name}-labels-idx1-ubyte.gz").touch()
    arguments = ["--data-root", str(tmp_path), "--runs", str(tmp_path / "runs"), "--no-test"]
    assert doctor.main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in said} <= {"ok", "missing"}
    assert f"ok       data set mnist in {mnist}" in said
    assert f"missing  data set usps in {tmp_path / 'usps'}" in said
    assert any("GB of memory can be had" in line for line in said)
    assert not (tmp_path / "runs").exists()


def test_extras_are_read_from_the_metadata():
    assert doctor.optional(ASKED) == {"tyro": "runner", "submitit": "launch"}


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path, capsys):
    (tmp_path / "file").touch()
    runs = tmp_path / "file" / "runs"
    assert doctor.main(["--data-root", str(tmp_path), "--runs", str(runs), "--no-test"]) == 1
    assert "problem  no run can be written below" in capsys.readouterr().out


def test_little_memory_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "free_memory", lambda _: 1e8)
    assert ("problem", "0.10 GB of memory can be had; close other programs") in doctor.machine()


def test_the_self_test_passes():
    assert selftest.evidence_error() < selftest.TOLERANCE


@pytest.mark.parametrize("wrong", ["value", "gradient"])
def test_the_self_test_sees_a_small_error(wrong, monkeypatch):
    right = selftest.by_definition

    def shifted(model, log_precision, x, y):
        shift = 1e-8 * log_precision.sum()
        other = shift.detach() if wrong == "value" else shift - shift.detach()
        return right(model, log_precision, x, y) + other

    monkeypatch.setattr(selftest, "by_definition", shifted)
    assert selftest.evidence_error() > selftest.TOLERANCE
    monkeypatch.setattr(selftest, "tiny_run", lambda: "it broke")
    assert [status for status, _ in doctor.self_test()] == ["problem", "problem"]


def test_a_tiny_run_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(selftest, "TINY_RUN", ("--dataset", "absent"))
    assert "ended with code 2: error: Unknown data set 'absent'" in selftest.tiny_run()
