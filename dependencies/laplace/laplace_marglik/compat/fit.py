"""What laplace-torch's classes are made of: weights, hyperparameters, a fit and its state."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from asdl_marglik import Budget, PrecisionLost, trainable
from laplace_marglik import checks
from laplace_marglik.batches import pair_of
from laplace_marglik.compat.block_evidence import BlockChoice, BlockEvidence, Drawing
from laplace_marglik.compat.hyperparameters import (
    groups_for,
    mean_tensor,
    noise_tensor,
    precision_tensor,
    spread,
)
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Gaussian, Likelihood, likelihood_for
from laplace_marglik.posterior.curvature import Curvature, Setting, curvature_of, random_weights
from laplace_marglik.posterior.laplace import LaplacePosterior


class Fit:
    """A Laplace approximation of the posterior of a network's weights.

    Args:
        model: the trained network.
        likelihood: "classification", "regression", or a `Likelihood` of this library.
        sigma_noise: standard deviation of the noise of a regression.
        prior_precision: a number, one for each parameter tensor, or one for each weight.
        prior_mean: a number, or one for each weight.
        temperature: by which log-probabilities are divided.
        enable_backprop: keep the graph of predictions in their inputs.
        dict_key_x: not needed: a mapping goes to the model as it is.
        dict_key_y: where the targets of a batch that is a mapping are.
        backend: not needed; accepted with a warning.
        last_layer_name: name of the module that `subset_of_weights="last_layer"` means; None for
            the one that the model calls last.
        subset_of_weights: "all", "last_layer", or name patterns such as ["head.*"].
        inducing: of structure "ntk", how many root rows of the data are kept.
        augment: module or function x [n, ...] -> [n, A, ...]; outputs are averaged over the copies.
        memory_budget: bytes that a fit or a prediction may take.
        kfac: weight-sharing setting of KFAC, "expand" | "reduce".
        subset: data points of a random block, drawn in `fit`, from which the evidence is then
            estimated; predictions, and single terms of the evidence, are those of all data.
        outputs: root columns of that block; None for all.
        root: of the likelihood's curvature in that block, as in `MarginalLikelihood`.
        ignored: `backend_kwargs` and other arguments of laplace-torch's backends.
    """

    structure: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Any = None,
        last_layer_name: str | None = None,
        *,
        subset_of_weights: str | Sequence[str] = "all",
        inducing: int | None = None,
        augment: Any = None,
        memory_budget: float | None = None,
        kfac: Any = "expand",
        subset: int | None = None,
        outputs: int | None = None,
        root: Any = None,
        **ignored: Any,
    ):
        _check_ignored(backend, ignored)
        self.model = model
        self.likelihood = likelihood
        self.temperature = temperature
        self.enable_backprop = enable_backprop
        self.dict_key_x, self.dict_key_y = dict_key_x, dict_key_y
        self.n_data = 0
        self.n_outputs = 0
        self._last_layer_name = last_layer_name
        self._subset = subset_of_weights
        self._inducing, self._kfac = inducing, kfac
        self._choice = BlockChoice(subset, outputs, root)
        self._block: BlockEvidence | None = None
        self._augment = checks.as_module(augment)
        self._budget = memory_budget
        self._likelihood = _likelihood(likelihood)
        self._loader: _Pairs | None = None
        self._fit_at = self._like.detach()
        self._curvature: Curvature | None = None
        self._posterior: LaplacePosterior | None = None
        self._weights = self._chosen(trainable(model)) if self._known_weights() else None
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.sigma_noise = sigma_noise
        if float(self.sigma_noise.detach()) != 1 and not self._regression:
            raise MarglikError("sigma_noise other than 1 is for likelihood='regression' only")

    # -------------------------------------------------------------------------------------- weights

    def _known_weights(self) -> bool:
        return self._subset != "last_layer" or self._last_layer_name is not None

    def _chosen(self, weights: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The random weights among all that require grad."""
        if self._subset == "last_layer":
            return random_weights(weights, [f"{self._last_layer_name}.*"])
        if isinstance(self._subset, str):
            return weights
        return random_weights(weights, self._subset)

    @property
    def _like(self) -> Tensor:
        return next(self.model.parameters())

    @property
    def _regression(self) -> bool:
        return isinstance(self._likelihood, Gaussian)

    def _random(self) -> dict[str, nn.Parameter]:
        if self._weights is None:
            raise MarglikError("the last layer is not known before fit(train_loader)")
        return self._weights

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: w.numel() for name, w in self._random().items()}

    @property
    def n_params(self) -> int | None:
        """Number of random weights; None before the last layer is known."""
        return None if self._weights is None else sum(self._sizes.values())

    @property
    def n_layers(self) -> int | None:
        """Number of their tensors."""
        return None if self._weights is None else len(self._weights)

    @property
    def mean(self) -> Tensor:
        """The mean of the posterior [P]: the network's weights."""
        return torch.cat([w.detach().flatten() for w in self._random().values()])

    # ------------------------------------------------------------------------------ hyperparameters

    @property
    def prior_precision(self) -> Tensor:
        """The prior precision [1], [n_layers] or [n_params]."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        sizes = None if self._weights is None else self._sizes
        self._prior_precision = precision_tensor(value, sizes, self._like)
        self._posterior = None

    @property
    def prior_mean(self) -> Tensor:
        """The prior mean, a number or [n_params]."""
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._prior_mean = mean_tensor(value, self.n_params, self._like)
        self._posterior = None
        if self._block is not None:
            self._block.forget()

    @property
    def sigma_noise(self) -> Tensor:
        """Standard deviation of the noise."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._sigma_noise = noise_tensor(value, self._like)
        self._posterior = None

    @property
    def prior_precision_diag(self) -> Tensor:
        """The prior precision of every weight [n_params]."""
        return spread(self.prior_precision, self._sizes)

    # ------------------------------------------------------------------------------------------ fit

    def fit(self, train_loader: Any, override: bool = True, progress_bar: bool = False) -> None:
        """Fit the curvature at the weights of now.

        Args:
            train_loader: batches (x, y) or mappings, in any order; read once, after a look at its
                first batch.
            override: must be True: earlier data are not kept.
            progress_bar: accepted; nothing is shown.
        """
        if not override:
            raise MarglikError(
                "override=False, which adds to the curvature of an earlier fit, is not offered; "
                "fit all data together"
            )
        if isinstance(train_loader, Iterator):  # a look at its first batch would lose it
            train_loader = list(train_loader)
        self._loader = _Pairs(train_loader, self.dict_key_y)
        if self._weights is None:
            self._find_last_layer(self._loader)
        self._fit_at = self.mean
        self._block = None
        if not self._choice:
            self._take(self._curvature_of(self._loader, double=False))
            return
        seed = int(torch.randint(2**31, ()))
        drawing = Drawing(self._loader, self._choice.subset, seed)
        self._take(self._curvature_of(self._loader, double=False, batches=drawing))
        self._block = self._block_of(drawing)

    def _block_of(self, drawing: Drawing) -> BlockEvidence:
        """The evidence of the data points that a fit has drawn."""
        return BlockEvidence(
            self.model,
            self._random(),
            self._scaled_likelihood(),
            drawing,
            self._choice,
            structure=self.structure,
            augment=self._augment,
            kfac=self._kfac,
            memory_budget=self._budget,
        )

    def _curvature_of(
        self, loader: _Pairs, *, double: bool, batches: Drawing | None = None
    ) -> Curvature:
        data = getattr(loader.loader, "dataset", None)
        setting = self._setting(None if data is None else len(data))
        read = loader if batches is None else batches
        return curvature_of(setting, read, self._scale(), self._log_precision(), double=double)

    def _fit_in_double(self) -> None:
        """The same with sums in float64, which the prior of now needs."""
        if self._loader is None or not torch.equal(self._fit_at, self.mean):
            raise MarglikError(
                "sums in single precision are too coarse for this prior, and data or weights of "
                "the fit are not there any more; call fit(train_loader) again"
            )
        self._take(self._curvature_of(self._loader, double=True))

    def _take(self, curvature: Curvature) -> None:
        self._curvature = curvature
        self._groupings: dict[int, Curvature] = {}
        self._posterior = None
        self.n_data = len(curvature.y)
        self.n_outputs = curvature.f.shape[-1]

    def _find_last_layer(self, loader: _Pairs) -> None:
        """The module whose parameters the model uses last."""
        x, _ = next(iter(loader))
        weights = trainable(self.model)
        uses = self._setting(None, weights).uses_of_weights(x)
        if not uses:
            raise MarglikError(
                "the last layer could not be found; name it with last_layer_name= or choose "
                "weights by patterns, subset_of_weights=['head.*']"
            )
        name = next(iter(uses[-1].names.values()))
        self._last_layer_name = name.rpartition(".")[0]
        self._weights = self._chosen(weights) if self._last_layer_name else {name: weights[name]}
        self.prior_precision = self._prior_precision
        self.prior_mean = self._prior_mean

    def _setting(
        self, n_data: int | None, weights: dict[str, nn.Parameter] | None = None
    ) -> Setting:
        weights = self._random() if weights is None else weights
        length = len(self.prior_precision)
        return Setting(
            self.model,
            weights,
            self._scaled_likelihood(),
            groups_for(length if length > 1 else 1, weights),
            self.structure,
            n_data,
            augment=self._augment,
            inducing=self._inducing,
            kfac=self._kfac,
            budget=Budget(self._budget, None, self._like.device),
            seed=0,
        )

    def _log_precision(self) -> Tensor:
        return self.prior_precision.double().log()

    def _scale(self) -> Tensor:
        """Of the curvature: 1 / (sigma^2 tau), with the graph of sigma."""
        if self._regression:
            return 1 / (self.sigma_noise.double().square() * self.temperature)
        return self._scaled_likelihood().curvature_scale()

    def _scaled_likelihood(self) -> Likelihood:
        """The likelihood with the noise and temperature of now."""
        likelihood = copy.deepcopy(self._likelihood)
        with torch.no_grad():
            likelihood.log_temperature.fill_(math.log(self.temperature))
            if isinstance(likelihood, Gaussian):
                likelihood.log_sigma.fill_(float(self.sigma_noise.detach().double().log()))
        return likelihood

    def _fitted(self) -> Curvature:
        """The curvature, in the groups of the prior of now."""
        if self._curvature is None:
            raise MarglikError("the Laplace approximation has not been fitted; call fit(loader)")
        length = len(self.prior_precision)
        if length not in self._groupings:
            groups = groups_for(length, self._random())
            self._groupings[length] = self._curvature.regrouped(groups)
        return self._groupings[length]

    def _native(self) -> LaplacePosterior:
        """The posterior of this library at the hyperparameters of now."""
        if self._posterior is None:
            try:
                self._posterior = self._settled()
            except PrecisionLost:
                self._fit_in_double()
                self._posterior = self._settled()
        return self._posterior

    def _settled(self) -> LaplacePosterior:
        curvature = self._fitted()
        setting = replace(curvature.setting, likelihood=self._scaled_likelihood())
        squares = _by_group(self._deviation().square(), curvature.setting.groups, self._sizes)
        theta = self._log_precision().detach()
        return LaplacePosterior(setting, None).settle(curvature, theta, squares.detach())

    def _deviation(self) -> Tensor:
        return self.mean.double() - self.prior_mean.double()

    # ---------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the model, as plain tensors, numbers and names."""
        curvature = self._fitted()
        return {
            "cls_name": type(self).__name__,
            "mean": self.mean,
            "weights": list(self._random()),
            "prior_precision": self.prior_precision.detach(),
            "prior_mean": self.prior_mean.detach(),
            "sigma_noise": self.sigma_noise.detach(),
            "temperature": self.temperature,
            "likelihood": type(self._likelihood).__name__,
            "last_layer_name": self._last_layer_name,
            "curvature": curvature.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of an approximation of the same model.

        Args:
            state_dict: from `state_dict`.
        """
        self._check_state(state_dict)
        self._last_layer_name = state_dict["last_layer_name"]
        parameters = trainable(self.model)
        self._weights = {name: parameters[name] for name in state_dict["weights"]}
        self.temperature = state_dict["temperature"]
        for name in ("prior_precision", "prior_mean", "sigma_noise"):
            setattr(self, name, state_dict[name])
        state = state_dict["curvature"]
        self._loader, self._block = None, None
        self._take(Curvature.from_state(self._setting(state["n_data"]), state))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("cls_name") != type(self).__name__:
            raise MarglikError(
                f"the state is of a {state.get('cls_name')}, this is a {type(self).__name__}; use "
                "the same hessian_structure"
            )
        names = state["weights"]
        parameters = dict(self.model.named_parameters())
        if any(name not in parameters for name in names):
            raise MarglikError(f"the state is of another model, with the weights {names[:5]} ...")
        mean = torch.cat([parameters[name].detach().flatten() for name in names])
        if mean.shape != state["mean"].shape or not torch.equal(mean.cpu(), state["mean"].cpu()):
            raise MarglikError(
                "the state was fitted around other weights; load the network's own state_dict first"
            )
        if state["likelihood"] != type(self._likelihood).__name__:
            raise MarglikError(f"the state is for a {state['likelihood']} likelihood")


class _Pairs:
    """A loader whose batches are pairs (x, y), also where they are mappings."""

    def __init__(self, loader: Iterable[Any], key: str):
        self.loader, self.key = loader, key

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for batch in self.loader:
            if isinstance(batch, Mapping):
                yield batch, batch[self.key]
            else:
                yield pair_of(batch)


def _likelihood(spec: Any) -> Likelihood:
    """Ours for a name of laplace-torch's, or the one given."""
    if spec == "reward_modeling":
        raise MarglikError(
            "reward modelling is not offered; write the likelihood of preferences as a function "
            "log_prob(f, y), which is a likelihood here"
        )
    if isinstance(spec, Likelihood):
        return copy.deepcopy(spec)
    return likelihood_for(str(getattr(spec, "value", spec)) if isinstance(spec, str) else spec)


def _check_ignored(backend: Any, ignored: Mapping[str, Any]) -> None:
    """Backends are not needed; anything else that is not known is an error."""
    known = {"backend_kwargs", "asdl_fisher_kwargs", "damping", "feature_reduction"}
    unknown = [name for name in ignored if name not in known]
    if unknown:
        raise MarglikError(f"unknown argument {unknown[0]!r}")
    if ignored.get("damping"):
        raise MarglikError(
            "damping is not offered: the sum of Kronecker factors and prior is exact here"
        )
    if backend is not None or any(ignored.get(name) for name in known):
        warnings.warn(
            "backend and its arguments are not needed here and have no effect: curvature comes "
            "from this library's own rules",
            stacklevel=4,
        )


def _by_group(values: Tensor, groups: Mapping[str, int | slice], sizes: dict[str, int]) -> Tensor:
    """Sums over the weights of each group [G]."""
    parts = dict(zip(groups, values.split(list(sizes.values())), strict=True))
    if all(isinstance(group, slice) for group in groups.values()):
        return values
    count = 1 + max(group for group in groups.values() if isinstance(group, int))
    sums = [values.new_zeros(()) for _ in range(count)]
    for name, group in groups.items():
        assert isinstance(group, int)
        sums[group] = sums[group] + parts[name].sum()
    return torch.stack(sums)
