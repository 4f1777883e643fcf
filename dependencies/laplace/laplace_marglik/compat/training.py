"""Training with hyperparameters learned on the way (Immer et al. 2021, algorithm 1)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asdl_marglik import trainable
from laplace_marglik import checks
from laplace_marglik.compat.choose import Laplace
from laplace_marglik.compat.hyperparameters import spread
from laplace_marglik.compat.predictions import ParametricLaplace
from laplace_marglik.compat.tuning import STRUCTURES


@dataclass
class _Best:
    """The network and the hyperparameters with the best evidence so far."""

    value: float = math.inf
    weights: dict[str, Any] | None = None
    precision: Tensor | None = None
    sigma: Tensor | float = 1.0


@dataclass
class _Training:
    """What a run holds.

    Args:
        model: the network.
        loader: of the training data.
        likelihood: "classification" or "regression".
        options: further arguments of `Laplace`.
        log_precision: of the prior.
        log_sigma: of the noise; None where it is not learned.
        sigma: the noise where it is not learned.
        temperature: of the likelihood.
        key: where the targets of a mapping are.
    """

    model: nn.Module
    loader: Any
    likelihood: str
    options: dict[str, Any]
    log_precision: Tensor
    log_sigma: Tensor | None
    sigma: float
    temperature: float
    key: str
    margliks: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: _Best = field(default_factory=_Best)

    @property
    def noise(self) -> Tensor | float:
        """Standard deviation of the noise, with its graph."""
        return self.sigma if self.log_sigma is None else self.log_sigma.exp()

    def epoch(self, optimiser: torch.optim.Optimizer, scheduler: Any) -> None:
        """Ordinary training on all batches, with the weight decay of now."""
        device = self.log_precision.device
        total, count = 0.0, 0
        for batch in self.loader:
            is_mapping = isinstance(batch, Mapping)
            x, y = (batch, batch[self.key]) if is_mapping else batch
            x, y = (x if is_mapping else x.to(device)), y.to(device)
            optimiser.zero_grad()
            loss = self.loss(self.model(x), y)
            loss.backward()
            optimiser.step()
            if scheduler is not None:
                scheduler.step()
            total += loss.item() * len(y)
            count += len(y)
        self.losses.append(total / count)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """The negative log posterior per datum, times tau, for regression also 2 sigma^2 / C."""
        weights = trainable(self.model)
        flat = torch.cat([w.flatten() for w in weights.values()])
        sizes = {name: w.numel() for name, w in weights.items()}
        delta = spread(self.log_precision.detach().exp(), sizes)
        penalty = self.temperature * (delta * flat) @ flat / (2 * len(self.loader.dataset))
        if self.likelihood == "classification":
            return F.cross_entropy(f, y) + penalty
        sigma = torch.as_tensor(self.noise).detach()
        return F.mse_loss(f, y) + 2 * sigma.square() * penalty / f[0].numel()

    def laplace(
        self, precision: Tensor, sigma: Tensor | float, **options: Any
    ) -> ParametricLaplace:
        """The fitted approximation of the network as it is."""
        la = Laplace(
            self.model,
            self.likelihood,
            "all",
            sigma_noise=sigma,
            prior_precision=precision,
            temperature=self.temperature,
            **self.options,
            **options,
        )
        la.fit(self.loader)
        return la

    def learn(self, optimiser: torch.optim.Optimizer, steps: int) -> None:
        """Some steps on the hyperparameters, at the network of now."""
        la = self.laplace(self.log_precision.detach().exp(), torch.as_tensor(self.noise).detach())
        for _ in range(steps):
            optimiser.zero_grad()
            sigma = None if self.log_sigma is None else self.log_sigma.exp()
            precision = self.log_precision.exp()
            value = -la.log_marginal_likelihood(precision, sigma)
            value.backward()
            optimiser.step()
            self.margliks.append(value.item())
        if self.margliks[-1] < self.best.value:
            self.best = _Best(
                self.margliks[-1],
                copy.deepcopy(self.model.state_dict()),
                la.prior_precision.detach(),
                la.sigma_noise.detach(),
            )

    def result(self, **options: Any) -> ParametricLaplace:
        """The approximation of the best network, which the model gets back."""
        precision, sigma = self.log_precision.detach().exp(), torch.as_tensor(self.noise).detach()
        if self.best.weights is not None:
            assert self.best.precision is not None
            self.model.load_state_dict(self.best.weights)
            precision, sigma = self.best.precision, torch.as_tensor(self.best.sigma)
        return self.laplace(precision, sigma, **options)


def marglik_training(
    model: nn.Module,
    train_loader: Any,
    likelihood: str = "classification",
    hessian_structure: str = "kron",
    backend: Any = None,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: Any = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 1e-1,
    prior_structure: str = "layerwise",
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float = 1.0,
    sigma_noise_init: float = 1.0,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    *,
    subset: int | None = None,
    outputs: int | None = None,
    root: Any = None,
) -> tuple[ParametricLaplace, nn.Module, list[float], list[float]]:
    """Train a network and learn its prior precision and noise; (la, model, margliks, losses).

    Args:
        model: the network.
        train_loader: with `dataset`, whose length is N.
        likelihood: "classification" or "regression".
        hessian_structure: as in `Laplace`.
        backend: not needed; accepted with a warning.
        optimizer_cls: of the weights.
        optimizer_kwargs: its arguments; a weight decay is set to zero.
        scheduler_cls: of the learning rate, stepped after every batch.
        scheduler_kwargs: its arguments.
        n_epochs: in all.
        lr_hyp: of Adam on the hyperparameters.
        prior_structure: "scalar", "layerwise" or "diag".
        n_epochs_burnin: before hyperparameters are learned.
        n_hypersteps: steps on the hyperparameters each time.
        marglik_frequency: epochs between these times.
        prior_prec_init: initial prior precision.
        sigma_noise_init: initial noise of a regression.
        temperature: by which log-probabilities are divided.
        fix_sigma_noise: keep the noise.
        progress_bar: accepted; nothing is shown.
        enable_backprop: of the approximation that is returned.
        dict_key_x: as in `Laplace`.
        dict_key_y: as in `Laplace`.
        subset: data points of the evidence's block, which is drawn anew every time.
        outputs: root columns of that block.
        root: of the likelihood's curvature in it.
    """
    checks.one_of("likelihood", str(likelihood), ("classification", "regression"))
    checks.one_of("prior_structure", prior_structure, STRUCTURES)
    run = _Training(
        model,
        train_loader,
        likelihood,
        {
            "hessian_structure": hessian_structure,
            "backend": backend,
            "dict_key_y": dict_key_y,
            "subset": subset,
            "outputs": outputs,
            "root": root,
        },
        _initial(model, temperature * prior_prec_init, prior_structure),
        _noise(model, sigma_noise_init, learned=likelihood == "regression" and not fix_sigma_noise),
        sigma=sigma_noise_init if likelihood == "regression" else 1.0,
        temperature=temperature,
        key=dict_key_y,
    )
    optimiser = optimizer_cls(model.parameters(), **_without_decay(optimizer_kwargs))
    scheduler = scheduler_cls and scheduler_cls(optimiser, **(scheduler_kwargs or {}))
    learned = [run.log_precision, *([] if run.log_sigma is None else [run.log_sigma])]
    hyper_optimiser = torch.optim.Adam(learned, lr=lr_hyp)
    for epoch in range(1, n_epochs + 1):
        run.epoch(optimiser, scheduler)
        if epoch % marglik_frequency == 0 and epoch >= n_epochs_burnin:
            run.learn(hyper_optimiser, n_hypersteps)
    return run.result(enable_backprop=enable_backprop), model, run.margliks, run.losses


def _without_decay(options: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of an optimiser without weight decay, which is the prior's."""
    options = dict(options or {})
    if options.get("weight_decay"):
        warnings.warn(
            "the prior is the weight decay; that of the optimiser is set to 0", stacklevel=3
        )
        options["weight_decay"] = 0.0
    return options


def _initial(model: nn.Module, precision: float, structure: str) -> Tensor:
    """The log precision of every group, to be learned."""
    weights = trainable(model)
    sizes = [w.numel() for w in weights.values()]
    length = {"scalar": 1, "layerwise": len(sizes)}.get(structure, sum(sizes))
    first = next(iter(weights.values())).detach()
    return first.new_full((length,), math.log(precision)).requires_grad_()


def _noise(model: nn.Module, sigma: float, *, learned: bool) -> Tensor | None:
    """The log noise to be learned, or None."""
    if not learned:
        return None
    return next(model.parameters()).detach().new_full((1,), math.log(sigma)).requires_grad_()
