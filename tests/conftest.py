"""Shared settings: float64 references, one thread (tests run in parallel processes), warnings as errors elsewhere."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
