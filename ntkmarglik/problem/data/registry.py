"""Data sets by name: read the files, take a subset, transform, normalise, and put the result on the
device.
"""

import difflib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data.dataset import Dataset
from ntkmarglik.problem.data.digits import PIXEL_MAX, read_digits
from ntkmarglik.problem.data.sources import SOURCES
from ntkmarglik.problem.data.split import Split, read_split
from ntkmarglik.problem.data.transforms import VARIANTS, draw_transformations, warp

BASES = ("digits", *SOURCES)
DATASETS = tuple(
    name for base in BASES for name in (base, *(f"{base}_{variant}" for variant in VARIANTS))
)
TEST_SEED, TRAIN_SEED = 0, 1
BATCH = 2000


def load(
    name: str,
    root: str | Path,
    *,
    n_data: int = 0,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """The data set `name` (one of DATASETS) as tensors on the device, read from `root` or
    downloaded to it.

    n_data: size of the random training subset drawn with `seed`; 0 takes all. Subsets of one seed
    are nested, and hold the same images in every variant of a set. Digits come with scikit-learn
    and need no `root`.
    """
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise NtkMarglikError(
            f"Unknown data set {name!r}. {hint}Known are {', '.join(BASES)}, each also with one "
            f"of the suffixes {', '.join('_' + variant for variant in VARIANTS)}."
        )
    base, _, variant = name.partition("_")
    mean: tuple[float, ...]
    std: tuple[float, ...]
    if base == "digits":
        train, test = read_digits()
        scale = float(PIXEL_MAX)
        mean = ()
        std = ()
        n_classes = 10
    else:
        source = SOURCES[base]
        train, test = (
            read_split(source, split, Path(root) / source.folder) for split in ("train", "test")
        )
        scale = 255.0
        mean = source.mean
        std = source.std
        n_classes = source.n_classes
    available = len(train[1])
    if not 0 <= n_data <= available:
        raise NtkMarglikError(
            f"n_data must be between 1 and the {available} training points of {name} (or 0 for "
            f"all of them), but is {n_data}. Choose at most {available}."
        )
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed)).numpy()
    index = order[:n_data] if n_data else np.arange(available)

    def tensors(part: Split, chosen: np.ndarray, split_seed: int) -> tuple[Tensor, Tensor]:
        images, labels = part
        theta = (
            draw_transformations(variant, len(labels), images.shape[1], split_seed)
            if variant
            else None
        )
        x = torch.empty(
            (len(chosen), images.shape[3], *images.shape[1:3]), device=device, dtype=dtype
        )
        for start in range(0, len(chosen), BATCH):
            batch = chosen[start : start + BATCH]
            pixels = (
                torch.from_numpy(images[batch]).to(device).permute(0, 3, 1, 2).to(dtype) / scale
            )
            if theta is not None:
                pixels = warp(pixels, theta[batch])
            if mean:
                # Pictures are transformed as pictures: what comes in from outside is black, not the
                # mean colour.
                pixels = (pixels - pixels.new_tensor(mean).view(-1, 1, 1)) / pixels.new_tensor(
                    std
                ).view(-1, 1, 1)
            x[start : start + BATCH] = pixels
        return x, torch.from_numpy(labels[chosen]).to(device)

    x_train, y_train = tensors(train, index, TRAIN_SEED)
    x_test, y_test = tensors(test, np.arange(len(test[1])), TEST_SEED)
    return Dataset(name, x_train, y_train, x_test, y_test, n_classes)
