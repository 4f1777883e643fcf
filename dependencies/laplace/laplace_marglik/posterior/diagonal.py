"""The diagonal Laplace approximation: independent Gaussian weights, and their evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asdl_marglik import copied, evaluating, map_inputs, run, taken, trainable
from asdl_marglik.watch import persample
from laplace_marglik import checks
from laplace_marglik.batches import pairs
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.likelihood import Likelihood, likelihood_for
from laplace_marglik.prior import GaussianPrior
from laplace_marglik.variational.gaussian import FixedPosterior

# entries of the gradients of single data that are in memory together: 128 MiB in single precision
GRADIENT_ENTRIES = 2**25


class DiagonalLaplace:
    """Independent weights with precision delta + h around their present values.

    The curvature h comes from one pass over the data:

        h = sum_i (d log p_i / d w)^2            curvature "empirical" (empirical Fisher)
        h = sum_i diag(J_i^T Lambda_i J_i)       curvature "ggn"
        evidence = log p(y | w) - 1/2 scatter - 1/2 sum log(1 + h / delta)   (Immer et al. 2021)

    The evidence can be differentiated in the prior's log precision, any number of times.

    Args:
        model: the network at its trained weights.
        likelihood: "classification", "regression", a `Likelihood`, or a function log_prob(f, y).
        prior: of the same model, without covariance.
        loader: batches (x, y) of the data, read once.
        curvature: "empirical" or "ggn", as above.
        hyper: name patterns of parameters that are not weights.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | Callable[[Tensor, Tensor], Tensor],
        prior: GaussianPrior,
        loader: Iterable[tuple[Any, Tensor]],
        *,
        curvature: Literal["empirical", "ggn"] = "empirical",
        hyper: Iterable[str] = (),
    ):
        if curvature not in ("empirical", "ggn"):
            raise MarglikError(f"curvature must be empirical or ggn, got {curvature!r}")
        prior.check_independent()
        self.prior = prior
        self._likelihood = likelihood_for(likelihood)
        self._curvature = curvature
        self._weights = {name: w.detach().clone() for name, w in trainable(model, hyper).items()}
        self._squares = prior.squares(self._weights)
        self.curvature = {name: torch.zeros_like(w) for name, w in self._weights.items()}
        self.log_likelihood = torch.zeros((), dtype=torch.float64)
        self.n_data = 0
        with evaluating(model):
            for x, y in pairs(loader):
                self._add(model, x, checks.targets(y))
        if not self.n_data:
            raise MarglikError("the loader is empty; it must yield (x, y) batches")

    def evidence(self) -> Evidence:
        """The log marginal likelihood of the data, for the prior as it is now."""
        ratio = torch.zeros((), dtype=torch.float64, device=self.prior.log_precision.device)
        for name, h in self.curvature.items():
            log_delta = self.prior.log_precision[self.prior.groups[name]].double()
            relative = h.double().flatten() * torch.exp(-log_delta)
            ratio = ratio + torch.log1p(relative).sum()
        scatter = self.prior.scatter(self._squares)
        return Evidence(self.log_likelihood.to(scatter), scatter, ratio, 1, "approximation")

    def posterior(self) -> FixedPosterior:
        """N(w, 1 / (delta + h)) for the prior as it is now."""
        precisions = self.prior.precisions()
        deviations = {}
        for name, h in self.curvature.items():
            delta = precisions[name]
            if delta.dim():
                delta = delta.reshape(h.shape)
            deviations[name] = (h + delta).rsqrt()
        return FixedPosterior(self._weights, deviations)

    def _add(self, model: nn.Module, x: Any, y: Tensor) -> None:
        """Add the curvature and the log-likelihood of a batch, in portions that fit into memory."""
        device = next(iter(self._weights.values())).device
        x = map_inputs(lambda t: t.to(device), x)
        y = y.to(device)
        n_weights = sum(w.numel() for w in self._weights.values())
        size = max(1, GRADIENT_ENTRIES // n_weights)
        for span in torch.arange(len(y), device=device).split(size):
            self._add_portion(model, taken(x, span), y[span])

    def _add_portion(self, model: nn.Module, x: Any, y: Tensor) -> None:
        with torch.no_grad():
            f = run(model, copied(x))
        cotangents, log_prob = self._cotangents(f, y)
        copies = map_inputs(lambda t: t.unsqueeze(1), x)  # an augmentation axis of length one
        rows = persample.rows(model, self._weights, copies, cotangents.to(f.dtype))
        for name, row in rows.items():
            self.curvature[name] += row.square().sum((0, 1))
        self.log_likelihood += log_prob.cpu()
        self.n_data += len(y)

    def _cotangents(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents [n, K, C] of the outputs whose squared rows are h, and the log-likelihood."""
        f = f.double().requires_grad_()
        with torch.enable_grad():
            log_prob = self._likelihood.tempered_log_prob(f, y).sum()
            (slope,) = torch.autograd.grad(log_prob, f)
        if self._curvature == "empirical":
            return slope.reshape(len(f), 1, -1), log_prob.detach()
        f = f.detach()
        columns = torch.arange(f[0].numel(), device=f.device).expand(len(f), -1)
        with torch.no_grad():
            U = self._likelihood.root(f, y, "symmetric", columns)
            root_scale = self._likelihood.curvature_scale().sqrt()
        return U.mT * root_scale, log_prob.detach()
