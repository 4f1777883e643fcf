"""Labelled examples as they are in their files: pictures of any size, or texts."""

from __future__ import annotations

import difflib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data.digits import PIXEL_MAX, read_digits
from ntkmarglik.problem.data.hub import download
from ntkmarglik.problem.data.parquet import IMAGE_COLUMNS, find_parquet, labels_in
from ntkmarglik.problem.data.sources import SOURCES, Source
from ntkmarglik.problem.data.split import read_split

ANY_SIZE = (3, 0, 0)
PICTURES = {
    "flowers102": Source("flowers102", "dpdl-benchmark/oxford_flowers102", ANY_SIZE, 102),
    "pets37": Source("pets37", "timm/oxford-iiit-pet", ANY_SIZE, 37),
}
TEXTS = {"ag_news": Source("ag_news", "fancyzhx/ag_news", (0, 0, 0), 4)}
NAMES = ("digits", *SOURCES, *PICTURES, *TEXTS)


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs (pictures [h, w, c] uint8, bytes of picture files, or texts) and labels [n] int64."""

    inputs: np.ndarray | list[bytes] | list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """Differs for other examples."""
        digest = hashlib.sha256(self.labels.tobytes())
        for source in self.inputs:
            content = source.encode() if isinstance(source, str) else bytes(source)
            digest.update(len(content).to_bytes(8, "big") + content)
        return f"{len(self)}-{digest.hexdigest()[:16]}"

    def chosen(self, index: np.ndarray) -> Examples:
        """Some of them, in the order of `index`."""
        inputs = self.inputs
        labels = self.labels[index]
        if isinstance(inputs, np.ndarray):
            return Examples(inputs[index], labels)
        return Examples([inputs[i] for i in index], labels)

    def picture(self, i: int) -> np.ndarray:
        """Input i as a picture [h, w, 3] uint8; grey ones in three equal channels."""
        from PIL import Image

        source = self.inputs[i]
        if isinstance(source, bytes):
            try:
                with Image.open(io.BytesIO(source)) as picture:
                    return np.asarray(picture.convert("RGB"))
            except (OSError, SyntaxError, ValueError) as error:
                raise NtkMarglikError(
                    f"A picture cannot be decoded ({error}); fetch its file again."
                ) from error
        assert isinstance(source, np.ndarray)
        return np.repeat(source, 3, axis=2) if source.shape[2] == 1 else source


def is_text(name: str) -> bool:
    """Whether a data set is of texts."""
    return name in TEXTS


def check_dataset(name: str) -> None:
    """Refuse a name that is none of NAMES."""
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise NtkMarglikError(f"Unknown data set {name!r}.{hint} Known are {', '.join(NAMES)}.")


def read(name: str, root: Path) -> tuple[Examples, Examples, int]:
    """Training and test examples of a data set and its number of classes, downloaded if need be."""
    check_dataset(name)
    if name == "digits":
        train, test = read_digits()
        return _brightened(*train), _brightened(*test), 10
    source = {**SOURCES, **PICTURES, **TEXTS}[name]
    folder = Path(root) / source.folder
    if name in SOURCES:
        parts = [Examples(*read_split(source, split, folder)) for split in ("train", "test")]
    else:
        columns = ("text",) if name in TEXTS else IMAGE_COLUMNS
        parts = [_cells(source, split, folder, columns) for split in ("train", "test")]
    return parts[0], parts[1], source.n_classes


def _brightened(images: np.ndarray, labels: np.ndarray) -> Examples:
    """Digits, whose white is PIXEL_MAX, as pictures whose white is 255."""
    pictures = images * (255 / PIXEL_MAX)
    return Examples(pictures.round().astype(np.uint8), labels)


def _cells(source: Source, split: str, folder: Path, columns: Sequence[str]) -> Examples:
    """Texts or bytes of pictures: the cells of the first of `columns` that the split has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    inputs: list = []
    label_columns: list[np.ndarray] = []
    for path in find_parquet(folder, source.splits[split]) or download(source, split, folder):
        try:
            names = pq.read_schema(path).names
            column = next((name for name in columns if name in names), None)
            if column is None or source.label not in names:
                raise NtkMarglikError(
                    f"{path} should have a column {' or '.join(columns)} and a label column "
                    f"{source.label!r}, but has {names}. Replace it by the file of the Hugging "
                    "Face hub."
                )
            table = pq.read_table(path, columns=[column, source.label])
        except (pa.ArrowException, OSError) as error:
            raise NtkMarglikError(
                f"{path} is not a readable Parquet file ({error}); it may be cut short. Delete it "
                "and fetch it again."
            ) from error
        cells = table[column].to_pylist()
        inputs += [cell["bytes"] if isinstance(cell, dict) else cell for cell in cells]
        label_columns.append(labels_in(table[source.label], path))
    labels = np.concatenate(label_columns)
    known = len(labels) and labels.min() >= 0 and labels.max() < source.n_classes
    if not known or any(cell is None for cell in inputs):
        raise NtkMarglikError(
            f"{folder}: every example of the {split} split should have an input and a label 0 ... "
            f"{source.n_classes - 1}. Delete its files and fetch them again."
        )
    return Examples(inputs, labels)


def restricted(examples: Examples, classes: Sequence[int], n_classes: int) -> Examples:
    """The examples with these labels, numbered anew in the order given; all for no labels."""
    if not classes:
        return examples
    unknown = [c for c in classes if not 0 <= c < n_classes]
    if unknown or len(set(classes)) != len(classes) or len(classes) < 2:
        raise NtkMarglikError(
            f"--classes must be at least two different labels of 0 ... {n_classes - 1}, but are "
            f"{' '.join(map(str, classes))}."
        )
    index = np.flatnonzero(np.isin(examples.labels, classes))
    members = examples.chosen(index)
    numbers = np.full(n_classes, -1)
    numbers[list(classes)] = np.arange(len(classes))
    return replace(members, labels=numbers[members.labels])


def balanced(labels: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Indices of a random subset with classes in equal parts, if there are enough; 0: all.

    Subsets of one seed are nested: each class is put in a random order, and the classes take turns.
    """
    n = len(labels)
    if not 0 <= size <= n:
        raise NtkMarglikError(
            f"--n-data must be between 1 and the {n} training examples (or 0 for all), but is "
            f"{size}."
        )
    order = np.random.default_rng(seed).permutation(n)
    turns = np.empty(n, np.int64)
    for c in np.unique(labels):
        members = order[labels[order] == c]
        turns[members] = np.arange(len(members))
    by_turn = order[np.argsort(turns[order], kind="stable")]
    return by_turn[: size or n]
