"""Image data sets as tensors on the device: `load("mnist_r180", "data", n_data=1000, seed=1)`."""

from ntkmarglik.problem.data.dataset import Dataset
from ntkmarglik.problem.data.registry import DATASETS, check_dataset, load

__all__ = ["DATASETS", "Dataset", "check_dataset", "load"]
