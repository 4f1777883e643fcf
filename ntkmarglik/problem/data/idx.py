"""Gzipped IDX files, the format of MNIST."""

import gzip
import hashlib
import math
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np

from ntkmarglik.errors import NtkMarglikError

UBYTE = 0x08


def read_idx(path: Path, md5: str | None = None) -> np.ndarray:
    """Array of uint8 stored in a gzipped IDX file, with the shape its header states.

    A file that can be read but is not the published one (`md5`) gives a warning: results then do
    not compare.
    """
    packed = path.read_bytes()
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt(path, f"it does not decompress ({error})") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, UBYTE]):
        raise _corrupt(
            path,
            f"it does not start with the IDX header 00 00 08, but with {content[:4].hex(' ')!r}",
        )
    n_axes = content[3]
    start = 4 + 4 * n_axes
    if len(content) < start:
        raise _corrupt(path, "its header is cut short")
    shape = struct.unpack(f">{n_axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise _corrupt(
            path, f"its header promises {shape} bytes, but {len(content) - start} follow"
        )
    digest = hashlib.md5(packed).hexdigest()
    if md5 is not None and digest != md5:
        warnings.warn(
            f"{path} is readable but is not the published file (md5 {digest}, expected {md5})",
            stacklevel=2,
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _corrupt(path: Path, why: str) -> NtkMarglikError:
    return NtkMarglikError(
        f"{path} is not a gzipped IDX file of bytes: {why}. Delete it and fetch it again."
    )
