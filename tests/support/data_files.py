"""Data sets in their real formats, tiny and random."""

import gzip
import io
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ntkmarglik.problem.data.sources import SOURCES

SIZES = {"train": 30, "test": 20}


def random_split(name, split):
    c, h, w = SOURCES[name].shape
    rng = np.random.default_rng(len(split))
    shape = (SIZES[split], h, w) if c == 1 else (SIZES[split], h, w, c)
    return rng.integers(0, 256, shape, np.uint8), rng.integers(
        0, SOURCES[name].n_classes, SIZES[split], np.uint8
    )


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_parquet(path, images, labels, image="img", label="label"):
    def png(pixels):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    pq.write_table(
        pa.table({image: [png(x) for x in images], label: [int(y) for y in labels]}), path
    )


def write_set(root, name, layout=None):
    source = SOURCES[name]
    folder = root / source.folder
    folder.mkdir(exist_ok=True)
    for split, size in SIZES.items():
        images, labels = random_split(name, split)
        assert len(images) == size
        if source.idx and layout != "parquet":
            for file, array in zip(source.idx_files(split), (images, labels), strict=True):
                write_idx(folder / file, array)
        else:
            path = folder / f"{source.splits[split]}.parquet"
            write_parquet(path, images, labels, "image" if source.idx else "img", source.label)
    return folder
