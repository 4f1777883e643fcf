"""Training as people do it today: torch's optimisers with a fixed weight decay, nothing of ours.

Fits of one problem are kept in a file of lines, so that an interrupted search continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace_marglik.schedule import cosine, set_rate
from ntkmarglik.learn.config import Config
from ntkmarglik.learn.evaluate import evaluate
from ntkmarglik.learn.schedule import weight_optimizer
from ntkmarglik.problem.augment import RANGES, AffineAugmentation
from ntkmarglik.problem.data import Dataset
from ntkmarglik.problem.models import build

FOLDS = 5  # of cross-validation; the first is the split of everything that has one


@dataclass(frozen=True)
class Candidate:
    """What a search chooses: the weight decay and, where images are turned, the range of it.

    Args:
        decay: of all weights, or one for each parameter tensor; a multiple of the weight is added
            to the gradient.
        decoupled: AdamW's decay instead: the weight itself shrinks.
        rotation: images are turned by up to so many radians; None for images as they are.
    """

    decay: float | tuple[float, ...] = 0.0
    decoupled: bool = False
    rotation: float | None = None

    def __str__(self) -> str:
        decays = self.decay if isinstance(self.decay, tuple) else (self.decay,)
        text = "decay " + " ".join(f"{decay:.3g}" for decay in decays)
        return text if self.rotation is None else f"{text}, rotation {self.rotation:.3g}"


def optimizer_of(model: nn.Module, config: Config, candidate: Candidate) -> torch.optim.Optimizer:
    """The optimiser of the runner, with a weight decay."""
    training = config.training
    parameters = list(model.parameters())
    if isinstance(candidate.decay, tuple):
        groups = [
            {"params": [p], "weight_decay": decay}
            for p, decay in zip(parameters, candidate.decay, strict=True)
        ]
        return torch.optim.Adam(groups, training.lr)
    if candidate.decoupled:
        return torch.optim.AdamW(parameters, training.lr, weight_decay=candidate.decay)
    optimizer = weight_optimizer(model, training)
    for group in optimizer.param_groups:
        group["weight_decay"] = candidate.decay
    return optimizer


def outputs_of(
    model: nn.Module, config: Config, candidate: Candidate
) -> Callable[[Tensor], Tensor]:
    """The network, averaged over turned copies of each image if there are any."""
    if candidate.rotation is None:
        return model
    ranges = [candidate.rotation if name == "rotation" else 0.0 for name in RANGES]
    augment = AffineAugmentation(config.hyperparameters.aug_samples, init=ranges, learn=())

    def averaged(x: Tensor) -> Tensor:
        copies = augment(x)
        return model(copies.flatten(0, 1)).unflatten(0, copies.shape[:2]).mean(1)

    return averaged


def fit(config: Config, data: Dataset, candidate: Candidate) -> dict[str, float]:
    """Train from the seed's weights on the training split; scores on the test split, and time."""
    start = time.process_time()
    settings, training, seed = config.problem, config.training, config.run.seed
    sizes = {"depth": settings.depth, "width": settings.width}
    model = build(settings.model, data.input_shape, data.n_classes, seed=seed, **sizes)
    torch.manual_seed(seed)
    optimizer = optimizer_of(model, config, candidate)
    outputs = outputs_of(model, config, candidate)
    steps = training.epochs * -(-data.n_data // training.batch_size)
    step = 0
    for _ in range(training.epochs):
        for index in torch.randperm(data.n_data).split(training.batch_size):
            set_rate(optimizer, cosine(step, steps, training.lr, training.lr_min))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(outputs(data.x_train[index]), data.y_train[index])
            loss.backward()
            optimizer.step()
            step += 1
    model.eval()
    seconds = time.process_time() - start
    batch = 1000 if candidate.rotation is None else 100
    scores = evaluate(outputs, data.x_test, data.y_test, batch)
    return {**scores, "cpu_seconds": seconds}


def fold_of(data: Dataset, number: int, seed: int) -> Dataset:
    """A fifth of the training split as the test split, the rest to train on."""
    order = torch.randperm(data.n_data, generator=torch.Generator().manual_seed(seed))
    parts = list(order.tensor_split(FOLDS))
    held_out = parts.pop(number)
    rest = torch.cat(parts)
    return replace(
        data,
        x_train=data.x_train[rest],
        y_train=data.y_train[rest],
        x_test=data.x_train[held_out],
        y_test=data.y_train[held_out],
    )


class Fits:
    """Fits of one problem; those of an earlier call are not made again, but their time counts.

    Args:
        config: network, training and seed.
        data: all of it.
        path: file of lines, one for each fit.
    """

    def __init__(self, config: Config, data: Dataset, path: Path):
        self.config = config
        self.data = data
        self.path = path
        self.made: list[dict[str, float]] = []  # those that the present search asked for
        self._known = {}
        if path.exists():
            for line in path.read_text().splitlines():
                known = json.loads(line)
                self._known[known["key"]] = known["scores"]

    def begin(self) -> None:
        """Count from here: another search begins."""
        self.made = []

    def on_fold(self, candidate: Candidate, number: int = 0) -> float:
        """The log-likelihood of a held-out fifth."""
        return self._scores(candidate, number)["log_likelihood"]

    def on_all(self, candidate: Candidate) -> dict[str, float]:
        """Scores of the test data after training on all data."""
        return self._scores(candidate, None)

    @property
    def cpu_seconds(self) -> float:
        return sum(scores["cpu_seconds"] for scores in self.made)

    def _scores(self, candidate: Candidate, number: int | None) -> dict[str, float]:
        key = json.dumps([asdict(candidate), number, self.config.flat()], default=str)
        if key not in self._known:
            data = self.data
            if number is not None:
                data = fold_of(data, number, self.config.run.seed)
            scores = fit(self.config, data, candidate)
            self._known[key] = scores
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "scores": scores}) + "\n")
        self.made.append(self._known[key])
        return self._known[key]
