"""The marginal likelihood of a network under its linearised Laplace approximation, estimated from a
block of data.

log q = log-likelihood - 1/2 scatter - 1/2 log-det ratio        (Immer et al. 2023, eq. 5 and
theorem 2) log-likelihood = (N/S) sum_{i in block} log p(y_i | f_i) / tau,     scatter = (w - mu)^T
P0 (w - mu) log-det ratio  = M log|I + K_block|,   M = (N/S)(C/K) blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from asdl_marglik import (
    ALL,
    ONE_AT_A_TIME,
    STRUCTURES,
    Arrangement,
    Passes,
    Plan,
    PlanChanged,
    PrecisionLost,
    Problem,
    Ranks,
    ShardedPasses,
    Term,
    augmented,
    check_weights,
    copied,
    evaluating,
    full_precision,
    hyperparameters_in,
    make_plan,
    map_inputs,
    parts_of,
    run,
    run_averaged,
    seeded,
    statistics,
    tensors_of,
    trainable,
)
from laplace_marglik import checks
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.block import PreparedBlock, status_of
from laplace_marglik.evidence.description import described
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.evidence.memory import Budget
from laplace_marglik.evidence.rows import (
    Rows,
    checked_columns,
    cotangents_per_datum,
    draw_columns,
    rows_for,
)
from laplace_marglik.likelihood import Likelihood, likelihood_for
from laplace_marglik.likelihood.base import Root
from laplace_marglik.partition import Block
from laplace_marglik.prior import GaussianPrior

T = TypeVar("T")


class MarginalLikelihood:
    """Estimates log q(data) from blocks of data, differentiable in every hyperparameter.

    The weights never get a gradient of it.

    Args:
        model: the network; its parameters that require grad are the weights.
        likelihood: "classification", "regression", a `Likelihood`, or a function log_prob(f, y).
        n_data: size N of the whole training set.
        prior: of the same model, with the same `hyper`.
        structure: "ntk" | "full" | "blockdiag" | "kfac" | "diag", or a registered one.
        outputs: root columns K in a block; None for all.
        columns: "shared" (one draw of columns for the block) or "iid" (one per data point).
        root: "paper" (published; no bound for K < C) | "fisher" | "symmetric" | "eigen".
        augment: module or function x [n, ...] -> [n, A, ...]; outputs are averaged over the copies.
        hyper: name patterns of parameters inside the network that are hyperparameters.
        kfac: weight-sharing setting of KFAC, "expand" | "reduce".
        blocks: of the block-diagonal structure, by "module" or by "tensor".
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
        root: Root = "paper",
        augment: nn.Module | None = None,
        hyper: Iterable[str] = (),
        kfac: Literal["expand", "reduce"] = "expand",
        blocks: Literal["module", "tensor"] = "module",
        memory_budget: float | None = None,
        row_dtype: torch.dtype | None = None,
        chunk: int | None = None,
        generator: torch.Generator | None = None,
        ranks: Ranks | None = None,
    ):
        for name, value, choices in (
            ("structure", structure, tuple(STRUCTURES)),
            ("columns", columns, ("shared", "iid")),
            ("root", root, ("paper", "fisher", "symmetric", "eigen")),
            ("kfac", kfac, ("expand", "reduce")),
            ("blocks", blocks, ("module", "tensor")),
        ):
            if value not in choices:
                raise MarglikError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        checks.positive_integer("n_data", n_data)
        for name, number in (("outputs", outputs), ("chunk", chunk)):
            if number is not None:
                checks.positive_integer(name, number)
        if memory_budget is not None and not memory_budget >= 1:
            raise MarglikError(f"memory_budget must be at least 1, got {memory_budget}")
        self.model = model
        self.likelihood = likelihood_for(likelihood)
        self.prior = prior
        self.n_data = n_data
        self.structure = structure
        self.outputs = outputs
        self.columns = columns
        self.root = root
        self.augment = checks.as_module(augment)
        self.kfac = kfac
        self.blocks = blocks
        self.chunk = chunk
        if row_dtype not in (None, torch.float16):
            raise MarglikError(
                "row_dtype must be torch.float16, or None for the dtype of the model, got "
                f"{row_dtype}"
            )
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
        self._checked_weights()
        if prior.covariance:
            raise MarglikError(
                "curvature needs a prior of independent weights; drop covariance=, or use an ELBO"
            )

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return trainable(self.model, self.hyper)

    def hyperparameters(self) -> list[nn.Parameter]:
        """Everything `total` can be differentiated in: prior, likelihood, augmentation, and inside
        the network.
        """
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

    # ----------------------------------------------------------------------------------- objectives

    def map_loss(self, x: Any, y: Tensor) -> Tensor:
        """Loss for the weights, per datum: -log p / tau + penalty / (2 N); detached from every
        hyperparameter.
        """
        f, y = self.outputs_of(x), checks.targets(y)
        scale = self.likelihood.inverse_temperature.detach()
        with self.likelihood.constant():
            data = -(self.likelihood.log_prob(f, y).mean() * scale.to(f.dtype))
        return data + self.prior.penalty(self.weights) / (2 * self.n_data)

    def outputs_of(self, x: Any, *, seed: int | None = None) -> Tensor:
        """Outputs averaged over augmented copies, in the model's current mode; for training and
        prediction.

        seed: of the random augmentation; by default drawn from the generator.
        """
        detached = {name: p.detach() for name, p in self._hyper_in_network.items()} or None
        if self.augment is None:
            return run(self.model, copied(x), detached)
        with torch.no_grad():
            copies = augmented(self.augment, x, self._seed() if seed is None else seed)
        return run_averaged(self.model, copies, detached)

    def __call__(
        self, x: Any, y: Tensor, columns: Tensor | None = None, *, block: Block | None = None
    ) -> Evidence:
        """The evidence of all data estimated from this block.

        columns: explicit root columns [K] or [S, K]. block: the `Block` of a partition that x and y
        are; its columns and counts are taken, whatever `outputs` says, and it must be of a
        partition of all n_data data and outputs.
        """
        return self._with_plan(lambda: self._evidence(self._single_block(x, y, columns, block)))

    def cached(
        self, x: Any, y: Tensor, columns: Tensor | None = None, *, block: Block | None = None
    ) -> Callable[[], Evidence]:
        """A function that evaluates this block again for the current prior, noise and temperature,
        at S x S cost.

        Everything else stays as it was, the weights included.
        """
        return self._with_plan(
            lambda: self._reusable(lambda: self._single_block(x, y, columns, block, reuse=True))
        )

    def full_batch(self, loader: Iterable[tuple[Any, Tensor]]) -> Evidence:
        """One block of all N data, streamed from a loader that gives the same batches every time
        (shuffle=False).
        """
        return self._with_plan(lambda: self._evidence(self._all_data(loader)))

    def cached_full_batch(self, loader: Iterable[tuple[Any, Tensor]]) -> Callable[[], Evidence]:
        """As `cached`, for one block of all N data."""
        return self._with_plan(lambda: self._reusable(lambda: self._all_data(loader, reuse=True)))

    def memory(self, x: Any, n: int | None = None) -> int:
        """Bytes that an estimate and its gradient take besides model and data: of x, or of n data
        points like these.
        """
        return self._laid_out(x, n)[2].bytes

    def describe(self, x: Any) -> str:
        """How each weight's curvature is computed, as a table; x is any batch of inputs."""
        return described(*self._laid_out(x))

    def _laid_out(self, x: Any, n: int | None = None) -> tuple[Plan, list[Term], Arrangement]:
        with ONE_AT_A_TIME:  # as every estimate: parameters are replaced while a plan is verified
            plan = self._planned(self._placed(x))
            n = n or len(tensors_of(x)[0])
            problem = self._problem(plan, n, self._k(plan), self._copies(x))
            parts = parts_of(self.structure, problem)
            return plan, parts, self._budget.arrange(problem, parts, again=True)

    # ------------------------------------------------------------------------------------- assembly

    def _with_plan(self, compute: Callable[[], T]) -> T:
        """Run `compute`; again if the model takes another path than planned, or single precision is
        not enough.
        """
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
                self._plan = make_plan(self.model, weights, x)
        assert self._plan is not None
        return self._plan

    def _k(self, plan: Plan) -> int:
        c = plan.output_shape.numel()
        if self.outputs is not None and self.outputs > c:
            raise MarglikError(
                f"outputs={self.outputs} but the network has only {c}; use outputs={c} or None "
                "for all"
            )
        return self.outputs or c

    def _rows(self, plan: Plan, k: int) -> Rows:
        return rows_for(
            self.likelihood, plan.output_shape, self.root, k, contrasts=self._fast.fewer_cotangents
        )

    def _problem(self, plan: Plan, n: int, k: int, copies: int) -> Problem:
        rows = cotangents_per_datum(self._rows(plan, k), k)
        half = self.row_dtype is not None
        return Problem(
            plan,
            self.prior.groups,
            n_data=n,
            rows_per_datum=rows,
            copies=copies,
            setting=self.kfac,
            granularity=self.blocks,
            half_rows=half,
            fast=self._fast,
            ranks=self.ranks,
            double=self.in_double,
        )

    @property
    def _budget(self) -> Budget:
        return Budget(self.memory_budget, self.chunk, next(iter(self.model.parameters())).device)

    def _copies(self, x: Any) -> int:
        """Augmented copies A of each datum."""
        if self.augment is None:
            return 1
        with torch.no_grad():
            return tensors_of(augmented(self.augment, map_inputs(lambda t: t[:1], x), 0))[0].shape[
                1
            ]

    def _single_block(
        self, x: Any, y: Tensor, columns: Tensor | None, block: Block | None, *, reuse: bool = False
    ) -> PreparedBlock:
        x, y = self._placed(x), self._placed(checks.targets(y))
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
        plan = self._planned(x)
        c = plan.output_shape.numel()
        if block is not None:
            block.check(n, self.n_data, c)
            columns = block.columns if columns is None else columns
        if columns is None:
            columns = draw_columns(n, c, self._k(plan), self.columns == "iid", self.generator)
        columns = checked_columns(columns, n, c).to(y.device)
        k = columns.shape[1]
        counts = (
            (block.n_data_blocks, block.n_column_blocks)
            if block is not None
            else (self.n_data / n, c / k)
        )
        passes = self._passes(plan, n, k, self._copies(x), lambda: [(x, y, columns)], reuse)
        return self._block(passes, k, plan, *counts)

    def _all_data(
        self, loader: Iterable[tuple[Any, Tensor]], *, reuse: bool = False
    ) -> PreparedBlock:
        if iter(loader) is loader:
            raise MarglikError(
                "the loader can be read only once; pass a DataLoader or a list of (x, y) batches"
            )
        first = next(checks.pairs(loader), None)
        if first is None:
            raise MarglikError(
                "the loader is empty; it must yield (x, y) batches of all n_data data points"
            )
        plan = self._planned(self._placed(first[0]))
        c, k = plan.output_shape.numel(), self._k(plan)
        seed = self._seed()

        def batches() -> Iterable[tuple[Any, Tensor, Tensor]]:
            generator = torch.Generator().manual_seed(seed)  # the same columns in both passes
            shared = None if self.columns == "iid" else draw_columns(1, c, k, False, generator)
            for x, y in checks.pairs(loader):
                y = self._placed(checks.targets(y))
                own = (
                    draw_columns(len(y), c, k, True, generator)
                    if shared is None
                    else shared.expand(len(y), -1)
                )
                if any(len(t) != len(y) for t in tensors_of(x)):
                    raise MarglikError("expected as many inputs as targets in every batch")
                yield self._placed(x), y, own.to(y.device)

        passes = self._passes(
            plan, self.n_data, k, self._copies(self._placed(first[0])), batches, reuse
        )
        return self._block(passes, k, plan, 1, c / k)

    def _passes(
        self, plan: Plan, n: int, k: int, copies: int, batches: Callable[[], Iterable], reuse: bool
    ) -> Passes:
        """Both passes over some data; with `reuse`, the first one only, kept for prior, noise and
        temperature.
        """
        in_network = (
            [] if reuse else [p for p in self._hyper_in_network.values() if p.requires_grad]
        )
        leaves: list[Tensor] = [] if reuse else [*in_network, *self.likelihood.root_parameters()]
        in_augment = self.augment is not None and any(
            p.requires_grad for p in self.augment.parameters()
        )
        _refuse_hooks([*leaves, *(self.augment.parameters() if self.augment is not None else ())])
        problem = self._problem(plan, n, k, copies)
        parts = parts_of(self.structure, problem)
        again = torch.is_grad_enabled() and not reuse and bool(leaves or in_augment)
        arrangement = self._budget.arrange(problem, parts, again=again)
        self._budget.check(self.structure, problem, arrangement, again=again)
        kind = Passes if self.ranks is None else partial(ShardedPasses, ranks=self.ranks)
        return kind(
            plan,
            parts,
            self._rows(plan, k),
            batches,
            self.augment,
            n_data=n,
            seed=self._seed(),
            fast=self._fast,
            arrangement=arrangement,
            network_leaves=leaves,
            hyper_in_network=bool(in_network),
            differentiate_augmentation=not reuse,
            reuse=reuse,
        )

    def _block(
        self, passes: Passes, k: int, plan: Plan, n_data_blocks: float, n_column_blocks: float
    ) -> PreparedBlock:
        true_root = (
            self.root != "paper" or self.likelihood.diagonal or k == plan.output_shape.numel()
        )
        status = status_of(
            self.structure, true_root, everything=n_data_blocks * n_column_blocks == 1
        )
        check_weights(self.model)
        squares = self.prior.squares(self.weights)
        return PreparedBlock(
            passes, plan.output_shape, n_data_blocks, n_column_blocks, status, squares
        )

    def _reusable(self, prepare: Callable[[], PreparedBlock]) -> Callable[[], Evidence]:
        if self.likelihood.root_parameters():
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
            if not passes.summary_depends_on_precision:
                mixing = passes.root_rows.mixing(f, *passes.rows_of_data)
                block.log_dets = [
                    p.settled(s, mixing) for p, s in zip(passes.parts, parts, strict=True)
                ]
                keep = self.likelihood.constant_log_prob and self._fast.kept_log_prob
                block.f, block.log_prob = f, block.log_prob_of(f, self.likelihood) if keep else None
        return block

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
        passes, log_precision = block.passes, self.prior.log_precision
        self.prior.check_precision()
        self.likelihood.check_scales()
        theta = log_precision.double()
        scale = self.likelihood.curvature_scale()
        f = block.f
        if f is not None:
            log_dets = [settled(scale, theta) for settled in block.log_dets]
        else:
            f, parts = statistics(passes, log_precision)
            mixing = passes.root_rows.mixing(f, *passes.rows_of_data)
            log_dets = [
                p.log_det_ratio(s, mixing, scale, theta)
                for p, s in zip(passes.parts, parts, strict=True)
            ]
        log_prob = (
            block.log_prob_of(f, self.likelihood) if block.log_prob is None else block.log_prob
        )
        return Evidence(
            log_likelihood=block.n_data_blocks * log_prob * self.likelihood.inverse_temperature,
            scatter=self.prior.scatter(block.squares),
            log_det_ratio=block.n_blocks
            * (torch.stack(log_dets).sum() if len(log_dets) > 1 else log_dets[0]),
            n_blocks=block.n_blocks,
            status=block.status,
        )

    def _seed(self) -> int:
        return int(torch.randint(2**31, (), generator=self.generator))

    def _placed(self, x: Any) -> Any:
        device = next(iter(self.model.parameters())).device
        return map_inputs(lambda t: checks.ordinary(t).to(device), x)


_MANY_PATHS = (
    "the model uses its weights differently from one data point to the next (data-dependent "
    "control flow); evaluate such data in separate blocks"
)


def _refuse_hooks(leaves: Iterable[Tensor]) -> None:
    """Hooks on hyperparameters behind the outputs would act inside the estimate, and again on its
    result.
    """
    if any(leaf._backward_hooks for leaf in leaves):
        raise MarglikError(
            "a hyperparameter of the network, the likelihood or the augmentation has a gradient "
            "hook, which would act twice; remove it and change the gradient after backward() "
            "instead"
        )
