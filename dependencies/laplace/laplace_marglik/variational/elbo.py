"""The evidence lower bound of a Gaussian posterior, and the data-emphasised ELBO (Harvey et al.
2025).

J_kappa = kappa E_q[sum_i log p(y_i | x_i, w)] - KL(q || p),     q = N(m, diag(sigma^2)),     kappa
= D/N

kappa = 1 gives the ELBO. With many more weights D than data N the divergence outweighs the data and
the ELBO prefers the prior; kappa = D/N restores the balance. Where log p <= 0 (discrete targets)
and kappa >= 1, J_kappa <= ELBO <= log p(y). The variance of each group of the prior is at its
optimum in closed form (see `kl`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asdl_marglik import (
    Ranks,
    augmented,
    copied,
    evaluating,
    hyperparameters_in,
    map_inputs,
    run,
    run_averaged,
    tensors_of,
    trainable,
)
from laplace_marglik import checks
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.likelihood import Gaussian, HeteroscedasticGaussian, Likelihood, likelihood_for
from laplace_marglik.prior import GaussianPrior
from laplace_marglik.variational.gaussian import FixedPosterior, LearnedWidth, Width, normal
from laplace_marglik.variational.kl import Divergence, divergence


@dataclass(frozen=True)
class Bounds:
    """The ELBO and the data-emphasised ELBO of all N data; their standard errors are over draws of
    the weights.
    """

    elbo: Evidence
    de_elbo: Evidence
    kappa: float


class DataEmphasizedELBO:
    """Trains means and widths of a Gaussian posterior together with the variances of its prior.

        loss(batch) = -mean_i log p(y_i | x_i, m + sigma xi) + KL(q || p) / (kappa N), xi ~ N(0, I)

    is -J_kappa / (kappa N) estimated with one draw of all weights. The means m are the model's
    parameters; `parameters` holds the rest.

    Args:
        model: the network; its parameters that require grad are the weights.
        likelihood: "classification", "regression", a `Likelihood`, or a function log_prob(f, y).
        n_data: size N of the whole training set.
        prior: its groups share a variance; its mean may be zero (L2-zero) or the pretrained weights
            (L2-SP), its covariance that of a pretrained Gaussian (PTYL).
        kappa: a number, or "auto" for D/N, which is below one if there are fewer weights than data.
        posterior: one sigma for all weights ("scalar"), one per prior group ("group"), or one per
            weight ("diagonal").
        sigma: its initial value.
        variance: of the prior, "optimal" for the closed form or "fixed" at the prior's precision.
        antithetic: average over xi and -xi, at the cost of a second pass.
        augment: as in `MarginalLikelihood`; learned by this loss.
        hyper: as in `MarginalLikelihood`; learned by this loss.
        generator: source of xi and of augmentations; torch's own is not touched.
        force: allow kappa != 1 with a learned noise.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | Callable[[Tensor, Tensor], Tensor],
        *,
        n_data: int,
        prior: GaussianPrior,
        kappa: float | Literal["auto"] = "auto",
        posterior: Width = "scalar",
        sigma: float = 1e-4,
        variance: Literal["optimal", "fixed"] = "optimal",
        antithetic: bool = False,
        augment: nn.Module | None = None,
        hyper: Iterable[str] = (),
        generator: torch.Generator | None = None,
        force: bool = False,
    ):
        checks.positive_integer("n_data", n_data)
        if variance not in ("optimal", "fixed"):
            raise MarglikError(f"variance must be optimal or fixed, got {variance!r}")
        self.model = model
        self.likelihood = likelihood_for(likelihood)
        self.prior = prior
        self.n_data = n_data
        self.variance = variance
        self.antithetic = antithetic
        self.augment = checks.as_module(augment)
        self.hyper = tuple(hyper)
        self._hyper_in_network = hyperparameters_in(model, self.hyper)
        weights = self.weights
        prior.check(weights, self._hyper_in_network)
        self.n_weights = sum(w.numel() for w in weights.values())
        self.kappa = self._checked_kappa(kappa, force)
        self.width = LearnedWidth(posterior, prior, weights, sigma)
        device = self.width.raw_sigma.device
        self.generator = generator or torch.Generator(device).manual_seed(torch.initial_seed())

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return trainable(self.model, self.hyper)

    @property
    def sigma(self) -> Tensor:
        """Standard deviations of the posterior: [1], one per prior group, or one per weight."""
        return self.width.sigma

    def parameters(self) -> list[nn.Parameter]:
        """What is learned besides the weights: sigma, and parameters of likelihood, augmentation
        and `hyper`.
        """
        modules = [self.likelihood] if self.augment is None else [self.likelihood, self.augment]
        learned = [p for module in modules for p in module.parameters() if p.requires_grad]
        return list(
            dict.fromkeys([self.width.raw_sigma, *learned, *self._hyper_in_network.values()])
        )

    # ------------------------------------------------------------------------------------ objective

    def __call__(self, x: Any, y: Tensor) -> Tensor:
        """The loss of a batch, per datum; differentiable in the weights and in `parameters`."""
        x, y = self._placed(x), self._placed(checks.targets(y))
        self._check_batch(x, y)
        weights, scale = self.weights, self._likelihood_scale()
        noise = {name: normal(w, self.generator) for name, w in weights.items()}
        data = self._mean_log_prob(weights, noise, x, y)
        if self.antithetic:
            opposite = {name: -xi for name, xi in noise.items()}
            data = (data + self._mean_log_prob(weights, opposite, x, y)) / 2
        return self.kl().to(data.dtype) / (self.kappa * self.n_data) - scale * data

    def kl(self) -> Tensor:
        """KL(q || p) of all weights in nats, in float64."""
        parts = divergence(self.weights, self.prior, self.width)
        return parts.total(self._variance(parts))

    def prior_variance(self) -> dict[str, Tensor]:
        """The variance of each group of the prior (its closed form, if optimal), by name; or one
        per weight.
        """
        with torch.no_grad():
            variance = self._variance(divergence(self.weights, self.prior, self.width))
        slices = {
            name: group for name, group in self.prior.groups.items() if isinstance(group, slice)
        }
        if slices:
            return {
                name: variance[own].reshape(self.weights[name].shape)
                for name, own in slices.items()
            }
        return dict(zip(self.prior.group_names, variance, strict=True))

    @torch.no_grad()
    def update_prior(self) -> None:
        """Store the variances of `prior_variance` as the prior's precisions, for reports and for
        other estimators.
        """
        variance = self._variance(divergence(self.weights, self.prior, self.width))
        self.prior.log_precision.copy_(-variance.log())

    # -------------------------------------------------------------------- prediction and evaluation

    def outputs_of(self, x: Any, *, seed: int | None = None) -> Tensor:
        """Outputs at the means of the weights, in the model's current mode. seed: of the random
        augmentation.
        """
        return self._outputs({}, self._placed(x), seed)

    @torch.no_grad()
    def predict(self, x: Any, *, samples: int = 0) -> Tensor:
        """The mean prediction in evaluation mode: at the means of the weights, or averaged over
        draws of them.
        """
        x = self._placed(x)
        with evaluating(self.model):
            if not samples:
                return self.likelihood.predict(self._outputs({}, x))
            posterior = self.fixed_posterior()
            draws = [self._outputs(posterior.sample(self.generator), x) for _ in range(samples)]
            return torch.stack([self.likelihood.predict(f) for f in draws]).mean(0)

    @torch.no_grad()
    def evaluate(
        self, loader: Iterable[tuple[Any, Tensor]], *, samples: int = 10, ranks: Ranks | None = None
    ) -> Bounds:
        """Both bounds for all N data, averaged over draws of the weights; the loader is read once,
        in any order.

        ranks: processes that take its batches in turn; all are given the same.
        """
        if samples < 1:
            raise MarglikError(f"samples must be at least 1, got {samples}")
        seeds = [self._seed() for _ in range(samples)]
        sums, count = torch.zeros(samples, dtype=torch.float64), 0
        posterior, scale = self.fixed_posterior(), self._likelihood_scale()
        generator = torch.Generator(self.generator.device)
        with evaluating(self.model):
            for number, (x, y) in enumerate(checks.pairs(loader)):
                x, y = self._placed(x), self._placed(checks.targets(y))
                self._check_batch(x, y)
                for draw, seed in enumerate(seeds if ranks is None or ranks.owns(number) else ()):
                    f = self._outputs(
                        posterior.sample(generator.manual_seed(seed)), x, seed + count
                    )
                    sums[draw] += scale * self.likelihood.log_prob(f.double(), y).sum().cpu()
                count += len(y)
        if count != self.n_data:
            raise MarglikError(
                f"the loader gave {count} data points, but n_data={self.n_data}; it must give "
                "each once"
            )
        if ranks is not None:
            sums = ranks.sum(sums.to(self.width.raw_sigma.device), "bounds of all data").cpu()
        return self._bounds(sums)

    def fixed_posterior(self) -> FixedPosterior:
        """The posterior as it is now."""
        weights, sigma = self.weights, self.sigma.detach()
        return FixedPosterior(
            weights, {name: self.width.of(sigma, name, w) for name, w in weights.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """Sigma and the state of the generator; weights, prior and likelihood are modules of their
        own.
        """
        return {
            "raw_sigma": self.width.raw_sigma.detach().clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.width.load_state_dict({"raw_sigma": state["raw_sigma"]})
        self.generator.set_state(state["generator"])

    # ------------------------------------------------------------------------------------- assembly

    def _bounds(self, sums: Tensor) -> Bounds:
        parts = divergence(self.weights, self.prior, self.width)
        variance = self._variance(parts)
        scatter, ratio = parts.scatter(variance), parts.log_det_ratio(variance)
        error = float(sums.std()) / math.sqrt(len(sums)) if len(sums) > 1 else None
        normalised = self._likelihood_scale() == 1
        below = normalised and (self.kappa == 1 or (self.kappa > 1 and self.likelihood.discrete))

        def evidence(kappa: float, bound: bool) -> Evidence:
            return Evidence(
                kappa * sums.mean().to(scatter),
                scatter,
                ratio,
                1,
                "bound" if bound else "approximation",
                None if error is None else kappa * error,
            )

        return Bounds(evidence(1.0, normalised), evidence(self.kappa, below), self.kappa)

    def _variance(self, parts: Divergence) -> Tensor:
        if self.variance == "optimal":
            return parts.optimal_variance()
        return torch.exp(-self.prior.log_precision.detach().double())

    def _mean_log_prob(
        self, weights: dict[str, nn.Parameter], noise: dict[str, Tensor], x: Any, y: Tensor
    ) -> Tensor:
        return self.likelihood.log_prob(
            self._outputs(self.width.perturbed(weights, noise), x), y
        ).mean()

    def _outputs(self, weights: dict[str, Tensor], x: Any, seed: int | None = None) -> Tensor:
        """Outputs with some weights replaced, averaged over augmented copies."""
        if self.augment is None:
            return run(self.model, copied(x), weights)
        copies = augmented(self.augment, x, self._seed() if seed is None else seed)
        return run_averaged(self.model, copies, weights)

    def _likelihood_scale(self) -> float:
        return self.likelihood.inverse_temperature.item()

    def _checked_kappa(self, kappa: float | Literal["auto"], force: bool) -> float:
        if isinstance(kappa, str) and kappa != "auto":
            raise MarglikError(f"kappa must be a positive number or 'auto' for D/N, got {kappa!r}")
        value = self.n_weights / self.n_data if isinstance(kappa, str) else float(kappa)
        if not 0 < value < math.inf:
            raise MarglikError(f"kappa must be a positive number or 'auto' for D/N, got {kappa!r}")
        if self.likelihood.log_temperature.requires_grad:
            raise MarglikError(
                "an ELBO grows without limit in a learned temperature; construct the likelihood "
                "without"
            )
        noise = isinstance(self.likelihood, Gaussian) and self.likelihood.log_sigma.requires_grad
        if (
            value != 1
            and not force
            and (noise or isinstance(self.likelihood, HeteroscedasticGaussian))
        ):
            raise MarglikError(
                f"kappa = {value:g} with a learned noise is ill-posed: the objective may grow "
                "without limit as the noise goes to zero. Fix it, Gaussian(sigma, "
                "learn_sigma=False), or use kappa=1; force=True allows it"
            )
        return value

    def _check_batch(self, x: Any, y: Tensor) -> None:
        lengths = [len(t) for t in tensors_of(x)]
        if not len(y) or any(n != len(y) for n in lengths):
            raise MarglikError(
                f"expected at least one datum and as many inputs as targets, got {lengths} inputs "
                f"and {len(y)} targets"
            )

    def _seed(self) -> int:
        device = self.generator.device
        return int(torch.randint(2**31, (), generator=self.generator, device=device))

    def _placed(self, x: Any) -> Any:
        return map_inputs(lambda t: t.to(self.width.raw_sigma.device), x)
