"""Damaged checkpoints are noticed, and the one before takes their place."""

import pytest
import torch

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.runs import checkpoint


def saved(path, *numbers):
    for number in numbers:
        state = {"number": number, "weights": torch.full((50,), float(number)), "name": "x" * 40}
        checkpoint.save(path, state)
    return path


def flip(path, place, bit):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_the_one_before_is_kept(tmp_path):
    path = saved(tmp_path / "checkpoint.pt", 1, 2, 3)
    assert checkpoint.load(path)["number"] == 3
    assert checkpoint.load(checkpoint.previous(path))["number"] == 2
    assert len(list(tmp_path.iterdir())) == 2


def newest(path):
    """The first candidate that can be read, as a resumed run takes it."""
    states = [state for _, state in checkpoint.candidates(path)]
    return next(state for state in states if not isinstance(state, NtkMarglikError))


def test_no_flipped_bit_changes_a_number(tmp_path):
    """Every byte of a file in turn: the state is what it was, or that of the one before."""
    path = saved(tmp_path / "checkpoint.pt", 1, 2)
    whole = path.read_bytes()
    fallbacks = 0
    for place in range(0, len(whole), 7):
        flip(path, place, place % 8)
        state = newest(path)
        number = state["number"]
        assert number in (1, 2)
        assert torch.equal(state["weights"], torch.full((50,), float(number)))
        assert state["name"] == "x" * 40
        fallbacks += number == 1
        path.write_bytes(whole)
    assert fallbacks > 0.3 * len(range(0, len(whole), 7))


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None], ids=["empty", "text", "cut"])
def test_damaged_files(damage, tmp_path):
    path = saved(tmp_path / "checkpoint.pt", 1, 2)
    content = path.read_bytes()
    path.unlink()  # the link to the one before stays as it is
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert newest(path)["number"] == 1
    with pytest.raises(NtkMarglikError, match="cannot be read as a checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["file", "checkpoint.pt"])
def test_links_at_temporary_names_are_not_followed(tmp_path, monkeypatch, name):
    """Nobody can guess them; were they guessed, the file would not be written."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "17")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"{name}.17.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        checkpoint.replace(tmp_path / name, b"new")
    assert victim.read_text() == "precious" and not (tmp_path / name).exists()
