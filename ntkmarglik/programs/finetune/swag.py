"""The Gaussian that a pretraining leaves behind: collected along it, stored, and read again.

SWAG (Maddox et al. 2019): mean and variance of the weights along some more training, and the last K
deviations from their running mean. As a prior: Shwartz-Ziv et al. 2022.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.finetune.checkpoints import Place, write_sums
from ntkmarglik.programs.finetune.pretrained import Classifier

NAME = "swag.safetensors"  # in the folder of a checkpoint
FORMAT = {"format": "ntkmarglik-swag-1"}
KINDS = ("mean", "variance", "deviations")  # before the name of each weight in the file
RANK = 5  # deviations that are kept


@dataclass(frozen=True)
class Statistics:
    """Of the backbone's weights, by the names that the network's own library gives them.

    mean, variance: shaped as the weights. deviations: [*shape, K].
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    deviations: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by the names that they have in the file."""
        return {
            f"{kind}.{name}": tensor
            for kind in KINDS
            for name, tensor in getattr(self, kind).items()
        }

    def save(self, folder: Path) -> None:
        """Put them beside the network of a checkpoint."""
        from safetensors.torch import save_file

        stored = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        save_file(stored, folder / NAME, metadata=FORMAT)
        write_sums(folder)

    def to(self, device: torch.device) -> Statistics:
        """On a device."""
        kinds = (getattr(self, kind) for kind in KINDS)
        moved = [{name: tensor.to(device) for name, tensor in kind.items()} for kind in kinds]
        return Statistics(*moved)


class Collection:
    """Statistics of a backbone, of which `add` takes the present weights.

    Args:
        model: that is being trained.
        rank: K, how many deviations are kept: the last ones.
    """

    def __init__(self, model: Classifier, rank: int = RANK):
        self._weights = backbone(model)
        self._rank = rank
        self._count = 0
        self._mean = {name: torch.zeros_like(w).double() for name, w in self._weights.items()}
        self._squares = {name: torch.zeros_like(w).double() for name, w in self._weights.items()}
        self._deviations: dict[str, deque[Tensor]] = {
            name: deque(maxlen=rank) for name in self._weights
        }

    @torch.no_grad()
    def add(self) -> None:
        """Take the present weights; the deviation is from the mean with them included."""
        self._count += 1
        for name, w in self._weights.items():
            before = w.double() - self._mean[name]
            self._mean[name] += before / self._count
            after = w.double() - self._mean[name]
            self._squares[name] += before * after
            self._deviations[name].append(after.float())

    def statistics(self) -> Statistics:
        """Of the weights taken so far, in single precision."""
        if self._count <= self._rank:
            raise NtkMarglikError(
                f"{self._rank} deviations need the weights of more than {self._rank} times, but "
                f"there are {self._count}; train longer or take them more often."
            )
        variance = {name: (s / self._count).float() for name, s in self._squares.items()}
        mean = {name: m.float() for name, m in self._mean.items()}
        columns = {name: torch.stack(list(q), -1) for name, q in self._deviations.items()}
        return Statistics(mean, variance, columns)


def backbone(model: Classifier) -> dict[str, Tensor]:
    """The pretrained weights by the names that the network's own library gives them."""
    prefix = f"{model.backbone}."
    return {
        name.removeprefix("network."): parameter.detach()
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and parameter.requires_grad
    }


def read(place: Place, model: Classifier) -> Statistics:
    """The statistics of a checkpoint's backbone; an error says what is wrong with the file."""
    path = None if place.folder is None else place.folder / NAME
    if path is None or not path.is_file():
        raise NtkMarglikError(
            f"--prior ptyl needs statistics of the pretraining, but the checkpoint {place} has no "
            f"{NAME}. scripts/make_small_checkpoints.py writes one; for other networks collect "
            "them with ntkmarglik.programs.finetune.swag, or use --prior l2-sp."
        )
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise NtkMarglikError(f"{path} cannot be read ({error}); make it again.") from error
    if metadata != FORMAT:
        raise NtkMarglikError(f"{path} is not of the format {FORMAT['format']}; make it again.")
    return _checked(stored, backbone(model), path)


def _checked(stored: dict[str, Tensor], weights: dict[str, Tensor], path: Path) -> Statistics:
    """The statistics in a file, if they are of these weights."""
    expected = {f"{kind}.{name}" for kind in KINDS for name in weights}
    others = sorted(expected.symmetric_difference(stored))
    if others:
        raise NtkMarglikError(
            f"{path} is not of this network: {others[0]!r} is in one of them only. Make it from "
            "the same network."
        )
    statistics = Statistics(*({n: stored[f"{kind}.{n}"] for n in weights} for kind in KINDS))
    rank = max(q.shape[-1] if q.dim() else 0 for q in statistics.deviations.values())
    for name, w in weights.items():
        shapes = [tuple(stored[f"{kind}.{name}"].shape) for kind in KINDS]
        needed = [tuple(w.shape), tuple(w.shape), (*w.shape, rank)]
        if shapes != needed or rank < 2:
            raise NtkMarglikError(
                f"{path}: mean, variance and at least two deviations of {name} should be "
                f"{needed}, but are {shapes}. Make it from the same network."
            )
        if not all(stored[f"{kind}.{name}"].isfinite().all() for kind in KINDS):
            raise NtkMarglikError(f"{path}: the statistics of {name} are not finite.")
        if bool((statistics.variance[name] < 0).any()):
            raise NtkMarglikError(f"{path}: a variance of {name} is negative.")
    return statistics
