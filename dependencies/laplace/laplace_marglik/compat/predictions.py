"""Predictions and samples of a fitted Laplace approximation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from asdl_marglik import evaluating, map_inputs
from laplace_marglik import checks
from laplace_marglik.compat.evidence import FitEvidence
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood import Categorical
from laplace_marglik.posterior.link import bridge, samples_of
from laplace_marglik.posterior.sampled.predictive import monte_carlo

LINKS = ("probit", "mc", "bridge", "bridge_norm")


class ParametricLaplace(FitEvidence):
    """A Laplace approximation of the posterior of a network's weights; arguments are of `Fit`."""

    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The predictive: class probabilities [n, C], or mean and variance of f for regression.

        The variance is [n, C, C], without the noise; with `joint` the mean is [n C] and the
        covariance [n C, n C].

        Args:
            x: inputs [n, ...].
            pred_type: "glm" (linearised network) or "nn" (samples of the weights in the network).
            joint: covariances between inputs, for regression.
            link_approx: "probit", "mc", "bridge" or "bridge_norm".
            n_samples: number of samples where there are any.
            diagonal_output: only the variances of single outputs.
            generator: source of samples.
            fitting: accepted, without effect.
        """
        checks.one_of("pred_type", pred_type, ("glm", "nn"))
        checks.one_of("link_approx", link_approx, LINKS)
        if pred_type == "nn":
            if link_approx != "mc":
                raise MarglikError("pred_type='nn' needs link_approx='mc'")
            samples = self.predictive_samples(x, "nn", n_samples, generator=generator)
            return (samples.mean(0), samples.var(0)) if self._regression else samples.mean(0)
        if self._regression:
            return self._regression_prediction(x, joint, diagonal_output)
        f, covariance = self._functional(x)
        return self._linked(f, covariance, link_approx, n_samples, diagonal_output, generator)

    predictive = __call__

    def _regression_prediction(self, x: Any, joint: bool, diagonal: bool) -> tuple[Tensor, Tensor]:
        f, covariance = self._functional(x, joint=joint)
        if joint:
            return f.flatten(), covariance
        return f, covariance.diagonal(dim1=1, dim2=2) if diagonal else covariance

    def _functional(self, x: Any, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the outputs, in the dtype of the network."""
        if not self.enable_backprop:
            x = map_inputs(lambda t: t.detach(), x)
        with torch.set_grad_enabled(self.enable_backprop):
            f, covariance = self._native().functional(x, joint=joint)
        return f.to(self._like.dtype), covariance.to(self._like.dtype)

    def _linked(
        self,
        f: Tensor,
        covariance: Tensor,
        link: str,
        n_samples: int,
        diagonal: bool,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Predictions from Gaussian outputs."""
        if link == "mc":
            samples = self._samples(f, covariance, n_samples, diagonal, generator)
            return monte_carlo(self._likelihood, samples)
        if link == "probit":
            variance = covariance.diagonal(dim1=1, dim2=2).clamp_min(0).reshape(f.shape)
            return self._likelihood.predict_probit(f, variance)
        if not isinstance(self._likelihood, Categorical):
            raise MarglikError(
                "the Laplace bridge is for class probabilities; use link_approx='mc'"
            )
        return bridge(f, covariance, normalised=link == "bridge_norm")

    def _samples(
        self,
        f: Tensor,
        covariance: Tensor,
        n_samples: int,
        diagonal: bool,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Samples [k, n, C] of Gaussian outputs."""
        if diagonal:
            covariance = torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
        return samples_of(f, covariance, n_samples, _source(generator))

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Samples [n_samples, n, C] of the outputs.

        Args:
            x: inputs [n, ...].
            pred_type: "glm" or "nn".
            n_samples: number of samples.
            diagonal_output: outputs of one input as if they were independent.
            generator: source of the samples.
        """
        checks.one_of("pred_type", pred_type, ("glm", "nn"))
        if pred_type == "nn":
            return self._network_samples(x, n_samples, generator)
        f, covariance = self._functional(x)
        return self._samples(f, covariance, n_samples, diagonal_output, generator)

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Samples [n_samples, n, C] of predictions: probabilities, or outputs of a regression.

        Args:
            x: inputs [n, ...].
            pred_type: "glm" or "nn".
            n_samples: number of samples.
            diagonal_output: outputs of one input as if they were independent.
            generator: source of the samples.
        """
        samples = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return torch.stack([self._likelihood.predict(f) for f in samples])

    def _network_samples(self, x: Any, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """Outputs [k, n, C] of the network itself with sampled weights."""
        samples = self._native().sample(n_samples, _source(generator))
        x = self._native().setting.placed(x)
        outputs = []
        with torch.set_grad_enabled(self.enable_backprop), evaluating(self.model):
            for k in range(n_samples):
                weights = {name: draws[k] for name, draws in samples.items()}
                outputs.append(functional_call(self.model, weights, (x,)))
        return torch.stack(outputs)

    def functional_variance(self, Js: Tensor) -> Tensor:
        """J Sigma J^T [n, C, C] of Jacobians [n, C, P]."""
        return self._native().of_jacobians(Js).to(Js.dtype)

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """J Sigma J^T [n C, n C] of Jacobians [n, C, P]."""
        return self._native().of_jacobians(Js, joint=True).to(Js.dtype)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Samples [n_samples, P] of the weights.

        Args:
            n_samples: number of samples.
            generator: source of the noise.
        """
        samples = self._native().sample(n_samples, _source(generator))
        return torch.cat([draws.flatten(1) for draws in samples.values()], 1)


def _source(generator: torch.Generator | None) -> torch.Generator:
    """A given source of noise, or a new one, seeded from the global one as laplace-torch's is."""
    if generator is not None:
        return generator
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))
