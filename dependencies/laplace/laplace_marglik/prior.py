"""Gaussian priors over weights with one learnable precision per group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asdl_marglik import Groups, matches, trainable
from laplace_marglik.checks import LARGEST_LOG, positive_integer
from laplace_marglik.errors import MarglikError
from laplace_marglik.variational.covariance import LowRankCovariance

Structure = Literal["scalar", "layerwise", "diagonal"]
NAMED = 20  # group names in an error message, at most
SHOWN = 6  # and in the prior's own text


class GaussianPrior(nn.Module):
    """w ~ N(mean, Sigma / precision), the precision shared within groups of weights.

    `log_precision` [G] is the parameter to learn, groups in the order of
    `model.named_parameters()`. Sigma = I for groups without a covariance.

    Args:
        model: the network; its parameters that require grad are the weights.
        structure: "scalar" (one group), "layerwise" (one per parameter tensor), "diagonal" (one per
            element), or a mapping from name patterns to group names, of which the first that fits
            decides: {"head.*": "head", "*": "body"}.
        precision: initial precision, a number for all groups or a mapping from group names.
        groups: in place of a structure, one group for each name pattern with its initial precision
            (None: `precision`); every weight must fit exactly one pattern:
            {"backbone.*": 1.0, "head.*": None}.
        mean: a number, a mapping from parameter names to tensors shaped as the weights (others have
            mean zero), or "current" for the weights as they are now (L2-SP).
        covariance: Sigma of some groups by group name, as of pretrained weights; for variational
            objectives and `penalty` only, curvature needs independent weights.
        hyper: name patterns of parameters that are not weights.
    """

    log_precision: nn.Parameter

    def __init__(
        self,
        model: nn.Module,
        structure: Structure | Mapping[str, str] = "layerwise",
        precision: float | Mapping[str, float] = 1.0,
        *,
        groups: Mapping[str, float | None] | None = None,
        mean: float | Mapping[str, Tensor] | Literal["current"] = 0.0,
        covariance: Mapping[str, LowRankCovariance] | None = None,
        hyper: Iterable[str] = (),
    ):
        super().__init__()
        weights = trainable(model, hyper)
        if not weights:
            raise MarglikError(
                "the model has no parameters that require grad; unfreeze some or name fewer as "
                "hyper"
            )
        if groups is not None:
            structure, precision = _exclusive(groups, structure, precision, weights)
        self.groups: Groups
        self.group_names: list[str]
        self.groups, self.group_names = groups_of(structure, weights)
        self.covariance = _covariance(covariance or {}, self.groups, self.group_names, weights)
        first = next(iter(weights.values()))
        log_precision = _initial_log_precision(precision, self.group_names, first)
        self.log_precision = nn.Parameter(log_precision)
        self.means = _Means(_means(mean, weights))

    def __repr__(self) -> str:
        values = self.precision.detach().double().tolist()
        spread = f"precision {min(values):.4g}"
        if max(values) > min(values):
            spread += f" to {max(values):.4g}"
        text = f"{len(self.groups)} weights, {len(values)} groups, {spread}"
        names = dict.fromkeys(self.group_names)
        if 1 < len(names) == len(values):  # not a group for each element
            pairs = [f"{n}={v:.4g}" for n, v in zip(names, values, strict=True)][:SHOWN]
            text += ": " + ", ".join(pairs) + (", ..." if len(values) > SHOWN else "")
        if any(True for _ in self.means.buffers()):
            text += "; around means"
        return f"GaussianPrior({text})"

    @property
    def precision(self) -> Tensor:
        """The precision of each group [G]."""
        return self.log_precision.exp()

    def precisions(self) -> dict[str, Tensor]:
        """The precision of each weight by name: a scalar, or one value per element [numel]."""
        log_precision = self.log_precision.detach()
        return {name: log_precision[group].exp() for name, group in self.groups.items()}

    def mean_of(self, name: str) -> Tensor | float:
        """The mean of a weight: a tensor shaped as the weight, or a number.

        Args:
            name: of the parameter.
        """
        return self.means.of(name)

    def check(self, weights: Mapping[str, Tensor], hyper: Iterable[str] = ()) -> None:
        """Refuse weights that the prior was not built for.

        Args:
            weights: tensors by parameter name.
            hyper: names of hyperparameters, none of which may be a weight of the prior.
        """
        conflicts = [name for name in hyper if name in self.groups]
        if conflicts:
            raise MarglikError(
                f"{conflicts[0]!r} is a hyperparameter of the objective but a weight of the prior; "
                "give the prior the same patterns, GaussianPrior(model, ..., hyper=...)"
            )
        for name, w in weights.items():
            if name not in self.groups:
                raise MarglikError(
                    f"the prior has no group for {name!r}; build it for this model, with the same "
                    "hyper patterns, after freezing or unfreezing parameters"
                )
            group = self.groups[name]
            if isinstance(group, int):
                continue
            entries = group.stop - group.start
            if entries != w.numel():
                raise MarglikError(
                    f"the prior has {entries} precisions for {name!r}, which has {w.numel()} "
                    "entries; build it for this model"
                )

    def check_independent(self) -> None:
        """Refuse a prior with a covariance, where its weights have to be independent."""
        if self.covariance:
            named = [self.group_names[number] for number in self.covariance]
            raise MarglikError(
                "curvature and weight decay need a prior of independent weights, but the groups "
                f"{named} have a covariance; drop covariance=, or use DataEmphasizedELBO"
            )

    def check_precision(self) -> None:
        """Refuse precisions that overflow: the evidence would mean nothing."""
        values = self.log_precision.detach()
        if values.abs().max().item() <= LARGEST_LOG:  # False for NaN
            return
        entry = int((~(values.abs() <= LARGEST_LOG)).nonzero()[0])
        raise MarglikError(
            f"the log precision of group {self.group_names[entry]!r} is {float(values[entry]):g} "
            f"(NaN or beyond {LARGEST_LOG:g}), which overflows; learn the prior with a smaller "
            "step, or limit it"
        )

    def weight_decay(
        self, n_data: int, model: nn.Module | None = None
    ) -> dict[str, float] | list[dict[str, Any]]:
        """What was learned as the `weight_decay` of a plain SGD or AdamW: precision / N.

        Args:
            n_data: size N of the training set; the loss is a mean over data.
            model: if given, parameter groups of its weights for a torch optimiser, instead of the
                decay of each weight by name.
        """
        n_data = positive_integer("n_data", n_data)
        self.check_independent()
        decays = {}
        for name, precision in self.precisions().items():
            if precision.numel() > 1:
                raise MarglikError(
                    f"{name!r} has a precision for each of its elements, which no weight_decay of "
                    "an optimiser can express; use a scalar or layerwise prior"
                )
            mean = self.mean_of(name)
            if bool(torch.as_tensor(mean).any()):
                raise MarglikError(
                    f"the prior mean of {name!r} is not zero, and weight decay pulls to zero; "
                    "use EvidenceLearner.attach, which pulls to the mean"
                )
            decays[name] = precision.item() / n_data
        if model is None:
            return decays
        weights = dict(model.named_parameters())
        groups: dict[float, list[Tensor]] = {}
        for name, decay in decays.items():
            groups.setdefault(decay, []).append(weights[name])
        return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]

    def pulls(self, weights: Mapping[str, Tensor], n_data: int) -> dict[str, Tensor]:
        """The gradient of penalty / 2N in each weight, precision * (w - mean) / N.

        Weights of half precision have it in single precision, in which it does not vanish.

        Args:
            weights: tensors by parameter name.
            n_data: size N of the training set.
        """
        self.check_independent()
        # a part of every training step: few operations, and one for all weights together
        with torch.no_grad():
            precision = self.log_precision.exp() / n_data
            shared = precision.unbind()
            deviations, scales = [], []
            for name, w in self.deviations(weights).items():
                w = w.float() if w.dtype.itemsize < 4 else w
                group = self.groups[name]
                scale = shared[group] if isinstance(group, int) else precision[group].view(w.shape)
                deviations.append(w)
                scales.append(scale.to(w))
            return dict(zip(weights, torch._foreach_mul(deviations, scales), strict=True))

    def deviations(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """w - mean of each weight.

        Args:
            weights: tensors by parameter name.
        """
        self.check(weights)
        if self.means.zero:  # the usual case, asked for in every training step
            return dict(weights)
        deviations = {}
        for name, w in weights.items():
            mean = self.mean_of(name)
            if isinstance(mean, Tensor):
                deviations[name] = w - mean.to(w)
            else:
                deviations[name] = w - mean if mean else w
        return deviations

    def squares(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Sum of (w - mean)^2 for each entry of the precision [G], in float64, as a constant.

        Args:
            weights: tensors by parameter name.
        """
        self.check_independent()
        squares = torch.zeros_like(self.log_precision, dtype=torch.float64, requires_grad=False)
        for name, deviation in self.deviations(weights).items():
            group = self.groups[name]
            deviation = deviation.detach()
            if isinstance(group, int):
                norm = torch.linalg.vector_norm(deviation, dtype=torch.float64)
                squares[group] += norm.square()
            else:
                squares[group] += deviation.double().square().flatten()
        return squares

    def scatter(self, squares: Tensor) -> Tensor:
        """(w - mean)^T P0 (w - mean), differentiable in the precision but not in the weights.

        Args:
            squares: sums of (w - mean)^2 for each entry of the precision [G], from `squares`.
        """
        return torch.dot(self.log_precision.double().exp(), squares)

    def penalty(self, weights: Mapping[str, Tensor]) -> Tensor:
        """(w - mean)^T P0 (w - mean), differentiable in the weights but not in the precision.

        P0 = precision * Sigma^-1 in groups with a covariance.

        Args:
            weights: tensors by parameter name.
        """
        precision = self.log_precision.detach().exp()
        deviations = self.deviations(weights)
        like = next(iter(deviations.values()))
        terms = [
            (precision[number] * sigma.quadratic(deviations)).to(like.dtype)
            for number, sigma in self.covariance.items()
        ]
        shared: dict[str, int] = {}  # weights whose entries have one precision
        for name, deviation in deviations.items():
            group = self.groups[name]
            if not isinstance(group, int):
                scale = precision[group].to(deviation.dtype)
                terms.append((scale * deviation.square().flatten()).sum())
            elif group not in self.covariance:
                shared[name] = group
        if shared:
            scales = precision[list(shared.values())].to(like.dtype)
            terms.append(ScaledSquares.apply(scales, *(deviations[name] for name in shared)))
        return torch.stack(terms).sum()


