"""Data sets by name: read the files, take a subset, transform, normalise, move to the device."""

import difflib
from dataclasses import dataclass
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
    """The data set `name` of DATASETS as tensors on the device, from `root` or downloaded to it.

    Args:
        name: of the data set; `digits_r180` and the like are its transformed variants.
        root: folder of the files. Digits come with scikit-learn and need none.
        n_data: size of the random training subset; 0 for all. Subsets of one seed are nested, and
            hold the same images in every variant of a set.
        seed: of the subset.
        device: of the tensors.
        dtype: of the images.
    """
    check_dataset(name)
    base, _, variant = name.partition("_")
    pictures = _read(base, Path(root))
    available = len(pictures.train[1])
    if not 0 <= n_data <= available:
        raise NtkMarglikError(
            f"n_data must be between 1 and the {available} training points of {name} (or 0 for "
            f"all of them), but is {n_data}. Choose at most {available}."
        )
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed)).numpy()
    index = order[:n_data] if n_data else np.arange(available)
    everything = np.arange(len(pictures.test[1]))
    train_theta = _transformations(variant, pictures.train, TRAIN_SEED)
    test_theta = _transformations(variant, pictures.test, TEST_SEED)
    like = torch.empty(0, device=device, dtype=dtype)
    x_train, y_train = pictures.tensors(pictures.train, index, train_theta, like)
    x_test, y_test = pictures.tensors(pictures.test, everything, test_theta, like)
    return Dataset(name, x_train, y_train, x_test, y_test, pictures.n_classes)


def check_dataset(name: str) -> None:
    """Refuse a name that is none of DATASETS."""
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise NtkMarglikError(
            f"Unknown data set {name!r}. {hint}Known are {', '.join(BASES)}, each also with one "
            f"of the suffixes {', '.join('_' + variant for variant in VARIANTS)}."
        )


@dataclass(frozen=True, eq=False)
class _Pictures:
    """Both splits of a data set as they are in its files, and how they become tensors.

    scale: the value of white. mean, std: of each colour after scaling; empty to leave them.
    """

    train: Split
    test: Split
    n_classes: int
    scale: float
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def tensors(
        self, split: Split, index: np.ndarray, theta: Tensor | None, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Inputs [n, c, h, w] and labels [n] of the images at `index`, on the device of `like`.

        They are transformed by their matrices theta and have the number format of `like`.
        """
        images, labels = split
        _, h, w, c = images.shape
        x = like.new_empty(len(index), c, h, w)
        for start in range(0, len(index), BATCH):
            batch = index[start : start + BATCH]
            pixels = torch.from_numpy(images[batch]).to(like.device).permute(0, 3, 1, 2)
            pixels = pixels.to(like.dtype) / self.scale
            if theta is not None:
                pixels = warp(pixels, theta[batch])
            # Pictures are transformed as pictures: what comes in from outside is black, not the
            # mean colour.
            x[start : start + BATCH] = self._normalised(pixels)
        return x, torch.from_numpy(labels[index]).to(like.device)

    def _normalised(self, pixels: Tensor) -> Tensor:
        if not self.mean:
            return pixels
        mean = pixels.new_tensor(self.mean).view(-1, 1, 1)
        std = pixels.new_tensor(self.std).view(-1, 1, 1)
        return (pixels - mean) / std


def _read(base: str, root: Path) -> _Pictures:
    """The files of a data set without its variants."""
    if base == "digits":
        train, test = read_digits()
        return _Pictures(train, test, n_classes=10, scale=float(PIXEL_MAX))
    source = SOURCES[base]
    folder = root / source.folder
    train = read_split(source, "train", folder)
    test = read_split(source, "test", folder)
    return _Pictures(train, test, source.n_classes, 255.0, source.mean, source.std)


def _transformations(variant: str, split: Split, seed: int) -> Tensor | None:
    """The matrices that make a variant of a split; None for the data set as it is."""
    if not variant:
        return None
    images, labels = split
    return draw_transformations(variant, len(labels), images.shape[1], seed)
