"""Examples as inputs of a network: made once if they fit in memory, else batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asdl_marglik import map_inputs, tensors_of
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.examples import Examples, balanced, is_text, read, restricted
from ntkmarglik.programs.finetune.pretrained import Inputs, Preparation, Prepare

KEPT_BYTES = 2**31  # of prepared inputs of a split; more are prepared whenever they are needed
CHUNK = 256
TEST_SEED = 0  # every run is tested on the same part


class Part:
    """Some examples, as inputs of a network and labels, on its device.

    Args:
        examples: as they are in their files.
        prepare: makes inputs of examples.
        device: where batches are put.
        inputs: all examples prepared; None to prepare them whenever they are needed.
    """

    def __init__(
        self, examples: Examples, prepare: Prepare, device: torch.device, inputs: Inputs | None
    ):
        self._examples = examples
        self._prepare = prepare
        self._device = device
        self._inputs = inputs
        self.y = torch.from_numpy(examples.labels).to(device)

    @classmethod
    def of(cls, examples: Examples, prepare: Prepare, device: torch.device) -> Part:
        """Examples prepared at once if they fit in memory."""
        inputs = None
        if _fit_in_memory(examples, prepare):
            inputs = _all_inputs(examples, prepare)
        return cls(examples, prepare, device, inputs)

    def __len__(self) -> int:
        return len(self.y)

    def fingerprint(self) -> str:
        """Differs for other examples."""
        return self._examples.fingerprint()

    def chosen(self, index: np.ndarray) -> Part:
        """Some of these examples."""
        inputs = None
        if self._inputs is not None:
            rows = torch.from_numpy(index)
            inputs = map_inputs(lambda t: t[rows], self._inputs)
        return Part(self._examples.chosen(index), self._prepare, self._device, inputs)

    def first(self, n: int) -> Part:
        """The first n of these examples, or all."""
        return self if n >= len(self) else self.chosen(np.arange(n))

    def batch(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and labels of the examples at `index`; texts without columns of mere padding."""
        if self._inputs is None:
            x = self._prepare(self._examples, index.numpy())
        else:
            x = map_inputs(lambda t: t[index], self._inputs)
        if isinstance(x, dict):
            used = x["attention_mask"].any(0)
            x = {name: t[:, used] for name, t in x.items()}
        x = map_inputs(lambda t: t.to(self._device), x)
        return x, self.y[index.to(self._device)]

    def batches(self, size: int = CHUNK) -> Iterator[tuple[Inputs, Tensor]]:
        """All examples in their order."""
        for index in torch.arange(len(self)).split(size):
            yield self.batch(index)


def _fit_in_memory(examples: Examples, prepare: Prepare) -> bool:
    first = prepare(examples, np.arange(1))
    if isinstance(first, dict):
        # texts are padded to the longest, which the first does not tell; their tokens are small
        return True
    bytes_of_one = first.numel() * first.element_size()
    return bytes_of_one * len(examples) <= KEPT_BYTES


def _all_inputs(examples: Examples, prepare: Prepare) -> Inputs:
    index = np.arange(len(examples))
    if isinstance(examples.inputs, list) and isinstance(examples.inputs[0], str):
        return prepare(examples, index)
    tensors: list[Tensor] = []
    for start in range(0, len(index), CHUNK):
        tensors.extend(tensors_of(prepare(examples, index[start : start + CHUNK])))
    return torch.cat(tensors)


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples of a task."""

    train: Part
    test: Part
    n_classes: int

    def halves(self, share: float, seed: int) -> tuple[Part, Part]:
        """The training data without a held-out share, and that share, classes in equal parts."""
        size = round(share * len(self.train))
        if not 0 < size < len(self.train):
            raise NtkMarglikError(
                f"--held-out {share} of {len(self.train)} training data leaves one part empty; "
                "use a larger --n-data."
            )
        index = balanced(self.train.y.cpu().numpy(), size, seed)
        rest = np.setdiff1d(np.arange(len(self.train)), index)
        return self.train.chosen(rest), self.train.chosen(index)


def load(config: FinetuneConfig, prepare: Preparation, device: torch.device) -> Data:
    """The task's data: classes, training set and part of the test set as configured."""
    task = config.task
    train, test, n_classes = read(task.dataset, task.data_root)
    train = restricted(train, task.classes, n_classes)
    test = restricted(test, task.classes, n_classes)
    train = train.chosen(balanced(train.labels, task.n_data, config.run.seed))
    n_classes = len(task.classes) or n_classes
    if len(train) < n_classes:
        raise NtkMarglikError(
            f"--n-data {task.n_data} is less than one for each of the {n_classes} classes."
        )
    if task.n_test > len(test):
        raise NtkMarglikError(
            f"--n-test {task.n_test}, but there are {len(test)} test examples; use at most these."
        )
    if task.n_test:
        order = np.random.default_rng(TEST_SEED).permutation(len(test))
        test = test.chosen(order[: task.n_test])
    if task.augment != "none" and is_text(task.dataset):
        raise NtkMarglikError(
            f"--augment {task.augment} is for images, but {task.dataset} is of texts."
        )
    return Data(Part.of(train, prepare, device), Part.of(test, prepare, device), n_classes)


def changed(x: Inputs, kind: str, generator: torch.Generator) -> Inputs:
    """Training images mirrored at random ("flip"), and shifted by up to an eighth, too ("crop")."""
    if kind == "none" or not isinstance(x, Tensor):
        return x
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirrored.to(x.device)[:, None, None, None], x.flip(3), x)
    if kind == "flip":
        return x
    n, _, height, width = x.shape
    down = height // 8
    right = width // 8
    padded = F.pad(x, (right, right, down, down), mode="replicate")
    tops = torch.randint(2 * down + 1, (n,), generator=generator).tolist()
    lefts = torch.randint(2 * right + 1, (n,), generator=generator).tolist()
    shifted = []
    for image, top, left in zip(padded, tops, lefts, strict=True):  # few in a batch
        shifted.append(image[:, top : top + height, left : left + width])
    return torch.stack(shifted)