class ScaledSquares(torch.autograd.Function):
    """sum_l scale_l |w_l|^2, which is part of every training step, as one node of the graph.

    For a small network, nodes for each of its tensors would take a tenth of the step.
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(scales: Tensor, *weights: Tensor) -> Tensor:
        """The sum.

        Args:
            scales: of the weights [L].
            weights: L tensors.
        """
        norms = torch.stack(torch._foreach_norm(weights))
        return (scales * norms.square()).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep what the gradient needs.

        Args:
            ctx: of autograd.
            inputs: scales and weights.
            output: the sum.
        """
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the weights, which can be differentiated again.

        Args:
            ctx: of autograd.
            cotangents: that of the sum.
        """
        scales, *weights = ctx.saved_tensors
        factors = (2 * cotangents[0] * scales).unbind()
        return None, *(w * factor for w, factor in zip(weights, factors, strict=True))


def groups_of(
    structure: Structure | Mapping[str, str], weights: Mapping[str, Tensor]
) -> tuple[Groups, list[str]]:
    """The entries of a vector that belong to each weight, and the name of every entry.

    Args:
        structure: as in `GaussianPrior`.
        weights: tensors by parameter name.
    """
    if isinstance(structure, Mapping):
        return _groups_by_pattern(structure, weights)
    if structure == "scalar":
        return dict.fromkeys(weights, 0), ["all"]
    if structure == "layerwise":
        return {name: i for i, name in enumerate(weights)}, list(weights)
    if structure == "diagonal":
        groups: dict[str, int | slice] = {}
        names: list[str] = []
        for name, w in weights.items():
            start = len(names)
            groups[name] = slice(start, start + w.numel())
            names.extend([name] * w.numel())
        return groups, names
    raise MarglikError(
        f"structure must be scalar, layerwise, diagonal or a mapping of patterns, got {structure!r}"
    )


def _groups_by_pattern(
    patterns: Mapping[str, str], weights: Mapping[str, Tensor]
) -> tuple[Groups, list[str]]:
    """The first pattern that fits a weight's name gives its group."""
    group_of = {}
    for name in weights:
        fitting = [group for pattern, group in patterns.items() if matches(name, [pattern])]
        if not fitting:
            raise MarglikError(
                f"no pattern of {list(patterns)} fits the weight {name!r}; add one, or '*' for "
                "the rest"
            )
        group_of[name] = fitting[0]
    names = list(dict.fromkeys(group_of.values()))
    return {name: names.index(group) for name, group in group_of.items()}, names


