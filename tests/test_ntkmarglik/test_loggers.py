"""Mirrors of a run folder with the real libraries, without a network or an account."""

import pytest
from tiny_runs import TINY

from ntkmarglik.programs.classify.command import main
from ntkmarglik.runs.loggers import numbers
from ntkmarglik.runs.metrics import read_metrics


def test_nested_metrics_are_numbers_by_name():
    metrics = {"a": 1, "b": {"c": 2.0, "d": [3, 4]}, "e": "text", "f": True, "g": None}
    assert numbers(metrics) == {"a": 1, "b/c": 2.0, "b/d/0": 3, "b/d/1": 4}


@pytest.mark.parametrize("mode", ["offline", ""])
def test_a_run_is_mirrored_offline(mode, tmp_path, monkeypatch, capsys):
    """By request, and where nobody is logged in; the file is for a later `wandb sync`."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    out = tmp_path / "mirrored"
    assert main([*TINY, "--method", "map", "--wandb", "--out", str(out)]) == 0
    assert "warning: Wandb" not in capsys.readouterr().err
    (stored,) = out.glob("wandb/offline-run-*/*.wandb")
    content = stored.read_bytes()
    last = read_metrics(out)[-1]
    for text in ("ntk-marglik", "mirrored", "test_accuracy", "batch_size", repr(last["loss"])):
        assert text.encode() in content, text
