"""Decoded pictures kept beside their source: decoding takes far longer than reading an array."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np


def cached(source: Path, shape: tuple[int, ...], decode: Callable[[], np.ndarray]) -> np.ndarray:
    """The uint8 array of `shape` that `decode` returns, from the cache of `source` if sound."""
    cache = cache_path(source)
    try:
        array = np.load(cache, mmap_mode="r")
        if array.shape == shape and array.dtype == np.uint8:
            return array
    except (OSError, ValueError, EOFError):
        pass  # absent or damaged: decode again and overwrite
    array = decode()
    # A data folder that is full or read-only must not stop a run: the cache only saves time.
    with contextlib.suppress(OSError):
        _write(cache, array, source)
    return array


def cache_path(source: Path) -> Path:
    """Name of the cache, with a fingerprint of the source: a replaced one is decoded again."""
    stat = source.stat()
    fingerprint = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:8]
    return source.with_name(f"{source.stem}.decoded-{fingerprint}.npy")


def _write(cache: Path, array: np.ndarray, source: Path) -> None:
    temporary = cache.with_name(f".{cache.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.save(file, array)
        os.replace(temporary, cache)
    finally:
        temporary.unlink(missing_ok=True)
    for old in cache.parent.glob(f"{source.stem}.decoded-*.npy"):
        if old != cache:
            old.unlink(missing_ok=True)