def _exclusive(
    groups: Mapping[str, float | None],
    structure: Structure | Mapping[str, str],
    precision: float | Mapping[str, float],
    weights: Mapping[str, Tensor],
) -> tuple[dict[str, str], dict[str, float]]:
    """Groups named by their patterns, as a structure and initial precisions."""
    if structure != "layerwise":
        raise MarglikError(
            f"give either groups or a structure, got both: {list(groups)} and {structure!r}"
        )
    if isinstance(precision, Mapping):
        raise MarglikError(
            "with groups, initial precisions are their values; precision must be a number"
        )
    for name in weights:
        fitting = [pattern for pattern in groups if matches(name, [pattern])]
        if len(fitting) != 1:
            fits = f"fits {fitting}" if fitting else f"fits none of {list(groups)}"
            raise MarglikError(
                f"every weight must fit exactly one pattern of groups, but {name!r} {fits}"
            )
    for pattern in groups:
        if not any(matches(name, [pattern]) for name in weights):
            raise MarglikError(
                f"the pattern {pattern!r} of groups fits no weight; weights are {list(weights)}"
            )
    by_name = {pattern: pattern for pattern in groups}
    precisions = {
        pattern: precision if value is None else value for pattern, value in groups.items()
    }
    return by_name, precisions


def _covariance(
    covariance: Mapping[str, LowRankCovariance],
    groups: Groups,
    names: list[str],
    weights: Mapping[str, Tensor],
) -> dict[int, LowRankCovariance]:
    """Covariances by the number of their group, which they must cover."""
    by_number = {}
    for group, sigma in covariance.items():
        # groups of single elements share the name of their weight and have no covariance
        number = names.index(group) if names.count(group) == 1 else None
        members = [name for name, other in groups.items() if other == number]
        shapes = {name: tuple(d.shape) for name, d in sigma.diagonal.items()}
        expected = {name: tuple(weights[name].shape) for name in members}
        if number is None or not members or shapes != expected:
            raise MarglikError(
                f"the covariance of group {group!r} must be of its weights {members} and shaped "
                f"as they are, got {shapes}; groups are {names[:NAMED]}"
            )
        by_number[number] = sigma
    return by_number


