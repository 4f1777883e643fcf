"""Shared settings: one thread for each test process, and fixtures; warnings are errors."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory; what is started there can import what tests import."""
    monkeypatch.chdir(tmp_path)
    paths = [str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path
