"""The lines of a run: whatever has happened to their file, each is read once, or its loss named."""

import pytest

from ntkmarglik.runs.metrics import as_text, from_text, read_metrics

LINES = [{"epoch": n, "loss": 1 / n} for n in range(1, 6)]


def damaged(text):
    *lines, _ = text.split("\n")
    return {
        "whole": (text, 5, ""),
        "cut": (text[:-5], 4, ""),  # what a program may be writing at this moment
        "doubled": (text + text, 5, "5 damaged or doubled"),
        "emptied": ("", 0, ""),
        "noise": ("\x00\xff\n" + text, 5, "1 damaged or doubled"),
        "lost": ("\n".join([*lines[:2], *lines[3:], ""]), 4, "1 epochs are missing (3)"),
        "scalars": ("3\n[1]\nnull\n" + text, 5, "3 damaged or doubled"),
        "deep": ("[" * 5000 + "\n" + text, 5, "1 damaged or doubled"),
        "no number": ('{"epoch": "x"}\n' + text, 5, "1 damaged or doubled"),
    }


@pytest.mark.parametrize("kind", damaged(as_text(LINES)))
def test_each_line_is_read_once_and_a_loss_is_named(kind, tmp_path, capsys):
    text, number, words = damaged(as_text(LINES))[kind]
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    lines = read_metrics(tmp_path)
    assert len(lines) == number and all(line in LINES for line in lines)
    said = capsys.readouterr().err
    assert words in said if words else said == ""
    read_metrics(tmp_path, quiet=True)
    assert capsys.readouterr().err == ""


def test_without_a_file_there_are_no_lines(tmp_path):
    assert read_metrics(tmp_path) == []


def test_lines_survive_being_written():
    assert from_text(as_text(LINES)) == (LINES, 0)
    steps = [{"step": 3}, {"step": 7}]
    assert from_text(as_text(steps)) == (steps, 0)