def _initial_log_precision(
    precision: float | Mapping[str, float], names: list[str], like: Tensor
) -> Tensor:
    """The log of the initial precision of each group [G]."""
    missing = [n for n in names if isinstance(precision, Mapping) and n not in precision]
    if missing:
        raise MarglikError(
            f"no initial precision for group {missing[0]!r}; the groups are "
            f"{list(dict.fromkeys(names))}"
        )
    values = [precision[n] if isinstance(precision, Mapping) else precision for n in names]
    in_range = [v > 0 and math.isfinite(v) and abs(math.log(v)) <= LARGEST_LOG for v in values]
    if not all(in_range):
        raise MarglikError(
            f"prior precision must be positive and between exp(-{LARGEST_LOG:g}) and "
            f"exp({LARGEST_LOG:g}), got {precision}"
        )
    dtype = torch.promote_types(like.dtype, torch.float32)  # steps would vanish in half precision
    return torch.tensor([math.log(v) for v in values], dtype=dtype, device=like.device)


def _means(
    mean: float | Mapping[str, Tensor] | str, weights: Mapping[str, Tensor]
) -> dict[str, Tensor | float]:
    """The prior mean of each weight by name."""
    if isinstance(mean, str):
        if mean != "current":
            raise MarglikError(
                f"mean must be a number, a mapping of tensors or 'current', got {mean!r}"
            )
        return {name: w.detach().clone() for name, w in weights.items()}
    if not isinstance(mean, Mapping):
        return dict.fromkeys(weights, float(mean))
    unknown = [name for name in mean if name not in weights]
    if unknown:
        raise MarglikError(
            f"prior mean given for {unknown[0]!r}, which is not a weight; weights are "
            f"{list(weights)}"
        )
    return {name: m.detach().clone() for name, m in mean.items()}


class _Means(nn.Module):
    """The mean of each weight, as buffers: part of the prior's state, and moved with it."""

    def __init__(self, means: Mapping[str, Tensor | float]):
        super().__init__()
        for name, mean in means.items():
            if isinstance(mean, Tensor) or mean:
                self.register_buffer(_buffer(name), torch.as_tensor(mean))

    @property
    def zero(self) -> bool:
        """Whether that of every weight is zero."""
        return not self._buffers

    def of(self, name: str) -> Tensor | float:
        return self._buffers.get(_buffer(name), 0.0)  # type: ignore[return-value]


def _buffer(name: str) -> str:
    """A parameter's name as that of a buffer, which must not have dots."""
    return name.replace(".", "/")
