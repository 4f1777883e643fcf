"""Data sets that are fetched and kept: downloads from a hub made of local files, and the cache of
decoded pictures.
"""

import hashlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_files import SIZES, random_split, write_parquet, write_set
from PIL import Image

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data import load
from ntkmarglik.problem.data.cache import cache_path

# --- the cache of decoded pictures


def test_cache_is_used_refreshed_and_repaired(tmp_path, monkeypatch):
    path = write_set(tmp_path, "cifar10") / "train.parquet"
    first = load("cifar10", tmp_path)
    cache = cache_path(path)
    assert np.load(cache).shape == (30, 32, 32, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_: pytest.fail("decoded although there is a cache"))
        assert torch.equal(load("cifar10", tmp_path).x_train, first.x_train)
    cache.write_bytes(cache.read_bytes()[:1000])
    assert torch.equal(load("cifar10", tmp_path).x_train, first.x_train)
    assert np.load(cache).shape == (30, 32, 32, 3)
    images, labels = random_split("cifar10", "train")
    write_parquet(path, 255 - images, labels)
    os.utime(path, ns=(1, 1))  # even a file that looks older is another file
    assert not torch.equal(load("cifar10", tmp_path).x_train, first.x_train)
    assert not cache.exists() and cache_path(path).exists()
    assert [file.name for file in path.parent.glob(".*")] == []


def test_a_folder_that_cannot_be_written_is_no_problem(tmp_path, monkeypatch):
    folder = write_set(tmp_path, "cifar10")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    # root may write anywhere, so a read-only folder would prove nothing
    monkeypatch.setattr(np, "save", full)
    assert load("cifar10", tmp_path).n_data == 30
    assert sorted(file.name for file in folder.iterdir()) == ["test.parquet", "train.parquet"]


# --- download, with a hub made of local files


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for huggingface_hub that serves cifar10; `hub.files` may be spoiled."""
    remote = tmp_path / "remote"
    remote.mkdir()
    folder = write_set(remote, "cifar10")
    files = {
        f"plain_text/{s}-00000-of-00001.parquet": (folder / f"{s}.parquet").read_bytes()
        for s in SIZES
    }
    siblings = [
        SimpleNamespace(
            rfilename=name, size=len(data), lfs={"sha256": hashlib.sha256(data).hexdigest()}
        )
        for name, data in files.items()
    ]
    siblings.append(SimpleNamespace(rfilename="README.md", size=10, lfs=None))

    def info(repository, **kwargs):
        assert repository == "uoft-cs/cifar10" and kwargs["files_metadata"]
        return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def fetch(repository, name, *, repo_type, revision, local_dir):
        assert repo_type == "dataset" and revision == "c0ffee"
        path = Path(local_dir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
        return str(path)

    module = SimpleNamespace(
        HfApi=lambda: SimpleNamespace(dataset_info=info), hf_hub_download=fetch, files=files
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_download_arrives_in_the_layout_that_is_read(tmp_path, hub, monkeypatch):
    data = load("cifar10", tmp_path / "data")
    assert data.y_train.tolist() == random_split("cifar10", "train")[1].tolist()
    names = {file.name for file in (tmp_path / "data" / "cifar10").iterdir()}
    assert {"train.parquet", "test.parquet"} <= names and not any(
        name.startswith(".") for name in names
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # from now on the files are enough
    assert load("cifar10", tmp_path / "data").n_data == 30


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(lambda b: b[:-1], "bytes, but the hub states"), (lambda b: b[::-1], "sha256")],
)
def test_a_spoiled_download_leaves_nothing_behind(tmp_path, hub, spoil, message):
    name = "plain_text/train-00000-of-00001.parquet"
    hub.files[name] = spoil(hub.files[name])
    with pytest.raises(NtkMarglikError, match=message):
        load("cifar10", tmp_path / "data")
    assert list((tmp_path / "data" / "cifar10").iterdir()) == []
