"""Where each data set comes from: its folder, its files, its repository on the Hugging Face hub."""

from dataclasses import dataclass, field
from pathlib import Path

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Source:
    """One data set on disk and on the hub.

    `splits` maps train/test to the Parquet name of the split; `idx` maps it to the prefix of the
    IDX files, and is empty for sets that exist as Parquet only. `md5` holds the published checksums
    of the IDX files.
    """

    folder: str
    repository: str
    shape: tuple[int, int, int]
    n_classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    label: str = "label"
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    idx: dict[str, str] = field(default_factory=dict)
    md5: dict[str, str] = field(default_factory=dict)

    def idx_files(self, split: str) -> list[str]:
        """Names of the image and label files of a split in the IDX layout; empty without one."""
        if split not in self.idx:
            return []
        return [
            f"{self.idx[split]}-images-idx3-ubyte.gz",
            f"{self.idx[split]}-labels-idx1-ubyte.gz",
        ]

    def how_to_get(self, folder: Path) -> str:
        """What to put into `folder`, and the command that does it."""
        parquet = " and ".join(f"{name}.parquet" for name in self.splits.values())
        layouts = f"{parquet} (Hugging Face layout)"
        if self.idx:
            layouts = (
                ", ".join(f for split in self.splits for f in self.idx_files(split))
                + f"; or {layouts}"
            )
        return (
            f"Put these files into {folder}: {layouts}. On a machine with a network this command "
            f"fetches them: hf download {self.repository} --repo-type dataset "
            f'--include "*.parquet" --local-dir {folder}'
        )


_T10K = {"train": "train", "test": "t10k"}

SOURCES: dict[str, Source] = {
    "mnist": Source(
        folder="mnist",
        repository="ylecun/mnist",
        shape=(1, 28, 28),
        n_classes=10,
        idx=_T10K,
        md5={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fmnist": Source(
        folder="fashion-mnist",
        repository="zalando-datasets/fashion_mnist",
        shape=(1, 28, 28),
        n_classes=10,
        idx=_T10K,
        md5={
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "usps": Source(
        folder="usps",
        repository="flwrlabs/usps",
        shape=(1, 16, 16),
        n_classes=10,
        idx={"train": "train", "test": "test"},
    ),
    "cifar10": Source(
        folder="cifar10",
        repository="uoft-cs/cifar10",
        shape=(3, 32, 32),
        n_classes=10,
        mean=CIFAR_MEAN,
        std=CIFAR_STD,
    ),
    "cifar100": Source(
        folder="cifar100",
        repository="uoft-cs/cifar100",
        shape=(3, 32, 32),
        n_classes=100,
        mean=CIFAR_MEAN,
        std=CIFAR_STD,
        label="fine_label",
    ),
    "tinyimagenet": Source(
        folder="tiny-imagenet",
        repository="zh-plus/tiny-imagenet",
        shape=(3, 64, 64),
        n_classes=200,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        splits={"train": "train", "test": "valid"},
    ),
}
