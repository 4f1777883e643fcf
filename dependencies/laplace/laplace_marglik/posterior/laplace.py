"""The Laplace posterior of a network and its predictions.

Weights are N(w, Sigma) around the network's weights w, Sigma^-1 = P0 + H with the curvature H of
the training data in some structure, and outputs are linear in them (Immer et al. 2021):

    f(x) ~ N(f(x; w), J(x) Sigma J(x)^T)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from asdl_marglik import (
    ONE_AT_A_TIME,
    Chunk,
    GraphChunk,
    Plan,
    PlanChanged,
    Selection,
    augmented,
    check_finite,
    checksum,
    constant_besides,
    evaluating,
    map_inputs,
    seeded,
    taken,
    tensors_of,
)
from asdl_marglik.passes.memory import CHUNK_BYTES, LARGEST_CHUNK
from asdl_marglik.watch.model import finite
from laplace_marglik import checks
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.block import status_of
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.gradient_rows import is_gradient
from laplace_marglik.likelihood import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from laplace_marglik.posterior.covariance import (
    Covariance,
    GivenRows,
    Unfactored,
    from_state,
)
from laplace_marglik.posterior.curvature import Curvature, Loader, Setting, curvature_of
from laplace_marglik.posterior.link import KINDS, Kind, bridge_of, samples_of
from laplace_marglik.posterior.sampled.layout import Layout
from laplace_marglik.posterior.sampled.linearised import Linearised
from laplace_marglik.posterior.sampled.predictive import joint_log_prob, monte_carlo
from laplace_marglik.prior import GaussianPrior

VERSION = 1  # of the layout of a state


class LaplacePosterior:
    """N(w, Sigma) of a network's weights, and what it says about outputs.

    Made by `MarginalLikelihood.posterior`. Outputs and covariances are in float64, whatever the
    network is; nothing has a graph unless the inputs require grad.

    Args:
        setting: model, weights, likelihood, structure and data.
        prior: precisions and means of the weights; its values of the time of `fit` count. None for
            a posterior that is settled from outside.
        generator: source of samples.
    """

    def __init__(
        self,
        setting: Setting,
        prior: GaussianPrior | None,
        generator: torch.Generator | None = None,
    ):
        likelihood = copy.deepcopy(setting.likelihood).requires_grad_(False)
        self.setting = replace(setting, likelihood=likelihood)
        self.generator = generator or torch.Generator().manual_seed(setting.seed)
        self.curvature: Curvature | None = None
        self._prior = prior
        self._covariances: list[Covariance] | None = None
        self._evidence: Evidence | None = None
        self._plan: Plan | None = None
        self._example: Any = None
        self._checksum: Tensor | None = None
        self._draws: Tensor | None = None

    # ------------------------------------------------------------------------------------------ fit

    def fit(self, loader: Loader) -> LaplacePosterior:
        """Fit Sigma to the training data, at the weights and hyperparameters of now.

        Args:
            loader: all training data in batches (x, y), in any order; read once.
        """
        assert self._prior is not None
        self._prior.check_precision()
        self.likelihood.check_scales()
        log_precision = self._prior.log_precision.detach().double()
        with torch.no_grad():
            scale = self.setting.curvature_scale
        curvature = curvature_of(self.setting, loader, scale, log_precision)
        return self.settle(curvature, log_precision, self._prior.squares(self.setting.weights))

    @torch.no_grad()
    def settle(
        self, curvature: Curvature, log_precision: Tensor, squares: Tensor
    ) -> LaplacePosterior:
        """Take over a curvature, for the likelihood's present scale and some prior.

        Args:
            curvature: of the training data.
            log_precision: of the prior's groups, in float64.
            squares: sums of (w - mean)^2 for each of them.
        """
        scale = self.setting.curvature_scale
        self.curvature = curvature
        self._covariances = curvature.covariances(scale, log_precision)
        scatter = (log_precision.exp() * squares).sum()
        self._evidence = self._evidence_of(curvature, scale, log_precision, scatter)
        self._plan = curvature.plan
        self._example = curvature.x
        self._checksum = self._sum_of_weights()
        self._draws = None
        return self

    def _evidence_of(
        self, curvature: Curvature, scale: Tensor, log_precision: Tensor, scatter: Tensor
    ) -> Evidence:
        structure = self.setting.structure
        n_data = len(curvature.y)
        log_prob = self.likelihood.tempered_log_prob(curvature.f, curvature.y)
        true_root = not is_gradient(self.setting.root)
        status = status_of(structure, true_root, everything=True)
        return Evidence(
            log_likelihood=log_prob.sum(),
            scatter=scatter,
            log_det_ratio=curvature.log_det_ratio(scale, log_precision),
            n_blocks=1,
            status="approximation" if self.setting.inducing is not None else status,
            n_data=n_data,
        )

    @property
    def likelihood(self) -> Likelihood:
        """Of the data, with the noise and temperature at the time of `fit`."""
        return self.setting.likelihood

    @property
    def log_evidence(self) -> Evidence:
        """The log marginal likelihood of the training data, from the same statistics.

        With inducing rows its log-determinant is that of these rows alone, which is too small.
        """
        self._fitted()
        assert self._evidence is not None
        return self._evidence

    @property
    def conservative(self) -> bool:
        """Whether variances are given some of the data's rows only: never below those given all."""
        return self.setting.inducing is not None

    @property
    def mean(self) -> dict[str, Tensor]:
        """The mean of the weights: those of the network."""
        return {name: w.detach().clone() for name, w in self.setting.weights.items()}

    def _fitted(self) -> list[Covariance]:
        """The covariances, if there are any and the network is still where they were fitted."""
        if self._covariances is None:
            raise MarglikError(
                "the posterior has not been fitted; call fit(loader) with the training data, or "
                "load_state_dict"
            )
        if not all(w.requires_grad for w in self.setting.weights.values()):
            raise MarglikError(
                "some of the weights that the posterior is of were frozen after the fit; unfreeze "
                "them, or fit a posterior of the others"
            )
        assert self._checksum is not None
        if not torch.equal(self._sum_of_weights(), self._checksum):
            raise MarglikError(
                "the network's parameters have changed since the posterior was fitted around "
                "them; call fit(loader) again"
            )
        return self._covariances

    def _sum_of_weights(self) -> Tensor:
        return checksum(self.setting.model.parameters())

    # ------------------------------------------------------------------------------------- outputs

    def functional(self, x: Any, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean f [n, ...] and covariance of the outputs, in float64.

        The covariance is [n, C, C], of the C outputs of each input, or with `joint` [n C, n C], of
        all outputs together.

        Args:
            x: inputs [n, ...].
            joint: covariances between inputs, too.
        """
        covariances = self._fitted()
        x = self._checked(x)
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of(x))
        if joint:
            self._check_joint(len(tensors_of(x)[0]), covariances)
        with torch.set_grad_enabled(graph):
            if joint:
                chunks = list(self._chunks(x, covariances, graph=graph))
                f = torch.cat([chunk.f for chunk in chunks])
                total = _sum([c.of_all_outputs(chunks) for c in covariances])
            else:
                pairs = [
                    (chunk.f, _sum([c.of_outputs(chunk) for c in covariances]))
                    for chunk in self._chunks(x, covariances, graph=graph)
                ]
                f, total = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        assert self._plan is not None
        f = f if graph else f.detach()
        return f.double().reshape(-1, *self._plan.output_shape), total

    def of_jacobians(self, J: Tensor, joint: bool = False) -> Tensor:
        """The covariance of outputs with given Jacobians, [n, C, C] or with `joint` [n C, n C].

        Args:
            J: [n, C, P], weights in the order of `mean`.
            joint: covariances between inputs, too.
        """
        covariances = self._fitted()
        size = sum(w.numel() for w in self.setting.weights.values())
        if J.dim() != 3 or J.shape[2] != size:
            raise MarglikError(f"expected Jacobians [n, C, {size}], got {tuple(J.shape)}")
        given = GivenRows(J, self.setting.shapes)
        if joint:
            return _sum([c.of_all_outputs([given]) for c in covariances])
        return _sum([c.of_outputs(given) for c in covariances])

    def _checked(self, x: Any) -> Any:
        """Inputs where the model is, if they are like those of the training data."""
        x = self.setting.placed(x)
        found, known = _described(x), _described(self._example)
        expected = {name: (dims, dtype) for name, dims, _, dtype in known}
        # a mapping may have fewer entries, as without its targets: the model says what it needs
        present = [
            (expected[name], (dims, dtype)) for name, dims, _, dtype in found if name in expected
        ]
        alike = present and all(before == now for before, now in present)
        if not alike or any(not len(t) for t in tensors_of(x)):
            raise MarglikError(
                f"expected inputs like those the posterior was fitted on, {_shown(known)}, and at "
                f"least one of them, got {_shown(found)}; convert shape and dtype"
            )
        return x

    def _chunks(
        self, x: Any, covariances: Sequence[Covariance], *, graph: bool = False
    ) -> Iterator[Chunk]:
        """Passes over the inputs with a cotangent for every output, as many as fit at a time."""
        model = self.setting.model
        # with a graph, parameters may be differentiated in, too
        leaves = model.parameters() if graph else self.setting.weights.values()
        with (
            ONE_AT_A_TIME,
            evaluating(model),
            constant_besides(leaves, model),
            seeded(self.setting.seed, self.setting.device),
        ):
            copies = self._copies(x, graph=graph)
            n, step = len(tensors_of(x)[0]), self._inputs_at_once(copies, covariances)
            known: list[Tensor] = []
            for start in range(0, n, step):
                chunk = self._recorded(taken(copies, slice(start, start + step)), graph=graph)
                known.append(finite(chunk.x))
                check_finite(known, chunk.f.detach(), model, lambda: [x])
                yield chunk

    def _copies(self, x: Any, *, graph: bool) -> Any:
        """Augmented copies [n, A, ...] of inputs."""
        augment = self.setting.augment
        with torch.set_grad_enabled(graph):
            if augment is None:
                return map_inputs(lambda t: (t if graph else t.detach()).unsqueeze(1), x)
            return augmented(augment, x, self.setting.seed)

    def _recorded(self, copies: Any, *, graph: bool) -> Chunk:
        """The pass of some inputs [n, A, ...]; planned anew if the model takes another path."""
        assert self._plan is not None
        for attempt in range(2):
            try:
                with torch.enable_grad():
                    selection = self._selection(len(tensors_of(copies)[0]), self._plan)
                    if graph:
                        return GraphChunk(self._plan, copies, selection)
                    chunk = Chunk(self._plan, copies, selection)
                    chunk.drop_graph()
                    return chunk
            except PlanChanged:
                if attempt:
                    raise MarglikError(
                        "the model uses its weights differently from one input to the next "
                        "(data-dependent control flow); predict such inputs one at a time"
                    ) from None
                self._plan = self.setting.planned(map_inputs(lambda t: t[:, 0], copies))
            except (RuntimeError, KeyError) as error:
                expected = _shown(_described(self._example))
                raise MarglikError(
                    f"the model does not run on these inputs ({error}); expected inputs like "
                    f"those the posterior was fitted on, {expected}"
                ) from error
        raise AssertionError

    def _selection(self, n: int, plan: Plan) -> Selection:
        """Every output of every input."""
        c = plan.output_shape.numel()
        columns = torch.arange(c, device=self.setting.device).expand(n, -1)
        return Selection(_EachOutput(), columns, columns)

    def _inputs_at_once(self, copies: Any, covariances: Sequence[Covariance]) -> int:
        """Inputs of a chunk: their activations, cotangents and features fit into the budget."""
        assert self._plan is not None
        c, a = self._plan.output_shape.numel(), tensors_of(copies)[0].shape[1]
        inputs, outputs = self._plan.bytes_of_uses
        features = c * self._bytes_per_output(covariances, a)
        per_input = a * (self._plan.bytes_per_input + inputs + c * outputs) + features
        room = min(CHUNK_BYTES, self.setting.budget.allowed)
        size = self.setting.budget.chunk or int(min(max(1, room // per_input), LARGEST_CHUNK))
        return max(1, size // (a if self.setting.budget.chunk else 1))

    def _bytes_per_output(self, covariances: Sequence[Covariance], copies: int) -> int:
        """Bytes for one output of one input, beside the pass itself."""
        assert self._plan is not None
        element = next(iter(self.setting.weights.values())).element_size()
        largest = max(c.numbers_per_output(self._plan, copies) for c in covariances)
        return element * largest

    def _check_joint(self, n: int, covariances: Sequence[Covariance]) -> None:
        """Refuse covariances between more inputs than fit into the budget."""
        assert self._plan is not None
        c = self._plan.output_shape.numel()
        unfactored = Unfactored()  # covariances between inputs are made of rows
        features = 8 * max(c.numbers_per_output(unfactored, 1) for c in covariances)
        fixed = self._plan.bytes_per_input + sum(self._plan.bytes_of_uses) * c + c * features
        allowed = self.setting.budget.allowed
        needed = n * fixed + 3 * 8 * (n * c) ** 2
        if needed > allowed:
            fitting = int(((fixed**2 + 96 * c**2 * allowed) ** 0.5 - fixed) / (48 * c**2))
            raise MarglikError(
                f"the joint covariance of {n} inputs with {c} outputs each needs about "
                f"{needed / 1e9:.2g} GB, and {allowed / 1e9:.2g} GB may be used (memory_budget); "
                f"ask for at most {fitting} inputs at a time, or use joint=False"
            )

    # ------------------------------------------------------------------------------------- samples

    def sample(self, k: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """k samples [k, *shape] of each weight by name, in the dtype of the network.

        Args:
            k: number of samples.
            generator: source of the noise; by default that of the posterior.
        """
        deviations = self._deviations(k, generator)
        weights = self.setting.weights
        return {
            name: weights[name].detach() + z.to(weights[name]) for name, z in deviations.items()
        }

    def _deviations(self, k: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Samples of w - mean [k, *shape] by name, in float64."""
        covariances = self._fitted()
        k = checks.positive_integer("the number of samples", k)
        generator = generator or self.generator
        drawn: dict[str, Tensor] = {}
        for covariance in covariances:
            drawn |= covariance.sample(k, generator)
        return {name: drawn[name] for name in self.setting.weights}

    def sample_outputs(
        self, x: Any, k: int = 100, generator: torch.Generator | None = None
    ) -> Tensor:
        """Outputs f + J z_j [k, n, ...] of the linearised network for k samples of its weights.

        One set of samples serves all inputs, of this call and of later ones: functions of x. With
        a generator they are drawn anew.

        Args:
            x: inputs [n, ...].
            k: number of samples.
            generator: source of the noise.
        """
        layout = Layout(self.setting.weights, dict.fromkeys(self.setting.weights, 0), 1)
        if generator is not None or self._draws is None or len(self._draws) < k:
            deviations = self._deviations(k, generator)
            self._draws = torch.cat([z.flatten(1) for z in deviations.values()], 1)
        x = self._checked(x)
        self._fitted()
        copies = self._copies(x, graph=False)
        n, a = tensors_of(copies)[0].shape[:2]
        like = next(iter(self.setting.weights.values()))
        flat = map_inputs(lambda t: t.flatten(0, 1), copies)
        with seeded(self.setting.seed, self.setting.device):
            linear = Linearised(self.setting.model, layout, self._draws_at_once(n * a, k))
            try:
                f, pushed = linear.jvp(flat, self._draws[:k].to(like.dtype))
            except (NotImplementedError, RuntimeError):  # an operation without forward mode
                return self._outputs_by_rows(x, self._draws[:k].to(like.dtype))
        f = f.unflatten(0, (n, a)).mean(1).double()
        return f + pushed.unflatten(1, (n, a)).mean(2).double()

    def _outputs_by_rows(self, x: Any, draws: Tensor) -> Tensor:
        """Outputs f + J z_j [k, n, ...] from the rows of J, for samples z [k, P]."""
        covariances = self._fitted()
        sizes = [w.numel() for w in self.setting.weights.values()]
        parts = dict(zip(self.setting.weights, draws.split(sizes, 1), strict=True))
        outputs = []
        with torch.no_grad():
            for chunk in self._chunks(x, covariances):
                pushed = [
                    torch.einsum("ncp,kp->knc", chunk.rows(name).reshape(chunk.n, chunk.k, -1), z)
                    for name, z in parts.items()
                ]
                outputs.append(chunk.f.double() + _sum(pushed).double())
        assert self._plan is not None
        return torch.cat(outputs, 1).reshape(len(draws), -1, *self._plan.output_shape)

    def _draws_at_once(self, inputs: int, k: int) -> int:
        """Samples pushed through the network together: their activations stay small."""
        assert self._plan is not None
        of_one = 2 * inputs * self._plan.bytes_per_input
        return int(min(max(1, CHUNK_BYTES // of_one), k))

    # --------------------------------------------------------------------------------- predictions

    def predict(
        self,
        x: Any,
        kind: Kind | None = None,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor | Normal:
        """The prediction: class probabilities [n, C], or for regression a `Normal` with the noise.

        Samples of a Gaussian around a saturated softmax predict badly, since probabilities move
        only on one side of it; the probit link is better there, and the default. It is exact for
        regression, where `kind` only tells "mode", without the variance of f, from the rest.

        Args:
            x: inputs [n, ...].
            kind: "probit", "bridge", "mc" or "mode"; None for probit where the likelihood has one
                (classes, binary targets, regression) and mc elsewhere (counts, custom).
            samples: number of samples of "mc".
            generator: source of these samples; by default the same ones every time.
        """
        if kind is None:
            kind = "probit" if _has_probit(self.likelihood) else "mc"
        if kind not in KINDS:
            raise MarglikError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        checks.positive_integer("samples", samples)
        f, covariance = self.functional(x)
        if kind == "mode":
            covariance = torch.zeros_like(covariance)
        variance = covariance.diagonal(dim1=1, dim2=2).clamp_min(0).reshape(f.shape)
        normal = _normal(self.likelihood, f, variance)
        if normal is not None and kind != "bridge":
            return normal
        if kind == "mode":
            return self.likelihood.predict(f)
        if kind == "probit":
            return self.likelihood.predict_probit(f, variance)
        if kind == "bridge":
            return bridge_of(self.likelihood, f, covariance)
        drawn = samples_of(f, covariance, samples, self._noise(generator))
        return monte_carlo(self.likelihood, drawn)

    def _targets(self, x: Any, y: Tensor) -> Tensor:
        """Targets where the model is, one for each input."""
        y = checks.targets(y).to(self.setting.device)
        n = len(tensors_of(x)[0])
        if not y.dim() or len(y) != n:
            raise MarglikError(f"expected {n} targets, one for each input, got {tuple(y.shape)}")
        return y

    def _noise(self, generator: torch.Generator | None) -> torch.Generator:
        """The given source of noise, or a new one with the posterior's seed."""
        return generator or torch.Generator().manual_seed(self.setting.seed)

    def log_prob(
        self,
        x: Any,
        y: Tensor,
        kind: Kind | None = None,
        samples: int = 1000,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log p(y_i | x_i) [n] of each datum under the posterior, before the temperature.

        Classes: the log probability that `predict` gives. Regression: exact, with covariances
        between outputs. Otherwise the log of the mean of p(y | f) over samples of f.

        Args:
            x: inputs [n, ...].
            y: targets, one per datum.
            kind: as in `predict`, for classes.
            samples: number of samples where there are any.
            generator: source of these samples.
        """
        y = self._targets(x, y)
        likelihood = self.likelihood
        if isinstance(likelihood, Categorical):
            p = self.predict(x, kind, samples, generator)
            assert isinstance(p, Tensor)
            return likelihood.log_prob(p.clamp_min(torch.finfo(p.dtype).tiny).log(), y)
        f, covariance = self.functional(x)
        if isinstance(likelihood, Gaussian):
            return _gaussian(f, covariance, likelihood, y)
        drawn = samples_of(f, covariance, samples, self._noise(generator))
        each = torch.stack([likelihood.log_prob(f_j, y) for f_j in drawn])
        return each.logsumexp(0) - math.log(samples)

    def joint_log_prob(
        self, x: Any, y: Tensor, samples: int = 1000, generator: torch.Generator | None = None
    ) -> Tensor:
        """log p(y_1, ..., y_n | x_1, ..., x_n), which sees covariances between inputs.

        Regression: exact. Otherwise the log of a mean over samples of functions.

        Args:
            x: inputs [n, ...].
            y: targets, one per datum.
            samples: number of samples where there are any.
            generator: source of these samples.
        """
        y = self._targets(x, y)
        if isinstance(self.likelihood, Gaussian):
            f, covariance = self.functional(x, joint=True)
            noise = self.likelihood.sigma.detach().square()
            return _log_density(f.reshape(1, -1), covariance[None], noise, y.reshape(1, -1))[0]
        drawn = self.sample_outputs(x, samples, self._noise(generator))
        return joint_log_prob(self.likelihood, drawn, y)

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that predictions need besides the model, as plain tensors and names."""
        covariances = self._fitted()
        assert self._evidence is not None
        evidence = self._evidence
        return {
            "version": VERSION,
            "structure": self.setting.structure,
            "inducing": self.setting.inducing,
            "root": self.setting.root,
            "samples": self.setting.samples,
            "weights": {name: list(w.shape) for name, w in self.setting.weights.items()},
            "checksum": self._checksum,
            "covariances": [covariance.state() for covariance in covariances],
            "likelihood": type(self.likelihood).__name__,
            "likelihood_state": dict(self.likelihood.state_dict()),
            "inputs": self._example,
            "evidence": [evidence.log_likelihood, evidence.scatter, evidence.log_det_ratio],
            "status": evidence.status,
            "n_data": evidence.n_data,
            "seed": self.setting.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> LaplacePosterior:
        """Take over a state of a posterior of the same model, which must have its weights.

        Args:
            state: from `state_dict`.
        """
        self._check_state(state)
        self.likelihood.load_state_dict(state["likelihood_state"])
        names = ("structure", "inducing", "n_data", "seed", "root", "samples")
        known = {name: state[name] for name in names if name in state}
        self.setting = replace(self.setting, **known)
        device = self.setting.device
        self._covariances = [from_state(block, device) for block in state["covariances"]]
        log_likelihood, scatter, log_det = state["evidence"]
        self._evidence = Evidence(
            log_likelihood, scatter, log_det, 1, state["status"], n_data=state["n_data"]
        )
        self.curvature, self._draws = None, None
        self._checksum = state["checksum"]
        self._example = self.setting.placed(state["inputs"])
        self._plan = self.setting.planned(self._example)
        return self

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of something else."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise MarglikError(
                "expected a state from LaplacePosterior.state_dict() of this version, got "
                f"{type(state).__name__} with version {dict(state).get('version')!r}"
            )
        found = {name: list(w.shape) for name, w in self.setting.weights.items()}
        if state["weights"] != found:
            other = {name for name, _ in {*_pairs(state["weights"])} ^ {*_pairs(found)}}
            raise MarglikError(
                "the state is of another model or other weights: they differ in "
                f"{sorted(other)[:5]}; build the posterior for the model that it was saved from"
            )
        if not torch.equal(state["checksum"], self._sum_of_weights()):
            raise MarglikError(
                "the state was fitted around other values of the weights; load the network's own "
                "state_dict first"
            )
        if state["likelihood"] != type(self.likelihood).__name__:
            raise MarglikError(
                f"the state is for a {state['likelihood']} likelihood, got "
                f"{type(self.likelihood).__name__}"
            )


class _EachOutput:
    """Rows of single outputs: cotangents are one-hot, without mixing."""

    cotangents_follow_outputs = False

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(f), -1, -1)

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return None


def _sum(terms: list[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


def _pairs(shapes: Mapping[str, Sequence[int]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(shape)) for name, shape in shapes.items()]


Description = list[tuple[str, int, tuple[int, ...], torch.dtype]]


def _described(x: Any) -> Description:
    """Name, number of axes, shape without the batch, and dtype of every tensor of inputs."""
    entries = {"": x} if isinstance(x, Tensor) else x
    tensors = {name: t for name, t in entries.items() if isinstance(t, Tensor)}
    return [(str(name), t.dim(), tuple(t.shape[1:]), t.dtype) for name, t in tensors.items()]


def _shown(description: Description) -> str:
    """For an error message."""
    parts = []
    for name, _, shape, dtype in description:
        sides = "".join(f", {side}" for side in shape)
        parts.append(f"{name} [n{sides}] of {dtype}".strip())
    return " and ".join(parts)


def _has_probit(likelihood: Likelihood) -> bool:
    """Whether a likelihood has the probit link, or needs none."""
    return type(likelihood).predict_probit is not Likelihood.predict_probit


def _normal(likelihood: Likelihood, f: Tensor, variance: Tensor) -> Normal | None:
    """The predictive distribution of a regression, in closed form; None for other likelihoods."""
    if isinstance(likelihood, Gaussian):
        noise = likelihood.sigma.detach().square()
        return Normal(f, (variance + noise).sqrt(), validate_args=False)
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean, log_noise = f.chunk(2, 1)
        of_mean, of_log_noise = variance.chunk(2, 1)
        noise = torch.exp(log_noise + of_log_noise / 2)  # its mean: the noise is log-normal
        return Normal(mean, (of_mean + noise).sqrt(), validate_args=False)
    return None


def _gaussian(f: Tensor, covariance: Tensor, likelihood: Gaussian, y: Tensor) -> Tensor:
    """log N(y_i; f_i, Sigma_i + sigma^2 I) [n]."""
    noise = likelihood.sigma.detach().square()
    if y.numel() != f.numel():
        raise MarglikError(f"targets {tuple(y.shape)} do not match outputs {tuple(f.shape)}")
    return _log_density(f.flatten(1), covariance, noise, y.reshape(len(f), -1))


def _log_density(f: Tensor, covariance: Tensor, noise: Tensor, y: Tensor) -> Tensor:
    """log N(y; f, Sigma + noise I) of every row [n]."""
    total = covariance + noise * torch.eye(f.shape[1]).to(f)
    return MultivariateNormal(f, total, validate_args=False).log_prob(y.to(f))
