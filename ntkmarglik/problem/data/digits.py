"""Scikit-learn's bundled digits: 1,797 real images of 8x8 pixels, which need no download."""

import importlib.util
from pathlib import Path

import numpy as np

from ntkmarglik.problem.data.split import Split

N_TEST = 360
PIXEL_MAX = 16
# where scikit-learn keeps them: to import it takes as long as to import torch
FILE = "datasets/data/digits.csv.gz"
# the images in order, those of the test set last: `train_test_split` of scikit-learn with
# `test_size=N_TEST, stratify=labels, random_state=0`
ORDER = Path(__file__).with_name("digits_split.npy")


def read_digits() -> tuple[Split, Split]:
    """Training (1,437) and test (360) images [n, 8, 8, 1] uint8 of 0 ... 16, labels [n] int64.

    The split is fixed and stratified by class, so that every run is tested on the same images.
    """
    table = _table()
    images = table[:, :-1].reshape(-1, 8, 8, 1).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    order = np.load(ORDER)
    train, test = order[:-N_TEST], order[-N_TEST:]
    return (images[train], labels[train]), (images[test], labels[test])


def _table() -> np.ndarray:
    """Pixels [n, 64] and, in the last column, labels."""
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or ():
        if (Path(folder) / FILE).is_file():
            return np.loadtxt(Path(folder) / FILE, delimiter=",")
    from sklearn.datasets import load_digits  # says what is missing, or where they are now

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])
