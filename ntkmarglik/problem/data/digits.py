"""Scikit-learn's bundled digits: 1,797 real images of 8x8 pixels, which need no download."""

import numpy as np

from ntkmarglik.problem.data.split import Split

N_TEST = 360
PIXEL_MAX = 16
SPLIT_SEED = 0


def read_digits() -> tuple[Split, Split]:
    """Training (1,437) and test (360) images [n, 8, 8, 1] uint8 of 0 ... 16, labels [n] int64.

    The split is fixed and stratified by class, so that every run is tested on the same images.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    images = x.reshape(-1, 8, 8, 1).astype(np.uint8)
    labels = y.astype(np.int64)
    train, test = train_test_split(
        np.arange(len(y)), test_size=N_TEST, stratify=y, random_state=SPLIT_SEED
    )
    return (images[train], labels[train]), (images[test], labels[test])
