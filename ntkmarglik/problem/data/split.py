"""One split of a data set as arrays, whatever format its files have."""

from pathlib import Path

import numpy as np

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data.hub import download
from ntkmarglik.problem.data.idx import read_idx
from ntkmarglik.problem.data.parquet import find_parquet, read_parquet
from ntkmarglik.problem.data.sources import Source

Split = tuple[np.ndarray, np.ndarray]
"""Images [n, h, w, c] uint8 and labels [n] int64."""


def read_split(source: Source, split: str, folder: Path) -> Split:
    """Images [n, h, w, c] uint8 and labels [n] int64 of a split, from IDX, else from Parquet."""
    idx = [folder / file for file in source.idx_files(split)]
    present = [path for path in idx if path.is_file()]
    if present and len(present) < len(idx):
        absent = next(path for path in idx if path not in present)
        raise NtkMarglikError(
            f"{present[0]} is there, but {absent.name} is not. {source.how_to_get(folder)}"
        )
    if present:
        files = idx
        images, labels = _read_idx_pair(source, *idx)
    else:
        files = find_parquet(folder, source.splits[split]) or download(source, split, folder)
        images, labels = _read_shards(source, files)
    _check(source, files[0], images, labels)
    return images, labels


def _read_idx_pair(source: Source, image_file: Path, label_file: Path) -> Split:
    images = read_idx(image_file, source.md5.get(image_file.name))
    labels = read_idx(label_file, source.md5.get(label_file.name))
    if images.ndim != 3 or labels.ndim != 1:
        raise NtkMarglikError(
            f"{image_file} and {label_file} should hold arrays of 3 axes and 1 axis, but hold "
            f"{images.ndim} and {labels.ndim}. Have the image and the label file been swapped?"
        )
    return images[..., None], labels.astype(np.int64)


def _read_shards(source: Source, files: list[Path]) -> Split:
    shards = [read_parquet(path, source.label, source.shape) for path in files]
    if len(shards) == 1:  # not copied: it may be larger than the memory
        return shards[0]
    images = np.concatenate([images for images, _ in shards])
    labels = np.concatenate([labels for _, labels in shards])
    return images, labels


def _check(source: Source, where: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Refuse arrays that are not of this data set; `where` is their first file."""
    c, h, w = source.shape
    if images.shape[1:] != (h, w, c) or len(images) != len(labels):
        raise NtkMarglikError(
            f"{where} should hold one {h}x{w} image per label, but holds {len(images)} images of "
            f"{images.shape[1]}x{images.shape[2]} and {len(labels)} labels. This looks like "
            "another data set's file."
        )
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= source.n_classes:
        present = f"{labels.min()} ... {labels.max()}" if len(labels) else "none"
        raise NtkMarglikError(
            f"{where}: labels should be 0 ... {source.n_classes - 1}, but are {present}. Delete it "
            "and fetch it again."
        )
