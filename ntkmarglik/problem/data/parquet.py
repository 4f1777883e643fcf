"""Image data sets as Hugging Face Parquet: per row the PNG or JPEG bytes and a label."""

import functools
import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data.cache import cached

IMAGE_COLUMNS = ("image", "img")


def find_parquet(folder: Path, split: str) -> list[Path]:
    """The Parquet files of a split in order.

    Either `split.parquet` or the shards `split-00000-of-0000n...parquet`.

    Folders inside `folder` are searched too, since that is what `hf download` leaves behind.
    """
    if (folder / f"{split}.parquet").is_file():
        return [folder / f"{split}.parquet"]
    shards: dict[int, Path] = {}
    n_shards = 0
    for path in sorted(folder.rglob(f"{split}-*.parquet")):
        match = re.match(rf"{re.escape(split)}-(\d+)-of-(\d+)", path.name)
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if match and not hidden:
            shards[int(match[1])] = path
            n_shards = int(match[2])
    missing = sorted(set(range(n_shards)) - shards.keys())
    if missing:
        raise NtkMarglikError(
            f"{folder} has {len(shards)} of the {n_shards} Parquet files of split {split!r}: "
            f"number {missing[0]} is missing. Fetch the missing files, or delete all of them to "
            "download the set again."
        )
    return [shards[i] for i in range(n_shards)]


def labels_in(column: Any, path: Path) -> np.ndarray:
    """Labels [n] int64 of a column of a Parquet file, which must hold whole numbers only."""
    import pyarrow as pa

    if not pa.types.is_integer(column.type) or column.null_count:
        empty = f", {column.null_count} of them empty" if column.null_count else ""
        raise NtkMarglikError(
            f"{path}: labels should be whole numbers, but are {column.type}{empty}. Number the "
            "classes from 0 on, or fetch the file of the Hugging Face hub."
        )
    return column.to_numpy().astype(np.int64)


def read_parquet(
    path: Path, label: str, shape: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, h, w, c] uint8 and labels [n] int64 of one file; shape: the expected (c, h, w)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            image = next((name for name in IMAGE_COLUMNS if name in columns), None)
            if image is None or label not in columns:
                raise NtkMarglikError(
                    f"{path} should have an image column ({' or '.join(IMAGE_COLUMNS)}) and a "
                    f"label column {label!r}, but has {columns}. Replace it by the file of the "
                    "Hugging Face hub."
                )
            labels = labels_in(file.read(columns=[label])[label], path)
            c, h, w = shape
            decode = functools.partial(_decode, file, path, image, shape)
            return cached(path, (len(labels), h, w, c), decode), labels
    except (pa.ArrowException, OSError) as error:
        raise NtkMarglikError(
            f"{path} is not a readable Parquet file ({error}); it may be cut short. Delete it and "
            "fetch it again."
        ) from error


def _decode(file, path: Path, column: str, shape: tuple[int, int, int]) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Images [n, h, w, c] uint8 of an open `pyarrow.parquet.ParquetFile`."""
    from PIL import Image

    c, h, w = shape
    # Some TinyImageNet pictures are gray, some copies of MNIST are RGB.
    mode = "L" if c == 1 else "RGB"
    images = np.empty((file.metadata.num_rows, h, w, c), np.uint8)
    row = 0
    for batch in file.iter_batches(batch_size=1000, columns=[column]):
        for cell in batch.column(0).to_pylist():
            try:
                with Image.open(io.BytesIO(cell["bytes"])) as picture:
                    pixels = np.asarray(picture.convert(mode))
            except (OSError, SyntaxError, TypeError, ValueError) as error:
                raise NtkMarglikError(
                    f"{path}: the picture in row {row} can't be decoded ({error}). Delete the "
                    "file and fetch it again."
                ) from error
            if pixels.shape[:2] != (h, w):
                raise NtkMarglikError(
                    f"{path}: the picture in row {row} should be {h}x{w} pixels, but is "
                    f"{pixels.shape[0]}x{pixels.shape[1]}. This looks like the file of another "
                    "data set."
                )
            images[row] = pixels.reshape(h, w, c)
            row += 1
    return images
