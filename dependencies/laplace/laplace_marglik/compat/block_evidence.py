"""The evidence from a block of random data points, in place of that of all data.

The block is drawn while a fit reads its loader, once, and stays until the next fit. Its evidence is
that of `MarginalLikelihood`: an unbiased estimate of a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asdl_marglik import constant_besides, map_inputs, taken, tensors_of
from laplace_marglik import checks
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.marginal_likelihood import MarginalLikelihood
from laplace_marglik.likelihood import Gaussian, Likelihood
from laplace_marglik.prior import GaussianPrior


@dataclass(frozen=True)
class BlockChoice:
    """Which block an evidence is of.

    Args:
        subset: data points of the block; None for all.
        outputs: root columns of the block; None for all.
        root: of the likelihood's curvature, as in `MarginalLikelihood`.
    """

    subset: int | None = None
    outputs: int | None = None
    root: Any = None

    def __post_init__(self) -> None:
        for name, number in (("subset", self.subset), ("outputs", self.outputs)):
            if number is not None:
                checks.positive_integer(name, number)

    def __bool__(self) -> bool:
        return not (self.subset is None and self.outputs is None and self.root is None)


class Drawing:
    """A loader that holds some of its data points, drawn at random while it is read.

    Args:
        loader: gives pairs (x, y).
        subset: data points that are held; None for all.
        seed: of the draw.
    """

    def __init__(self, loader: Iterable[tuple[Any, Tensor]], subset: int | None, seed: int):
        self.loader, self.subset, self.seed = loader, subset, seed
        self.n_data = 0
        self._held: list[tuple[float, Any, Tensor]] = []  # keys, inputs [1, ...], targets [1, ...]

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """The same pairs; those with the smallest random keys are held."""
        self.n_data, self._held = 0, []
        generator = torch.Generator().manual_seed(self.seed)
        for x, y in self.loader:
            keys = torch.rand(len(y), generator=generator, dtype=torch.float64)
            self._hold(keys, x, y)
            self.n_data += len(y)
            yield x, y

    def _hold(self, keys: Tensor, x: Any, y: Tensor) -> None:
        full = self.subset is not None and len(self._held) == self.subset
        chosen = (keys < self._held[-1][0]).nonzero()[:, 0] if full else torch.arange(len(keys))
        for i in chosen.tolist():
            own = taken(x, torch.tensor([i], device=tensors_of(x)[0].device))
            self._held.append((float(keys[i]), own, y[i : i + 1].clone()))
        if self.subset is not None:
            self._held = sorted(self._held, key=lambda entry: entry[0])[: self.subset]

    def block(self) -> tuple[Any, Tensor]:
        """Inputs [S, ...] and targets [S, ...] of the data points that are held."""
        if self.subset is not None and self.subset > self.n_data:
            raise MarglikError(
                f"subset={self.subset} is more than the {self.n_data} data points of the loader"
            )
        inputs = [x for _, x, _ in self._held]
        return _joined(inputs), torch.cat([y for *_, y in self._held])


def _joined(inputs: list[Any]) -> Any:
    """Inputs of single data points as one batch."""
    if not isinstance(inputs[0], Mapping):
        return torch.cat(inputs)
    return {
        name: torch.cat([x[name] for x in inputs])
        for name, value in inputs[0].items()
        if isinstance(value, Tensor)
    }


class BlockEvidence:
    """The evidence of a block at the weights of a fit, for any prior precision and noise.

    Args:
        model: the network.
        weights: its random weights by name.
        likelihood: of the data; its noise and temperature are set anew for every value.
        drawing: the loader after it was read.
        choice: of the block.
        options: further arguments of `MarginalLikelihood`.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        likelihood: Likelihood,
        drawing: Drawing,
        choice: BlockChoice,
        **options: Any,
    ):
        self.model, self.weights, self.likelihood = model, weights, likelihood
        device = next(iter(weights.values())).device
        x, y = drawing.block()
        self.x, self.y = map_inputs(lambda t: t.to(device), x), y.to(device)
        self.n_data, self.seed = drawing.n_data, drawing.seed
        self.options = {**options, "outputs": choice.outputs, "root": choice.root}
        self._prepared: dict[int, tuple[MarginalLikelihood, Callable[[], Evidence]]] = {}

    def forget(self) -> None:
        """What was prepared for the prior mean of before."""
        self._prepared.clear()

    def marginal_likelihood(self, length: int, mean: Tensor) -> MarginalLikelihood:
        """The estimator, with the same columns every time.

        Args:
            length: entries of the prior precision.
            mean: of the prior, a number or one for each weight.
        """
        sizes = [w.numel() for w in self.weights.values()]
        flat = mean.detach().expand(sum(sizes)).split(sizes)
        means = {
            name: m.reshape(w.shape)
            for (name, w), m in zip(self.weights.items(), flat, strict=True)
        }
        structures = {sum(sizes): "diagonal", len(sizes): "layerwise", 1: "scalar"}
        with constant_besides(self.weights.values(), self.model):
            return MarginalLikelihood(
                self.model,
                self.likelihood,
                n_data=self.n_data,
                prior=GaussianPrior(self.model, structures[length], mean=means),  # type: ignore[arg-type]
                generator=torch.Generator().manual_seed(self.seed),
                **self.options,
            )

    def __call__(self, precision: Tensor, sigma: Tensor, mean: Tensor, tau: float) -> Tensor:
        """The estimate in float64, differentiable in precision and noise.

        Args:
            precision: of the prior [1], [n_layers] or [n_params].
            sigma: standard deviation of the noise of a regression.
            mean: of the prior.
            tau: temperature.
        """
        theta, log_sigma = precision.double().log(), sigma.double().log()
        with constant_besides(self.weights.values(), self.model), torch.enable_grad():
            ml, evaluate = self._at(len(precision), mean)
            self._set(ml, theta, log_sigma, tau)
            total = evaluate().total
            leaves = [ml.prior.log_precision]
            if isinstance(ml.likelihood, Gaussian):
                leaves.append(ml.likelihood.log_sigma)
            gradients = torch.autograd.grad(total, leaves)
        # the value, with the gradient carried over to the given tensors
        value = total.detach().double()
        for given, gradient in zip((theta, log_sigma), gradients, strict=False):
            moved = given.reshape(-1) - given.reshape(-1).detach()
            value = value + gradient.double().reshape(-1) @ moved
        return value

    def _at(self, length: int, mean: Tensor) -> tuple[MarginalLikelihood, Callable[[], Evidence]]:
        if length not in self._prepared:
            ml = self.marginal_likelihood(length, mean)
            self._prepared[length] = ml, ml.cached(self.x, self.y)
        return self._prepared[length]

    @torch.no_grad()
    def _set(self, ml: MarginalLikelihood, theta: Tensor, log_sigma: Tensor, tau: float) -> None:
        ml.prior.log_precision.copy_(theta)
        ml.likelihood.log_temperature.fill_(torch.tensor(tau).log())
        if isinstance(ml.likelihood, Gaussian):
            ml.likelihood.log_sigma.fill_(log_sigma)
