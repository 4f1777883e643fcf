"""The evidence lower bound of a Gaussian posterior, and the data-emphasised ELBO.

    J_kappa = kappa E_q[sum_i log p(y_i | x_i, w)] - KL(q || p),    q = N(m, diag(sigma^2))

kappa = 1 gives the ELBO. With many more weights D than data N the divergence outweighs the data and
the ELBO prefers the prior; kappa = D/N restores the balance (Harvey et al. 2025). Where log p <= 0
(discrete targets) and kappa >= 1, J_kappa <= ELBO <= log p(y). The variance of each group of the
prior is at its optimum in closed form (see `kl`).
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
from laplace_marglik.batches import pairs
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.likelihood import Likelihood, likelihood_for
from laplace_marglik.prior import GaussianPrior
from laplace_marglik.variational.gaussian import FixedPosterior, LearnedWidth, Width, normal
from laplace_marglik.variational.kl import Divergence, divergence


@dataclass(frozen=True)
class Bounds:
    """The ELBO and the data-emphasised ELBO of all N data, with standard errors over draws.

    Args:
        elbo: at kappa = 1.
        de_elbo: at `kappa`.
        kappa: factor of the log-likelihood.
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
        sigma: initial standard deviation of the posterior.
        variance: of the prior, "optimal" for the closed form or "fixed" at the prior's precision.
        antithetic: average over xi and -xi, at the cost of a second pass.
        augment: a module or function x [n, ...] -> [n, A, ...], over whose copies outputs are
            averaged; its parameters are learned by this loss.
        hyper: name patterns of parameters that are not weights but hyperparameters, learned by this
            loss.
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
        checks.one_of("variance", variance, ("optimal", "fixed"))
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
        self.kappa = self._checked_kappa(kappa, force=force)
        self.width = LearnedWidth(posterior, prior, weights, sigma)
        device = self.width.raw_sigma.device
        self.generator = generator or torch.Generator(device).manual_seed(torch.initial_seed())

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The means m of the posterior: the network's weights by name."""
        return trainable(self.model, self.hyper)

    @property
    def sigma(self) -> Tensor:
        """Standard deviations of the posterior: [1], one per prior group, or one per weight."""
        return self.width.sigma

    def parameters(self) -> list[nn.Parameter]:
        """Sigma and the learnable parameters of likelihood, augmentation and `hyper`."""
        modules = [self.likelihood] if self.augment is None else [self.likelihood, self.augment]
        learnable = [p for module in modules for p in module.parameters() if p.requires_grad]
        everything = [self.width.raw_sigma, *learnable, *self._hyper_in_network.values()]
        return list(dict.fromkeys(everything))

    # ------------------------------------------------------------------------------------ objective

    def __call__(self, x: Any, y: Tensor) -> Tensor:
        """The loss of a batch, per datum; differentiable in the weights and in `parameters`.

        Args:
            x: inputs [n, ...].
            y: targets, one per datum.
        """
        x, y = self._batch(x, y)
        weights = self.weights
        noise = {name: normal(w, self.generator) for name, w in weights.items()}
        data = self._mean_log_prob(weights, noise, x, y)
        if self.antithetic:
            opposite = {name: -xi for name, xi in noise.items()}
            data = (data + self._mean_log_prob(weights, opposite, x, y)) / 2
        return self._kl(weights).to(data.dtype) / (self.kappa * self.n_data) - data

    def kl(self) -> Tensor:
        """KL(q || p) of all weights in nats, in float64."""
        return self._kl(self.weights)

    def _kl(self, weights: dict[str, nn.Parameter]) -> Tensor:
        terms = divergence(weights, self.prior, self.width)
        return terms.least() if self.variance == "optimal" else terms.total(self._variance(terms))

    def prior_variance(self) -> dict[str, Tensor]:
        """The prior's variances: by group name, or, if elements have their own, by weight name."""
        with torch.no_grad():
            variance = self._variance(divergence(self.weights, self.prior, self.width))
        entries = {
            name: group for name, group in self.prior.groups.items() if isinstance(group, slice)
        }
        if not entries:
            return dict(zip(self.prior.group_names, variance, strict=True))
        weights = self.weights
        return {
            name: variance[entry].reshape(weights[name].shape) for name, entry in entries.items()
        }

    @torch.no_grad()
    def update_prior(self) -> None:
        """Store the variances of `prior_variance` in the prior, for reports and other uses."""
        variance = self._variance(divergence(self.weights, self.prior, self.width))
        self.prior.log_precision.copy_(-variance.log())

    # -------------------------------------------------------------------- prediction and evaluation

    def outputs_of(self, x: Any, *, seed: int | None = None) -> Tensor:
        """Outputs at the means of the weights, in the model's present mode.

        Args:
            x: inputs [n, ...].
            seed: of the random augmentation; None draws one.
        """
        return self._outputs({}, self._placed(x), seed)

    @torch.no_grad()
    def predict(self, x: Any, *, samples: int = 0) -> Tensor:
        """The mean prediction in evaluation mode.

        Args:
            x: inputs [n, ...].
            samples: draws of the weights to average over; 0 predicts at their means.
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
        """Both bounds for all N data, averaged over draws of the weights.

        Args:
            loader: batches (x, y) of all data in any order, read once.
            samples: number of draws.
            ranks: processes that take the batches in turn; all have the same loader.
        """
        if samples < 1:
            raise MarglikError(f"samples must be at least 1, got {samples}")
        seeds = [self._seed() for _ in range(samples)]
        sums = torch.zeros(samples, dtype=torch.float64)
        count = 0
        posterior = self.fixed_posterior()
        generator = torch.Generator(self.generator.device)
        with evaluating(self.model):
            for number, (x, y) in enumerate(pairs(loader)):
                x, y = self._batch(x, y)
                if ranks is None or ranks.owns(number):
                    for draw, seed in enumerate(seeds):
                        weights = posterior.sample(generator.manual_seed(seed))
                        f = self._outputs(weights, x, seed + count)
                        log_prob = self.likelihood.tempered_log_prob(f.double(), y)
                        sums[draw] += log_prob.sum().cpu()
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
        """The posterior N(m, diag(sigma^2)) as it is now."""
        weights = self.weights
        sigma = self.sigma.detach()
        deviations = {name: self.width.of(sigma, name, w) for name, w in weights.items()}
        return FixedPosterior(weights, deviations)

    def state_dict(self) -> dict[str, Any]:
        """Sigma and the state of the generator; weights, prior and likelihood are modules."""
        return {
            "raw_sigma": self.width.raw_sigma.detach().clone(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state.

        Args:
            state: from `state_dict`.
        """
        self.width.load_state_dict({"raw_sigma": state["raw_sigma"]})
        self.generator.set_state(state["generator"])

    # ------------------------------------------------------------------------------------- assembly

    def _bounds(self, sums: Tensor) -> Bounds:
        """The bounds from the log-likelihood of each draw [S]."""
        terms = divergence(self.weights, self.prior, self.width)
        variance = self._variance(terms)
        scatter = terms.scatter(variance)
        ratio = terms.log_det_ratio(variance)
        error = float(sums.std()) / math.sqrt(len(sums)) if len(sums) > 1 else None

        def evidence(kappa: float) -> Evidence:
            return Evidence(
                kappa * sums.mean().to(scatter),
                scatter,
                ratio,
                1,
                "bound" if self._is_bound(kappa) else "approximation",
                None if error is None else kappa * error,
            )

        return Bounds(evidence(1.0), evidence(self.kappa), self.kappa)

    def _is_bound(self, kappa: float) -> bool:
        """Whether J_kappa is a lower bound: p is normalised, and kappa is 1 or lowers J_kappa."""
        normalised = self.likelihood.inverse_temperature.item() == 1
        return normalised and (kappa == 1 or (kappa > 1 and self.likelihood.discrete))

    def _variance(self, terms: Divergence) -> Tensor:
        """The prior's variance v of each group [G]."""
        if self.variance == "optimal":
            return terms.optimal_variance()
        return torch.exp(-self.prior.log_precision.detach().double())

    def _mean_log_prob(
        self, weights: dict[str, nn.Parameter], noise: dict[str, Tensor], x: Any, y: Tensor
    ) -> Tensor:
        """The mean over a batch of log p(y_i | x_i, m + sigma noise) / tau."""
        f = self._outputs(self.width.perturbed(weights, noise), x)
        return self.likelihood.tempered_log_prob(f, y).mean()

    def _outputs(self, weights: dict[str, Tensor], x: Any, seed: int | None = None) -> Tensor:
        """Outputs at other weights than the network's, averaged over augmented copies."""
        if self.augment is None:
            return run(self.model, copied(x), weights)
        copies = augmented(self.augment, x, self._seed() if seed is None else seed)
        return run_averaged(self.model, copies, weights)

    def _checked_kappa(self, kappa: float | Literal["auto"], *, force: bool) -> float:
        if isinstance(kappa, str) and kappa != "auto":
            raise MarglikError(f"kappa must be a positive number or 'auto' for D/N, got {kappa!r}")
        value = self.n_weights / self.n_data if kappa == "auto" else float(kappa)
        if not 0 < value < math.inf:
            raise MarglikError(f"kappa must be a positive number or 'auto' for D/N, got {kappa!r}")
        if self.likelihood.log_temperature.requires_grad:
            raise MarglikError(
                "an ELBO grows without limit in a learned temperature; construct the likelihood "
                "without"
            )
        if value != 1 and self.likelihood.learns_noise and not force:
            raise MarglikError(
                f"kappa = {value:g} with a learned noise is ill-posed: the objective may grow "
                "without limit as the noise goes to zero. Fix it, Gaussian(sigma, "
                "learn_sigma=False), or use kappa=1; force=True allows it"
            )
        return value

    def _batch(self, x: Any, y: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets on the weights' device, refused unless they are as many."""
        x = self._placed(x)
        y = self._placed(checks.targets(y))
        lengths = [len(t) for t in tensors_of(x)]
        if not len(y) or any(n != len(y) for n in lengths):
            raise MarglikError(
                f"expected at least one datum and as many inputs as targets, got {lengths} inputs "
                f"and {len(y)} targets"
            )
        return x, y

    def _seed(self) -> int:
        device = self.generator.device
        return int(torch.randint(2**31, (), generator=self.generator, device=device))

    def _placed(self, x: Any) -> Any:
        """Inputs on the weights' device."""
        return map_inputs(lambda t: t.to(self.width.raw_sigma.device), x)
