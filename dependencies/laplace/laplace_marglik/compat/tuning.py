"""Prior precisions chosen after training: by gradient of the evidence, or on a validation set."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_marglik import checks
from laplace_marglik.errors import MarglikError

STRUCTURES = ("scalar", "layerwise", "diag", "diagonal")


class Tuning:
    """`optimize_prior_precision` of something with an evidence and predictions."""

    prior_precision: Any
    dict_key_y: str

    @abstractmethod
    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        sigma_noise: float | Tensor | None = None,
    ) -> Tensor:
        """The evidence, differentiable in both."""

    @abstractmethod
    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        """Predictions."""

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Any = None,
        loss: Callable[..., Any] | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
    ) -> None:
        """Set `prior_precision` to the best value.

        Args:
            pred_type: of predictions on the validation set, "glm" or "nn".
            method: "marglik" (Adam on the evidence) or "gridsearch" (on the validation set).
            n_steps: of Adam.
            lr: of Adam, on the log precision.
            init_prior_prec: where Adam starts; a vector fixes the structure.
            prior_structure: "scalar", "layerwise" or "diag".
            val_loader: batches (x, y) of the validation set, for "gridsearch".
            loss: of predictions and targets, or of means, variances and targets for regression; or
                an object with update, compute and reset. None for the mean negative log-likelihood:
                laplace-torch's default for regression, the squared error of the mean, is the same
                for all precisions.
            log_prior_prec_min: exponent of the smallest value of the grid.
            log_prior_prec_max: exponent of the largest.
            grid_size: number of values.
            link_approx: as in a call.
            n_samples: as in a call.
            verbose: print the result.
            progress_bar: accepted; nothing is shown.
            log_prior_prec_base: of the exponents.
        """
        checks.one_of("method", method, ("marglik", "gridsearch"))
        if method == "marglik":
            checks.one_of("prior_structure", prior_structure, STRUCTURES)
            self._by_evidence(n_steps, lr, init_prior_prec, prior_structure)
        else:
            if val_loader is None:
                raise MarglikError("method='gridsearch' needs val_loader=, the validation set")
            grid = torch.logspace(
                log_prior_prec_min, log_prior_prec_max, grid_size, base=log_prior_prec_base
            )
            options = {"pred_type": pred_type, "link_approx": link_approx, "n_samples": n_samples}
            losses = [self._validated(value, val_loader, loss, options) for value in grid]
            self.prior_precision = grid[int(torch.tensor(losses).argmin())]
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")

    @abstractmethod
    def _structured(self, precision: float, structure: str) -> Tensor:
        """A precision for all groups of a structure."""

    def _by_evidence(self, n_steps: int, lr: float, start: float | Tensor, structure: str) -> None:
        self.prior_precision = start
        if len(self.prior_precision) == 1 and structure != "scalar":
            self.prior_precision = self._structured(float(self.prior_precision), structure)
        log_precision = self.prior_precision.detach().log().requires_grad_()
        optimiser = torch.optim.Adam([log_precision], lr=lr)
        with torch.enable_grad():
            for _ in range(n_steps):
                optimiser.zero_grad()
                (-self.log_marginal_likelihood(log_precision.exp())).backward()
                optimiser.step()
        self.prior_precision = log_precision.detach().exp()

    @torch.no_grad()
    def _validated(
        self, precision: Tensor, loader: Any, loss: Any, options: Mapping[str, Any]
    ) -> float:
        """The loss on the validation set with one precision; infinite where it cannot be had."""
        self.prior_precision = precision
        predictions, targets = [], []
        try:
            for batch in loader:
                is_mapping = isinstance(batch, Mapping)
                x, y = (batch, batch[self.dict_key_y]) if is_mapping else batch
                predictions.append(self(x, **options))
                targets.append(y.to(self.prior_precision.device))
        except torch.linalg.LinAlgError:
            return math.inf
        return _loss_of(predictions, targets, loss or self._negative_log_likelihood)

    @abstractmethod
    def _negative_log_likelihood(self, *prediction: Tensor) -> Tensor:
        """The mean negative log-likelihood of predictions, then targets."""


def _loss_of(predictions: list[Any], targets: list[Tensor], loss: Any) -> float:
    """A loss of all batches together, or one that is updated batch by batch."""
    parts = [p if isinstance(p, tuple) else (p,) for p in predictions]
    if all(hasattr(loss, name) for name in ("update", "compute", "reset")):
        loss.reset()
        for prediction, y in zip(parts, targets, strict=True):
            try:
                loss.update(*prediction, y)
            except TypeError:  # it takes means only
                loss.update(prediction[0], y)
        return float(loss.compute().mean())
    joined = [torch.cat(entries) for entries in zip(*parts, strict=True)]
    return float(loss(*joined, torch.cat(targets)))
