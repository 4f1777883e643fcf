"""Priors of the weights: around zero, around the pretrained ones, or as pretraining left them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from laplace_marglik import GaussianPrior, LowRankCovariance
from ntkmarglik.programs.finetune.config import Search
from ntkmarglik.programs.finetune.pretrained import Classifier
from ntkmarglik.programs.finetune.swag import Statistics


@dataclass(frozen=True)
class PriorFamily:
    """Gaussians with one scale for the backbone, and one for the head, which is around zero.

    mean: of weights of the backbone, by parameter name; zero for all others. covariance: of the
    backbone up to its scale, by the name of the group; without one the identity.
    """

    mean: Mapping[str, Tensor] = field(default_factory=dict)
    covariance: Mapping[str, LowRankCovariance] = field(default_factory=dict)

    def at(self, model: Classifier, backbone: float, head: float) -> GaussianPrior:
        """The one with these precisions: the usual weight decays times the number of data."""
        return GaussianPrior(
            model,
            {f"{model.backbone}.*": "backbone", "*": "head"},
            {"backbone": backbone, "head": head},
            mean=self.mean,
            covariance=self.covariance,
        )


def l2_sp(model: Classifier) -> PriorFamily:
    """Around the present weights of the backbone (Li et al. 2018)."""
    prefix = f"{model.backbone}."
    return PriorFamily(
        {
            name: p.detach().clone()
            for name, p in model.named_parameters()
            if p.requires_grad and name.startswith(prefix)
        }
    )


def ptyl(statistics: Statistics, jitter: float) -> PriorFamily:
    """Around the mean of a pretraining, with its covariance (Shwartz-Ziv et al. 2022)."""
    mean, variance, deviations = (
        {f"network.{name}": tensor for name, tensor in kind.items()}
        for kind in (statistics.mean, statistics.variance, statistics.deviations)
    )
    sigma = LowRankCovariance.swag(variance, deviations, jitter)
    return PriorFamily(mean, {"backbone": sigma})


def family(search: Search, model: Classifier, statistics: Statistics | None) -> PriorFamily:
    """As configured; the model's weights must be the pretrained ones.

    statistics: of the pretraining, which only `ptyl` needs.
    """
    if search.prior == "l2-zero":
        return PriorFamily()
    if search.prior == "l2-sp":
        return l2_sp(model)
    assert statistics is not None
    return ptyl(statistics, search.prior_jitter)
