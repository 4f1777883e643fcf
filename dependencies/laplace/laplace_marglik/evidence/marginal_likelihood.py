"""The marginal likelihood of a network under its linearised Laplace approximation, from blocks.

    log q          = log-likelihood - 1/2 scatter - 1/2 log-det ratio
    log-likelihood = (N/S) sum_{i in block} log p(y_i | f_i) / tau
    scatter        = (w - mu)^T P0 (w - mu)
    log-det ratio  = M log|I + K_block|,   M = (N/S)(C/K) blocks

(Immer et al. 2023, equation 5 and theorem 2.) A block of an `InducingPartition` counts its inducing
rows once and the others, given those, M times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from asdl_marglik import (
    ALL,
    ONE_AT_A_TIME,
    STRUCTURES,
    Arrangement,
    Batch,
    Budget,
    Conditioning,
    Granularity,
    Network,
    Passes,
    Plan,
    PlanChanged,
    PrecisionLost,
    Problem,
    Ranks,
    ShardedPasses,
    Term,
    augmented,
    blocks_of,
    check_weights,
    chosen_output,
    copied,
    evaluating,
    full_precision,
    hyperparameters_in,
    make_plan,
    map_inputs,
    matches,
    parts_of,
    plain,
    run,
    run_averaged,
    seeded,
    statistics,
    tensors_of,
    trainable,
)
from laplace_marglik import checks
from laplace_marglik.batches import pair_of, pairs
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.block import BlockData, Cache, PreparedBlock, status_of
from laplace_marglik.evidence.description import described
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.gradient_rows import (
    DRAWS,
    GRADIENT_ROOTS,
    GradientRows,
    curvature_scale,
    is_gradient,
)
from laplace_marglik.evidence.row_kernel import RowKernel
from laplace_marglik.evidence.rows import (
    Contrasts,
    Mixed,
    NoRows,
    Rows,
    SingleOutputs,
    checked_columns,
    cotangents_per_datum,
    draw_columns,
    n_root_columns,
    rows_for,
)
from laplace_marglik.likelihood import Likelihood, likelihood_for
from laplace_marglik.likelihood.base import GradientRoot, Root
from laplace_marglik.partition import Block
from laplace_marglik.posterior.curvature import Setting, random_weights
from laplace_marglik.posterior.laplace import LaplacePosterior
from laplace_marglik.prior import GaussianPrior

T = TypeVar("T")


class MarginalLikelihood:
    """Estimates log q(data) from blocks of data, differentiable in every hyperparameter.

    The weights never get a gradient of it.

    Args:
        model: the network; its parameters that require grad are the weights. It is called with a
            tensor, a mapping, or a mapping's entries as keywords, as its forward says.
        likelihood: "classification", "token-classification", "regression", a `Likelihood`, or a
            function log_prob(f, y).
        n_data: size N of the whole training set.
        prior: of the same model, with the same `hyper`.
        structure: "ntk" | "full" | "blockdiag" | "kfac" | "diag", or a registered one.
        outputs: root columns K in a block; None for all.
        columns: "shared" (one draw of columns for the block) or "iid" (one per data point).
        root: "paper" (published; no bound for K < C) | "fisher" | "symmetric" | "eigen"; None for
            paper, and for eigen where a block is conditioned on inducing rows. Other curvatures
            than the GGN: "empirical" (one row per datum, the gradient of its log-likelihood) |
            "sampled" (the same at targets drawn from the model).
        samples: of root "sampled", draws and so rows of each datum.
        augment: module or function x [n, ...] -> [n, A, ...]; outputs are averaged over the copies.
        hyper: name patterns of parameters inside the network that are hyperparameters.
        output: which of several outputs of the model, by name or place; None for `logits` where
            there are any, else the first tensor.
        labels: name of the targets where batches are mappings; None for "labels" or "label".
        kfac: weight-sharing setting of KFAC, "expand" | "reduce".
        blocks: of the block-diagonal structure: by "module" or by "tensor", all modules with the
            same "parent" together (the layers of a residual block), or lists of name patterns, one
            for each block, as [["0.*", "2.bias"], ["2.weight"]].
        memory_budget: bytes an estimate may take besides model and data; what is left of it saves
            recomputation. Default: half of the free memory, used sparingly.
        row_dtype: torch.float16 keeps rows of a kernel in half precision, each with its own scale.
        chunk: inputs per forward pass; by default from the size of activations.
        generator: source of columns and augmentations.
        ranks: processes that share every block; all are given the same one.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | Callable[[Tensor, Tensor], Tensor],
        *,
        n_data: int,
        prior: GaussianPrior,
        structure: str = "ntk",
        outputs: int | None = None,
        columns: Literal["shared", "iid"] = "shared",
        root: Root | GradientRoot | None = None,
        samples: int = 1,
        augment: nn.Module | None = None,
        hyper: Iterable[str] = (),
        output: str | int | None = None,
        labels: str | None = None,
        kfac: Literal["expand", "reduce"] = "expand",
        blocks: Granularity = "module",
        memory_budget: float | None = None,
        row_dtype: torch.dtype | None = None,
        chunk: int | None = None,
        generator: torch.Generator | None = None,
        ranks: Ranks | None = None,
    ):
        self.model = plain(model)
        self.network = Network(model, output)
        self.labels = labels
        self.likelihood = likelihood_for(likelihood)
        self.prior = prior
        self.n_data = n_data
        self.structure = structure
        self.outputs = outputs
        self.columns = columns
        self.root = root
        self.samples = samples
        self.augment = checks.as_module(augment)
        self.kfac = kfac
        self.blocks = blocks
        self.chunk = chunk
        self.memory_budget = memory_budget
        self.row_dtype = row_dtype
        self._fast = ALL
        self.hyper = tuple(hyper)
        self.ranks = ranks
        self._hyper_in_network = hyperparameters_in(model, self.hyper)
        self.generator = generator or torch.Generator().manual_seed(torch.initial_seed())
        self._plan: Plan | None = None
        # statistics in float64, from where single precision was not enough; for checkpoints
        self.in_double = False
        self._check_arguments()
        self._check_gradient_root()
        blocks_of(self._checked_weights(), self.blocks)
        # of the targets that belong to rows of conditioned blocks, where inducing rows come again
        self._draws_seed = self._seed() if root == "sampled" else 0

    def _check_arguments(self) -> None:
        """Refuse what no data could make right."""
        for name, choices in (
            ("structure", tuple(STRUCTURES)),
            ("columns", ("shared", "iid")),
            ("root", (*get_args(Root), *GRADIENT_ROOTS, None)),
            ("kfac", ("expand", "reduce")),
        ):
            value = getattr(self, name)
            if value not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise MarglikError(f"{name} must be one of {known}, got {value!r}")
        checks.positive_integer("n_data", self.n_data)
        for name, number in (("outputs", self.outputs), ("chunk", self.chunk)):
            if number is not None:
                checks.positive_integer(name, number)
        if self.memory_budget is not None and not self.memory_budget >= 1:
            raise MarglikError(f"memory_budget must be at least 1, got {self.memory_budget}")
        if self.row_dtype not in (None, torch.float16):
            raise MarglikError(
                "row_dtype must be torch.float16, or None for the dtype of the model, got "
                f"{self.row_dtype}"
            )
        if self.prior.covariance:
            raise MarglikError(
                "curvature needs a prior of independent weights; drop covariance=, or use an ELBO"
            )

    def _check_gradient_root(self) -> None:
        """Refuse what rows that are gradients of log-likelihoods cannot be combined with."""
        if checks.positive_integer("samples", self.samples) > 1 and self.root != "sampled":
            raise MarglikError(
                f"samples={self.samples} are draws of the targets for root='sampled', but root is "
                f"{self.root!r}"
            )
        if not is_gradient(self.root):
            return
        if self.outputs not in (None, 1) or self.columns != "shared":
            raise MarglikError(
                f"root={self.root!r} has one row for each log-likelihood and no outputs to choose "
                f"from; leave out outputs= and columns=, got outputs={self.outputs} and "
                f"columns={self.columns!r}"
            )
        if self.root == "sampled" and not self.likelihood.draws_targets:
            raise MarglikError(
                f"root='sampled' needs targets drawn from the model, and "
                f"{type(self.likelihood).__name__} does not say how: give it draws_targets, "
                "n_uniforms and drawn_slope, or use root='empirical'"
            )

    @property
    def two_sided(self) -> bool:
        """Whether conditioned blocks bracket the evidence, so that averages have an interval."""
        return STRUCTURES[self.structure].guarantee == "exact" and not is_gradient(self.root)

    @property
    def curvature_scale(self) -> Tensor:
        """What products of rows are multiplied with, from noise and temperature of now."""
        return curvature_scale(self.likelihood, self.root)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return trainable(self.model, self.hyper)

    def hyperparameters(self) -> list[nn.Parameter]:
        """Everything `total` can be differentiated in, inside the network too."""
        modules: list[nn.Module] = [self.prior, self.likelihood]
        if self.augment is not None:
            modules.append(self.augment)
        found = [p for module in modules for p in module.parameters() if p.requires_grad]
        return list(dict.fromkeys([*found, *self._hyper_in_network.values()]))

    def _checked_weights(self) -> dict[str, nn.Parameter]:
        """The weights, if the prior is one of theirs."""
        weights = self.weights
        if not weights:
            raise MarglikError(
                "all weights of the model are frozen; unfreeze some, then build the prior anew"
            )
        self.prior.check(weights, self._hyper_in_network)
        return weights

    @property
    def forward_hyperparameters(self) -> list[nn.Parameter]:
        """Those that move outputs or rows, so that every step in them takes new passes."""
        modules = [] if self.augment is None else [self.augment]
        parameters = [p for module in modules for p in module.parameters()]
        parameters += self._hyper_in_network.values()
        parameters += self._root_parameters()
        return [p for p in dict.fromkeys(parameters) if p.requires_grad]

    def _root_parameters(self) -> list[nn.Parameter]:
        """Learnable parameters of the likelihood that shape the rows themselves."""
        if self.root == "empirical":
            return self.likelihood.slope_parameters()
        return self.likelihood.root_parameters()

    # ----------------------------------------------------------------------------------- objectives

    def data_loss(self, f: Any, y: Tensor) -> Tensor:
        """The mean of -log p(y|f) / tau, without weight decay; detached from all hyperparameters.

        Args:
            f: outputs [n, ...], or what the model returns with them inside.
            y: targets [n, ...].
        """
        f = chosen_output(f, self.network.output)
        f = f.to(torch.promote_types(f.dtype, torch.float32))  # sums over outputs need it
        y = checks.targets(y).to(f.device)
        with self.likelihood.constant():
            return -self.likelihood.tempered_log_prob(f, y).mean()

    def map_loss(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Loss for the weights, per datum: -log p / tau + penalty / (2 N).

        It is detached from every hyperparameter.

        Args:
            x: inputs [n, ...], or a batch with the targets inside.
            y: targets [n, ...].
        """
        x, y = self._pair(x, y)
        decay = self.prior.penalty(self.weights) / (2 * self.n_data)
        return self.data_loss(self.outputs_of(x), y) + decay

    def outputs_of(self, x: Any, *, seed: int | None = None) -> Tensor:
        """Outputs averaged over augmented copies, in the model's current mode.

        Args:
            x: inputs [n, ...].
            seed: of the random augmentation; by default drawn from the generator.
        """
        detached = {name: p.detach() for name, p in self._hyper_in_network.items()} or None
        if self.augment is None:
            return run(self.network, copied(x), detached, wrapped=self.model.training)
        with torch.no_grad():
            copies = augmented(self.augment, x, self._seed() if seed is None else seed)
        return run_averaged(self.network, copies, detached)

    def _pair(self, x: Any, y: Tensor | None) -> tuple[Any, Tensor]:
        """Inputs and targets, which may be inside the inputs."""
        if y is None:
            x, y = pair_of(x, self.labels)
        return x, checks.targets(y)

    def __call__(
        self,
        x: Any,
        y: Tensor | None = None,
        columns: Tensor | None = None,
        *,
        block: Block | None = None,
        likelihood_batch: tuple[Any, Tensor] | None = None,
    ) -> Evidence:
        """The evidence of all data estimated from this block.

        Args:
            x: inputs [S, ...] of the block, or a batch with the targets inside.
            y: targets [S, ...].
            columns: explicit root columns [K] or [S, K].
            block: the `Block` of a partition that x and y are; its columns and counts are taken,
                whatever `outputs` says, and it must be of a partition of all n_data data.
            likelihood_batch: other data (x, y), drawn at random, for the log-likelihood; they cost
                a pass without rows.
        """
        x, y = self._pair(x, y)
        return self._with_plan(
            lambda: self._evidence(self._single_block(x, y, columns, block, likelihood_batch))
        )

    def cached(
        self,
        x: Any,
        y: Tensor | None = None,
        columns: Tensor | None = None,
        *,
        block: Block | None = None,
        likelihood_batch: tuple[Any, Tensor] | None = None,
    ) -> Callable[[], Evidence]:
        """A function that evaluates this block again for the prior, noise and temperature of now.

        It costs S x S algebra. Everything else stays as it was, the weights included.

        Args:
            x: as in a call.
            y: as in a call.
            columns: as in a call.
            block: as in a call.
            likelihood_batch: as in a call.
        """
        x, y = self._pair(x, y)

        def prepare() -> PreparedBlock:
            return self._single_block(x, y, columns, block, likelihood_batch, reuse=True)

        return self._with_plan(lambda: self._reusable(prepare))

    def full_batch(self, loader: Iterable[tuple[Any, Tensor]]) -> Evidence:
        """One block of all N data, streamed.

        Args:
            loader: gives the same batches (x, y) every time (shuffle=False).
        """
        return self._with_plan(lambda: self._evidence(self._all_data(loader)))

    def cached_full_batch(self, loader: Iterable[tuple[Any, Tensor]]) -> Callable[[], Evidence]:
        """As `cached`, for one block of all N data."""
        return self._with_plan(lambda: self._reusable(lambda: self._all_data(loader, reuse=True)))

    def posterior(
        self,
        loader: Iterable[tuple[Any, Tensor]] | None = None,
        *,
        weights: Iterable[str] | None = None,
        structure: str | None = None,
        inducing: int | None = None,
        generator: torch.Generator | None = None,
    ) -> LaplacePosterior:
        """The Gaussian posterior at the weights and hyperparameters of now, and its predictions.

        Args:
            loader: all training data in batches (x, y), in any order; read once. None for a
                posterior that is fitted, or loaded, later.
            weights: name patterns of the weights that are random, as ["head.*"]; the others stay
                fixed. None for all.
            structure: of the curvature; by default that of this marginal likelihood.
            inducing: of structure "ntk", how many root rows of the data are kept; None for all.
            generator: source of samples.
        """
        random = random_weights(self._checked_weights(), weights)
        setting = Setting(
            self.network,
            random,
            self.likelihood,
            self.prior.groups,
            structure or self.structure,
            self.n_data,
            augment=self.augment,
            inducing=inducing,
            kfac=self.kfac,
            blocks=self._blocks_among(random),
            budget=self._budget,
            seed=self._seed(),
            labels=self.labels,
            root=self.root,
            samples=self.samples,
        )
        if self.ranks is not None:
            raise MarglikError("a posterior is fitted by one process; leave out ranks=")
        posterior = LaplacePosterior(setting, self.prior, generator)
        return posterior if loader is None else posterior.fit(loader)

    def _blocks_among(self, weights: Mapping[str, Tensor]) -> Granularity:
        """The blocks of some of the weights; patterns are resolved among all of them."""
        if isinstance(self.blocks, str):
            return self.blocks
        blocks = blocks_of(self.weights, self.blocks).values()
        among = [[name for name in block if name in weights] for block in blocks]
        return [block for block in among if block]

    def memory(self, x: Any, n: int | None = None) -> int:
        """Bytes that an estimate and its gradient take besides model and data.

        Args:
            x: inputs of the block.
            n: of a block of n such data points instead.
        """
        return self._laid_out(x, n)[2].bytes

    def describe(self, x: Any) -> str:
        """How each weight's curvature is computed, as a table; x is any batch of inputs."""
        return described(*self._laid_out(x))

    def _laid_out(self, x: Any, n: int | None = None) -> tuple[Plan, list[Term], Arrangement]:
        with ONE_AT_A_TIME:  # as every estimate: parameters are replaced while a plan is verified
            plan = self._planned(self.placed(x))
            n = n or len(tensors_of(x)[0])
            k = self._k(plan)
            data = BlockData(list, n, k, self._copies(x), self._rows(plan, k))
            problem = self._problem(plan, data)
            parts = parts_of(self.structure, problem)
            return plan, parts, self._budget.arrange(problem, parts, again=True)

    # ------------------------------------------------------------------------------- what it holds

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, and what later draws depend on; plain tensors and numbers."""
        in_network = {name: p.detach().clone() for name, p in self._all_in_network().items()}
        return {
            "prior": _copied_state(self.prior),
            "likelihood": _copied_state(self.likelihood),
            "augment": None if self.augment is None else _copied_state(self.augment),
            "in_network": in_network,
            "generator": self.generator.get_state(),
            "in_double": self.in_double,
            "draws_seed": self._draws_seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over everything learned.

        Args:
            state: from `state_dict` of a marginal likelihood of the same model, prior and
                augmentation.
        """
        own = self._all_in_network()
        if set(state["in_network"]) != set(own) or (state["augment"] is None) != (
            self.augment is None
        ):
            raise MarglikError(
                "the state is of a marginal likelihood with other hyperparameters: it has "
                f"{sorted(state['in_network'])} in the network and "
                f"{'no' if state['augment'] is None else 'an'} augmentation, this one has "
                f"{sorted(own)} and {'no' if self.augment is None else 'an'} augmentation"
            )
        _load(self.prior, state["prior"], "prior")
        _load(self.likelihood, state["likelihood"], "likelihood")
        if self.augment is not None:
            _load(self.augment, state["augment"], "augmentation")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state["in_network"][name])
        self.generator.set_state(state["generator"])
        self.in_double = state["in_double"]
        self._draws_seed = state["draws_seed"]

    def _all_in_network(self) -> dict[str, nn.Parameter]:
        """Hyperparameters inside the network, frozen ones too."""
        named = self.model.named_parameters()
        return {name: p for name, p in named if matches(name, self.hyper)}

    def __repr__(self) -> str:
        learned = sum(p.numel() for p in self.hyperparameters())
        outputs = "all" if self.outputs is None else self.outputs
        lines = [
            f"model={type(self.model).__name__} ({sum(w.numel() for w in self.weights.values())} "
            "weights)",
            f"likelihood={self.likelihood}",
            f"prior={self.prior}",
            f"structure={self.structure!r}, n_data={self.n_data}, outputs={outputs}, "
            f"root={self.root!r}" + (f", samples={self.samples}" if self.samples > 1 else ""),
        ]
        if self.augment is not None:
            lines.append(f"augment={type(self.augment).__name__}")
        lines.append(f"hyperparameters={learned}")
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines) + "\n)"

    # ------------------------------------------------------------------------------------- assembly

    def _with_plan(self, compute: Callable[[], T]) -> T:
        """Run `compute`; again if the model takes another path, or single precision is too low."""
        checks.outside_inference_mode()
        start = self.generator.get_state()
        replanned = False
        with ONE_AT_A_TIME, full_precision(self.model):
            while True:
                try:
                    return compute()
                except PrecisionLost:
                    assert not self.in_double  # statistics in float64 are taken as they are
                    self.in_double = True
                except PlanChanged:
                    if replanned:
                        raise MarglikError(_MANY_PATHS) from None
                    self._plan, replanned = None, True
                self.generator.set_state(start)  # the same block and the same random draws

    def _planned(self, x: Any) -> Plan:
        weights = self._checked_weights()
        known = self._plan
        fits = known is not None and [*known.weights] == [*weights] and not known.provisional
        if not fits or any(known.weights[name] is not w for name, w in weights.items()):  # type: ignore[union-attr]
            with evaluating(self.model), seeded(0, tensors_of(x)[0].device):
                self._plan = make_plan(self.network, weights, x)
        assert self._plan is not None
        return self._plan

    def _k(self, plan: Plan) -> int:
        c = plan.output_shape.numel()
        if is_gradient(self.root):
            return self.samples
        if self.outputs is not None and self.outputs > c:
            raise MarglikError(
                f"outputs={self.outputs} but the network has only {c}; use outputs={c} or None "
                "for all"
            )
        return self.outputs or c

    def _rows(self, plan: Plan, k: int, root: Root | GradientRoot | None = None) -> Rows:
        """The form in which k root columns of each datum are computed."""
        return rows_for(
            self.likelihood,
            plan.output_shape,
            root or self.root or "paper",
            k,
            contrasts=self._fast.fewer_cotangents,
            samples=self.samples,
        )

    def _problem(self, plan: Plan, data: BlockData) -> Problem:
        rows = 0 if data.rows is None else cotangents_per_datum(data.rows, data.k)
        in_network = any(p.requires_grad for p in self._hyper_in_network.values())
        follow = data.rows is not None and data.rows.cotangents_follow_outputs
        return Problem(
            plan,
            self.prior.groups,
            n_data=data.n,
            rows_per_datum=rows,
            copies=data.copies,
            setting=self.kfac,
            granularity=self.blocks,
            half_rows=self.row_dtype is not None,
            fast=self._fast,
            ranks=self.ranks,
            double=self.in_double,
            conditioning=data.conditioning,
            cotangents_move=in_network or follow,
        )

    @property
    def _budget(self) -> Budget:
        return Budget(self.memory_budget, self.chunk, self.device)

    def _copies(self, x: Any) -> int:
        """Augmented copies A of each datum."""
        if self.augment is None:
            return 1
        with torch.no_grad():
            return tensors_of(augmented(self.augment, map_inputs(lambda t: t[:1], x), 0))[0].shape[
                1
            ]

    def _single_block(
        self,
        x: Any,
        y: Tensor,
        columns: Tensor | None,
        block: Block | None,
        likelihood_batch: tuple[Any, Tensor] | None = None,
        *,
        reuse: bool = False,
    ) -> PreparedBlock:
        x, y = self._checked_data(x, y)
        plan = self._planned(x)
        c = plan.output_shape.numel()
        if block is not None:
            block.check(len(y), self.n_data, c)
        if block is not None and block.rows is not None:
            prepared = self._conditioned_block(plan, x, y, block, reuse)
        else:
            prepared = self._plain_block(plan, x, y, columns, block, reuse)
        if likelihood_batch is not None:
            x, y = self._checked_data(*likelihood_batch)
            batches = _one_batch(x, y, torch.zeros(len(y), 0, dtype=torch.long, device=y.device))
            data = BlockData(batches, len(y), 0, self._copies(x), rows=None)
            prepared.data = self._passes(plan, data, reuse)
            prepared.factor = self.n_data / len(y)
        return prepared

    def _checked_data(self, x: Any, y: Tensor) -> tuple[Any, Tensor]:
        """Inputs and targets where the model is, as many of each, and no more than there are."""
        x = self.placed(x)
        y = self.placed(y)
        n = len(y)
        if n == 0 or any(len(t) != n for t in tensors_of(x)):
            lengths = [len(t) for t in tensors_of(x)]
            raise MarglikError(
                f"expected at least one datum and as many inputs as targets, got {lengths} inputs "
                f"and {n} targets"
            )
        if n > self.n_data:
            raise MarglikError(
                f"a block of {n} data points from n_data={self.n_data}: n_data is the size of the "
                "whole training set"
            )
        return x, y

    def _plain_block(
        self,
        plan: Plan,
        x: Any,
        y: Tensor,
        columns: Tensor | None,
        block: Block | None,
        reuse: bool,
    ) -> PreparedBlock:
        """Data points with the same number of root columns each."""
        if is_gradient(self.root):
            return self._gradient_block(plan, x, y, columns, block, reuse)
        n, c = len(y), plan.output_shape.numel()
        if columns is None and block is not None:
            columns = block.columns
        if columns is None:
            columns = draw_columns(n, c, self._k(plan), self.generator, iid=self.columns == "iid")
        columns = checked_columns(columns, n, c).to(y.device)
        k = columns.shape[1]
        n_data_blocks = self.n_data / n if block is None else block.n_data_blocks
        n_column_blocks = c / k if block is None else block.n_column_blocks
        data = BlockData(_one_batch(x, y, columns), n, k, self._copies(x), self._rows(plan, k))
        passes = self._passes(plan, data, reuse)
        return self._prepared(plan, passes, k, n_data_blocks, n_data_blocks * n_column_blocks)

    def _gradient_block(
        self,
        plan: Plan,
        x: Any,
        y: Tensor,
        columns: Tensor | None,
        block: Block | None,
        reuse: bool,
    ) -> PreparedBlock:
        """Data points with all rows that are gradients of their log-likelihoods."""
        if columns is not None or (block is not None and block.n_column_blocks != 1):
            raise MarglikError(
                f"root={self.root!r} has no columns that blocks could share; leave out columns=, "
                "and build the Partition with outputs=None"
            )
        n, k, seed = len(y), self.samples, self._seed()
        rows = self._rows(plan, k)
        assert isinstance(rows, GradientRows)
        draws = rows.drawn(n, torch.Generator().manual_seed(seed + DRAWS)).to(y.device)
        data = BlockData(_one_batch(x, y, draws), n, k, self._copies(x), rows)
        n_blocks = self.n_data / n if block is None else block.n_data_blocks
        passes = self._passes(plan, data, reuse, seed)
        return self._prepared(plan, passes, k, n_blocks, n_blocks)

    def _conditioned_block(
        self, plan: Plan, x: Any, y: Tensor, block: Block, reuse: bool
    ) -> PreparedBlock:
        """Rows of distinct data points, the inducing ones first."""
        assert block.rows is not None
        root = self._conditioned_root(plan, block)
        position, column = block.rows.to(y.device).unbind(1)
        columns = column[:, None]
        rows = self._rows(plan, 1, root)
        if isinstance(rows, GradientRows):
            columns = rows.drawn_for(block.numbered_rows(), self._draws_seed).to(y.device)
        conditioning = Conditioning(block.n_inducing, block.weight)
        data = BlockData(
            _one_batch(x, y[position], columns),
            n=len(position),
            k=1,
            copies=self._copies(x),
            rows=rows,
            conditioning=conditioning,
            row_data=position,
        )
        passes = self._passes(plan, data, reuse)
        if not all(part.has_rows for part in passes.parts):
            raise MarglikError(
                f"{self.structure} curvature has no rows to condition on; use structure='ntk', "
                "'full' or 'blockdiag', or a Partition without inducing rows"
            )
        n_columns = block.n_columns or block.n_outputs
        factor = torch.full((len(position),), block.weight / n_columns, dtype=torch.float64)
        factor[: block.n_inducing] = 1 / n_columns
        true_root = not is_gradient(root)
        prepared = self._prepared(plan, passes, 1, factor, block.weight, true_root=true_root)
        prepared.conditioning = conditioning
        prepared.inducing = block.inducing_rows
        return prepared

    def _conditioned_root(self, plan: Plan, block: Block) -> Root | GradientRoot:
        """The root whose rows are conditioned, if its rows are those of one curvature."""
        root: Root | GradientRoot = self.root or "eigen"
        c = plan.output_shape.numel()
        if root == "paper" and not self.likelihood.diagonal and c > 1:
            raise MarglikError(
                "conditioning on inducing rows needs the rows of a true root, and root='paper' is "
                "none for single outputs of this likelihood; use root='eigen', 'fisher' or "
                "'symmetric'"
            )
        possible = n_root_columns(self.likelihood, plan.output_shape, root, self.samples)
        allowed = (possible,) if is_gradient(root) else (None, c, possible)
        if block.n_columns not in allowed:
            raise MarglikError(
                f"the block's rows are drawn from {block.n_columns} root columns, but the "
                f"{root} root of {c} outputs has {possible} that may differ from zero; build the "
                f"InducingPartition with n_columns={possible}"
            )
        return root

    def _all_data(
        self, loader: Iterable[tuple[Any, Tensor]], *, reuse: bool = False
    ) -> PreparedBlock:
        if iter(loader) is loader:
            raise MarglikError(
                "the loader can be read only once; pass a DataLoader or a list of (x, y) batches"
            )
        first = next(pairs(loader, self.labels), None)
        if first is None:
            raise MarglikError(
                "the loader is empty; it must yield (x, y) batches of all n_data data points"
            )
        plan = self._planned(self.placed(first[0]))
        c, k = plan.output_shape.numel(), self._k(plan)
        rows = self._rows(plan, k)
        seed = self._seed()

        def batches() -> Iterable[tuple[Any, Tensor, Tensor]]:
            columns_for = self._columns_of_batches(rows, c, k, seed)  # the same in both passes
            for x, y in pairs(loader, self.labels):
                y = self.placed(checks.targets(y))
                own = columns_for(len(y))
                if any(len(t) != len(y) for t in tensors_of(x)):
                    raise MarglikError("expected as many inputs as targets in every batch")
                yield self.placed(x), y, own.to(y.device)

        copies = self._copies(self.placed(first[0]))
        data = BlockData(batches, self.n_data, k, copies, rows)
        n_blocks = 1 if isinstance(rows, GradientRows) else c / k
        return self._prepared(plan, self._passes(plan, data, reuse), k, 1, n_blocks)

    def _columns_of_batches(self, rows: Rows, c: int, k: int, seed: int) -> Callable[[int], Tensor]:
        """A function that gives the columns of the next so many data points."""
        generator = torch.Generator().manual_seed(seed)
        if isinstance(rows, GradientRows):
            return lambda n: rows.drawn(n, generator)
        if self.columns == "iid":
            return lambda n: draw_columns(n, c, k, generator, iid=True)
        shared = draw_columns(1, c, k, generator, iid=False)
        return lambda n: shared.expand(n, -1)

    def _passes(self, plan: Plan, data: BlockData, reuse: bool, seed: int | None = None) -> Passes:
        """Both passes over some data; with `reuse`, the first one only, which is kept."""
        in_network = [p for p in self._hyper_in_network.values() if p.requires_grad]
        leaves: list[Tensor] = [*in_network, *self._root_parameters()]
        in_augment = [] if self.augment is None else list(self.augment.parameters())
        _refuse_hooks([*leaves, *in_augment])
        if reuse:
            in_network, leaves = [], []
        moving = bool(leaves) or any(p.requires_grad for p in in_augment)
        again = torch.is_grad_enabled() and not reuse and moving
        problem = self._problem(plan, data)
        problem, parts, rows = self._terms(problem, data.rows, again=again)
        arrangement = self._budget.arrange(problem, parts, again=again)
        refusal = self._budget.refusal(self.structure, problem, arrangement, again=again)
        if refusal is not None:
            raise MarglikError(refusal)
        kind = Passes if self.ranks is None else partial(ShardedPasses, ranks=self.ranks)
        return kind(
            plan,
            parts,
            rows or NoRows(),
            data.batches,
            self.augment,
            n_data=data.n,
            seed=self._seed() if seed is None else seed,
            fast=self._fast,
            arrangement=arrangement,
            network_leaves=leaves,
            hyper_in_network=bool(in_network),
            differentiate_augmentation=not reuse,
            reuse=reuse,
            row_data=data.row_data,
        )

    def _terms(
        self, problem: Problem, rows: Rows | None, *, again: bool
    ) -> tuple[Problem, list[Term], Rows | Mixed | None]:
        """The terms of the structure, and in which form they take the rows.

        A root that nothing moves may as well be part of the cotangents, if that saves memory.
        """
        if rows is None:
            return problem, [], None
        constant = not again and not self._root_parameters() and self._fast.mixed_cotangents
        if constant and isinstance(rows, SingleOutputs | Contrasts) and problem.rows_per_datum > 1:
            mixed = replace(problem, mixed=True)
            parts = parts_of(self.structure, mixed)
            if any(part.sums_cotangents for part in parts):
                return mixed, parts, Mixed(rows)
        return problem, parts_of(self.structure, problem), rows

    def _prepared(
        self,
        plan: Plan,
        passes: Passes,
        k: int,
        factor: Tensor | float,
        n_blocks: float,
        *,
        true_root: bool = False,
    ) -> PreparedBlock:
        if not is_gradient(self.root):
            all_columns = k == plan.output_shape.numel()
            true_root |= self.likelihood.diagonal or all_columns or self.root not in (None, "paper")
        check_weights(self.model)
        return PreparedBlock(
            passes,
            plan.output_shape,
            n_blocks,
            status_of(self.structure, true_root, everything=n_blocks == 1),
            squares=self.prior.squares(self.weights),
            factor=factor,
        )

    def _reusable(self, prepare: Callable[[], PreparedBlock]) -> Callable[[], Evidence]:
        if self._root_parameters():
            raise MarglikError(
                "a cached evaluation follows prior, noise and temperature only, and this "
                "likelihood has other learnable parameters; freeze them or evaluate ml(x, y) anew"
            )
        start = self.generator.get_state()
        block = self._settled(prepare())

        def evaluate() -> Evidence:
            nonlocal block
            try:
                return self._evidence(block)
            except PrecisionLost:
                block = self._in_double(block, prepare, start)
                return self._evidence(block)

        return evaluate

    def _settled(self, block: PreparedBlock) -> PreparedBlock:
        """The block with all done that neither prior nor noise can change."""
        passes = block.passes
        with torch.no_grad():
            f, parts = statistics(passes, self.prior.log_precision)
            if block.data is not None:
                statistics(block.data, self.prior.log_precision)  # kept, as the block's are
            if not passes.summary_depends_on_precision:
                block.cache = self._cache(block, f, parts)
        return block

    def _cache(self, block: PreparedBlock, f: Tensor, parts: list[list[Tensor]]) -> Cache:
        passes = block.passes
        mixing = passes.root_rows.mixing(f, *passes.rows_of_data)
        if block.data is not None:
            f, _ = statistics(block.data, self.prior.log_precision)
        constant = self.likelihood.constant_log_prob and self._fast.kept_log_prob
        return Cache(
            f,
            log_prob=block.log_prob_of(f, self.likelihood) if constant else None,
            mixing=mixing,
            statistics=parts,
            log_dets=[p.settled(s, mixing) for p, s in zip(passes.parts, parts, strict=True)],
        )

    def _in_double(
        self, block: PreparedBlock, prepare: Callable[[], PreparedBlock], start: Tensor
    ) -> PreparedBlock:
        """The same cached block with statistics in float64, which the prior of now needs."""
        if not block.passes.unchanged:
            raise MarglikError(
                "at this prior a cached block in single precision leaves its determinant to "
                "rounding, and the parameters have moved since it was made, so that it cannot be "
                "made again; call ml.cached anew"
            )
        self.in_double, present = True, self.generator.get_state()
        try:
            self.generator.set_state(start)  # the same columns and random draws
            with ONE_AT_A_TIME, full_precision(self.model):
                return self._settled(prepare())
        finally:
            self.generator.set_state(present)

    def _evidence(self, block: PreparedBlock) -> Evidence:
        self.prior.check_precision()
        self.likelihood.check_scales()
        theta = self.prior.log_precision.double()
        scale = self.curvature_scale
        if block.cache is not None:
            log_dets = [settled(scale, theta) for settled in block.cache.log_dets]
            log_prob = block.cache.log_prob
            if log_prob is None:
                log_prob = block.log_prob_of(block.cache.f, self.likelihood)
            parts, mixing = block.cache.statistics, block.cache.mixing
        else:
            f, parts = statistics(block.passes, self.prior.log_precision)
            mixing = block.passes.root_rows.mixing(f, *block.passes.rows_of_data)
            log_dets = [
                part.log_det_ratio(own, mixing, scale, theta)
                for part, own in zip(block.passes.parts, parts, strict=True)
            ]
            if block.data is not None:
                f, _ = statistics(block.data, self.prior.log_precision)
            log_prob = block.log_prob_of(f, self.likelihood)
        log_det = torch.stack(log_dets).sum() if len(log_dets) > 1 else log_dets[0]
        conditioned = block.conditioning is not None  # then the weights are inside
        return Evidence(
            log_likelihood=log_prob * self.likelihood.inverse_temperature,
            scatter=self.prior.scatter(block.squares),
            log_det_ratio=log_det if conditioned else block.n_blocks * log_det,
            n_blocks=block.n_blocks,
            status=block.status,
            n_data=self.n_data,
            row_kernel=self._row_kernel(block, parts, mixing, scale, theta),
        )

    def _row_kernel(
        self,
        block: PreparedBlock,
        statistics: list[list[Tensor]],
        mixing: Tensor | None,
        scale: Tensor,
        theta: Tensor,
    ) -> RowKernel | None:
        """The kernel of a conditioned block's rows at the present hyperparameters."""
        if block.conditioning is None or block.inducing is None:
            return None
        parts = block.passes.parts
        scale, theta = scale.detach().clone(), theta.detach().clone()

        def make() -> Tensor:
            kernels = [
                part.kernel(own, mixing, scale, theta)
                for part, own in zip(parts, statistics, strict=True)
            ]
            return sum(kernels[1:], kernels[0])

        return RowKernel(make, block.conditioning, block.inducing, self.two_sided)

    def _seed(self) -> int:
        return int(torch.randint(2**31, (), generator=self.generator))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self.model.parameters())).device

    def placed(self, x: Any) -> Any:
        """Inputs where the model is.

        Args:
            x: a tensor, or a mapping of tensors.
        """
        return map_inputs(lambda t: checks.ordinary(t).to(self.device), x)


def _copied_state(module: nn.Module) -> dict[str, Tensor]:
    """A module's state that later steps do not change."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _load(module: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """A module's state; an error that names the part which does not fit."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise MarglikError(f"the state does not fit this {what}: {error}") from None


def _one_batch(x: Any, y: Tensor, columns: Tensor) -> Callable[[], Iterable[Batch]]:
    return lambda: [(x, y, columns)]


_MANY_PATHS = (
    "the model uses its weights differently from one data point to the next (data-dependent "
    "control flow), or its outputs change their shape; evaluate such data in separate blocks, and "
    "pad sequences to one length"
)


def _refuse_hooks(leaves: Iterable[Tensor]) -> None:
    """Hooks on hyperparameters behind the outputs would act inside the estimate and again on it."""
    if any(leaf._backward_hooks for leaf in leaves):
        raise MarglikError(
            "a hyperparameter of the network, the likelihood or the augmentation has a gradient "
            "hook, which would act twice; remove it and change the gradient after backward() "
            "instead"
        )
