"""How each weight of a model gets its Jacobian rows: decided once, by running the model on two data
points.

Every choice is checked there: the batch axis of each operation against the data points run alone,
the rows of each weight against plain per-datum gradients. A weight whose rows do not pass goes the
per-sample way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asdl_marglik.errors import CurvatureError
from asdl_marglik.passes.forward import Chunk
from asdl_marglik.passes.root_rows import Selection
from asdl_marglik.watch.batch_axis import find_layout
from asdl_marglik.watch.model import (
    Inputs,
    check_hooks,
    check_inputs,
    check_weights,
    checked_outputs,
    copied,
    map_inputs,
    run,
    taken,
    tensors_of,
    versions,
)
from asdl_marglik.watch.persample import averaged_output, gradients, leaves_of
from asdl_marglik.watch.plan import Plan, signature_of
from asdl_marglik.watch.record import Recorder

# float32 rounding in a deep network is far below these, another formula far above
SAME = 1e-3  # relative difference of outputs that count as equal
SAME_ROWS = 2e-3  # and of rows
NEGLIGIBLE = 1e-6  # of the largest row, for a weight whose rows are all nearly zero


def make_plan(model: nn.Module, weights: dict[str, nn.Parameter], x: Inputs) -> Plan:
    """Plan for a model in evaluation mode, from the first data points of x [n, ...]."""
    check_hooks(model)
    _refuse_batch_statistics(model)
    pair = _two_points(x)
    given = copied(pair)
    before = versions(tensors_of(given))
    fixed = sum(p.untyped_storage().nbytes() for p in model.parameters())
    saved: dict[int, int] = {}

    def count(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
        Recorder(weights, keep_outputs=True) as joint,
    ):
        outputs = model(given)
    outputs = checked_outputs(outputs, 2)
    alone = [_alone(model, weights, taken(pair, slice(i, i + 1))) for i in range(2)]
    check_weights(model)
    check_inputs(pair)
    _refuse_mixing(model, pair, outputs, torch.cat([f for _, f in alone]))
    plan = _candidate(model, weights, outputs.shape[1:], joint, [recorder for recorder, _ in alone])
    plan.writes_inputs = versions(tensors_of(given)) != before
    plan.bytes_per_input = max(1, (sum(saved.values()) - fixed) // 2)
    inputs = [use.call.input for use in joint.uses if use.call.input is not None]
    plan.bytes_of_uses = (
        sum(t.numel() * t.element_size() for t in inputs) // 2,
        sum(use.shape.numel() for use in joint.uses) * outputs.element_size() // 2,
    )
    _verify_rows(plan, pair)
    plan.piecewise_linear = _is_piecewise_linear(plan, pair)
    # nothing tells the two apart
    plan.provisional |= all(torch.equal(t[0], t[1]) for t in tensors_of(pair))
    return plan


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise CurvatureError(
                f"module {name!r} ({type(module).__name__}) keeps no running statistics and "
                "normalises by those of the batch, so that a datum's output depends on the "
                "others; use track_running_stats=True, or another norm"
            )


def _refuse_mixing(model: nn.Module, pair: Inputs, outputs: Tensor, singles: Tensor) -> None:
    """Refuse a model whose output for a datum depends on the others in its batch: it has no
    per-datum Jacobian.
    """
    with torch.no_grad():
        atol = SAME * float(outputs.detach().abs().max())
        if outputs.shape != singles.shape or torch.allclose(outputs, singles, SAME, atol):
            return
        # else it is random: nothing can be said
        if torch.allclose(outputs, run(model, copied(pair)), SAME, atol):
            raise CurvatureError(
                "the model's output for a datum changes with the other data of its batch (batch "
                "statistics?); the evidence needs outputs of each datum alone"
            )


def _two_points(x: Inputs) -> Inputs:
    if len(tensors_of(x)[0]) >= 2:
        return map_inputs(lambda t: t[:2], x)
    # a single datum: pair it with a shuffled copy, so that the two can be told apart
    return map_inputs(lambda t: torch.cat([t, t.flip(-1) if t.dim() > 1 else t]), x)


def _alone(
    model: nn.Module, weights: dict[str, nn.Parameter], x: Inputs
) -> tuple[Recorder, Tensor]:
    """The pass of a single datum, and its outputs."""
    try:
        with torch.enable_grad(), Recorder(weights, keep_outputs=True) as recorder:
            outputs = model(copied(x))
    except (RuntimeError, ValueError) as error:
        raise CurvatureError(
            f"the model runs on two data points but not on one ({error}); the evidence needs "
            "outputs of each datum alone: no statistics of the batch, no fixed batch size"
        ) from error
    return recorder, checked_outputs(outputs, 1).detach()


def _candidate(
    model: nn.Module,
    weights: dict[str, nn.Parameter],
    output_shape: torch.Size,
    joint: Recorder,
    alone: list[Recorder],
) -> Plan:
    signature, layouts = signature_of(joint), []
    persample = set(joint.opaque) | (set(weights) - joint.seen)
    comparable = all(signature_of(single) == signature for single in alone)
    uses_of: dict[str, list[tuple[int, str]]] = {name: [] for name in weights}
    without_factors: set[str] = set()
    for index, use in enumerate(joint.uses):
        layout = None
        if comparable and use.output is not None:
            first, second = (single.uses[index].output for single in alone)
            assert first is not None and second is not None
            layout = find_layout(use.output, (first, second))
        if layout is not None and use.rule.batch_first_only and layout.axis != 0:
            layout = None
        if layout is None:
            persample.update(use.names.values())
        layouts.append(layout)
        for role, name in use.names.items():
            uses_of[name].append((index, role))
            if not use.rule.has_factors(use.call, role):
                without_factors.add(name)
    rules = {
        name: " + ".join(sorted({joint.uses[i].rule.name for i, _ in uses}))
        for name, uses in uses_of.items()
    }
    kronecker = {
        name
        for name, uses in uses_of.items()
        if uses
        and name not in without_factors | persample
        and len({joint.uses[i].rule.name for i, _ in uses}) == 1
        and len({role for _, role in uses}) == 1
    }
    ungrouped = {
        n
        for n in kronecker
        if all(joint.uses[i].call.options.get("groups", 1) == 1 for i, _ in uses_of[n])
    }
    sides = {name: (len(weights[name]), weights[name][0].numel()) for name in ungrouped}
    positions = {
        name: sum(joint.uses[i].shape.numel() for i, _ in uses_of[name]) // (2 * len(weights[name]))
        for name in kronecker
    }
    has_input = [use.call.input is not None for use in joint.uses]
    plan = Plan(
        model,
        weights,
        output_shape,
        signature,
        layouts,
        uses_of,
        kronecker,
        sides,
        positions,
        has_input,
        rules,
    )
    plan.persample = persample
    return plan


@dataclass
class _ConstantCotangents:
    """Constant output cotangents [2, 1, C], no mixing: what the checks use."""

    constants: Tensor
    cotangents_follow_outputs = False

    def cotangents(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        return self.constants[y]

    def mixing(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        return None


def _selection(plan: Plan, pair: Inputs) -> Selection:
    with torch.no_grad():
        outputs = run(plan.model, copied(pair))
        outputs = outputs.reshape(len(outputs), -1)
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, outputs.shape[1])
    constants = torch.randn(shape, generator=generator, dtype=torch.float64).to(outputs)
    data = torch.arange(2, device=outputs.device)
    return Selection(_ConstantCotangents(constants), data, torch.zeros(2, 1))


def _verify_rows(plan: Plan, pair: Inputs) -> None:
    """Move every weight whose rows differ from its plain per-datum gradients to the per-sample
    path.
    """
    selection = _selection(plan, pair)
    leaves = leaves_of(plan.weights)
    with torch.enable_grad():
        chunk = Chunk(plan, map_inputs(lambda t: t.unsqueeze(1), pair), selection)
        expected = []
        for i in range(2):
            f = averaged_output(plan.model, leaves, taken(pair, slice(i, i + 1)))
            cotangent = selection.of(i).cotangents(f)[0, 0]
            expected.append(gradients(f, list(leaves.values()), cotangent))
    largest = max(float(g.abs().max()) for g in expected[0] + expected[1])
    for index, name in enumerate(plan.weights):
        if name in plan.persample:
            continue
        truth = torch.stack([expected[0][index], expected[1][index]])
        try:
            rows = chunk.rows(name)[:, 0]
        except RuntimeError:  # shapes outside what the rule covers
            rows = None
        atol = SAME_ROWS * float(truth.abs().max()) + NEGLIGIBLE * largest
        if rows is None or not torch.allclose(rows, truth, rtol=SAME_ROWS, atol=atol):
            plan.persample.add(name)
        plan.provisional |= not truth.any()
    plan.kronecker -= plan.persample
    used_fast = {
        i for name, uses in plan.uses_of.items() if name not in plan.persample for i, _ in uses
    }
    plan.layouts = [layout if i in used_fast else None for i, layout in enumerate(plan.layouts)]
    for name in plan.persample:
        plan.rules[name] = "per-sample"


def _is_piecewise_linear(plan: Plan, pair: Inputs) -> bool:
    """What the graph of the two data points says."""
    if not all(t.is_floating_point() for t in tensors_of(pair)):
        return False
    with torch.enable_grad():
        x = map_inputs(lambda t: t.detach().unsqueeze(1).requires_grad_(), pair)
        return not Chunk(
            plan, x, _selection(plan, pair), differentiate="where needed"
        ).differentiable
