"""Examples as inputs of a network: made once if they fit in memory, else batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """Some examples, as inputs of a network and labels, on its device."""

    def __init__(self, examples: Examples, prepare: Prepare, device: torch.device):
        self._examples = examples
        self._prepare = prepare
        self._device = device
        self.y = torch.from_numpy(examples.labels).to(device)
        self._inputs: Inputs | None = self._all() if self._fit_in_memory() else None

    def __len__(self) -> int:
        return len(self.y)

    def chosen(self, index: np.ndarray) -> Part:
        """Some of these examples."""
        part = object.__new__(Part)
        part._examples = self._examples.chosen(index)
        part._prepare = self._prepare
        part._device = self._device
        own = torch.from_numpy(index)
        part.y = self.y[own.to(self._device)]
        part._inputs = None if self._inputs is None else map_inputs(lambda t: t[own], self._inputs)
        return part

    def batch(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and labels of the examples at `index`; texts without columns that are padding in
        all of them.
        """
        x = self._prepare(self._examples, index.numpy()) if self._inputs is None else None
        if self._inputs is not None:
            x = map_inputs(lambda t: t[index], self._inputs)
        if isinstance(x, dict):
            used = x["attention_mask"].any(0)
            x = {name: t[:, used] for name, t in x.items()}
        return map_inputs(lambda t: t.to(self._device), x), self.y[index.to(self._device)]

    def batches(self, size: int = CHUNK) -> Iterator[tuple[Inputs, Tensor]]:
        """All examples in their order."""
        for index in torch.arange(len(self)).split(size):
            yield self.batch(index)

    def _fit_in_memory(self) -> bool:
        first = self._prepare(self._examples, np.arange(1))
        # texts are padded to the longest, which the first does not tell; their tokens are small
        return (
            isinstance(first, dict)
            or first.numel() * first.element_size() * len(self) <= KEPT_BYTES
        )

    def _all(self) -> Inputs:
        if isinstance(self._examples.inputs, list) and isinstance(self._examples.inputs[0], str):
            return self._prepare(self._examples, np.arange(len(self)))
        parts = [
            self._prepare(self._examples, i.numpy()) for i in torch.arange(len(self)).split(CHUNK)
        ]
        return torch.cat([tensor for part in parts for tensor in tensors_of(part)])


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples of a task."""

    train: Part
    test: Part
    n_classes: int

    def halves(self, share: float, seed: int) -> tuple[Part, Part]:
        """The training data without and with a held-out share that has the classes in equal
        parts.
        """
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
    task, seed = config.task, config.run.seed
    train, test, n_classes = read(task.dataset, task.data_root)
    train, test = (restricted(part, task.classes, n_classes) for part in (train, test))
    train = train.chosen(balanced(train.labels, task.n_data, seed))
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
        test = test.chosen(np.random.default_rng(TEST_SEED).permutation(len(test))[: task.n_test])
    if task.augment != "none" and is_text(task.dataset):
        raise NtkMarglikError(
            f"--augment {task.augment} is for images, but {task.dataset} is of texts."
        )
    return Data(Part(train, prepare, device), Part(test, prepare, device), n_classes)


def changed(x: Inputs, kind: str, generator: torch.Generator) -> Inputs:
    """Training images mirrored at random ("flip"), and shifted by up to an eighth, too ("crop")."""
    if kind == "none" or not isinstance(x, Tensor):
        return x
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirrored.to(x.device)[:, None, None, None], x.flip(3), x)
    if kind == "flip":
        return x
    n, _, h, w = x.shape
    padded = F.pad(x, (w // 8, w // 8, h // 8, h // 8), mode="replicate")
    tops = torch.randint(2 * (h // 8) + 1, (n,), generator=generator).tolist()
    lefts = torch.randint(2 * (w // 8) + 1, (n,), generator=generator).tolist()
    # an image at a time: there are few in a batch
    return torch.stack(
        [p[:, t : t + h, s : s + w] for p, t, s in zip(padded, tops, lefts, strict=True)]
    )


Batches = Callable[[], Iterator[tuple[Inputs, Tensor]]]
