"""How each weight of a model gets its Jacobian rows: decided once, on two data points.

Every choice is checked there: the batch axis of each operation against the data points run alone,
the rows of each weight against plain per-datum gradients. A weight whose rows do not pass is left
to the per-sample path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asdl_marglik.errors import CurvatureError
from asdl_marglik.passes.forward import Chunk
from asdl_marglik.passes.root_rows import Selection
from asdl_marglik.watch.batch_axis import Layout, find_layout
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
from asdl_marglik.watch.network import Network, check_autocast
from asdl_marglik.watch.persample import averaged_output, gradients, leaves_of
from asdl_marglik.watch.plan import Plan, signature_of
from asdl_marglik.watch.record import Recorder, Use

# Two ways to compute the same numbers differ by rounding, which in float32 and a deep network is
# far below these tolerances; a wrong formula, batch axis or datum is far above.
SAME = 1e-3  # for outputs: relative to the entry and to the largest entry
SAME_ROWS = 2e-3  # for rows, after one more pass through the network: the same
NEGLIGIBLE = 1e-6  # for rows that are all nearly zero: relative to the largest row of any weight


@dataclass
class _JointPass:
    """What the pass of the two data points together tells."""

    recorder: Recorder
    outputs: Tensor  # [2, ...]
    writes_inputs: bool
    bytes_per_input: int


@dataclass
class _ThreePasses:
    """The pass of two data points together, and that of each alone."""

    joint: _JointPass
    alone: list[Recorder]
    outputs_alone: Tensor  # [2, ...]
    repeated: frozenset[int] = frozenset()


def make_plan(model: nn.Module, weights: dict[str, nn.Parameter], x: Inputs) -> Plan:
    """How each weight of a model gets its Jacobian rows, checked on the first two data points.

    Args:
        model: the user's model, in evaluation mode.
        weights: its weights by name.
        x: inputs [n, ...].
    """
    model = Network.of(model)
    check_hooks(model)
    _refuse_batch_statistics(model)
    pair = _two_points(x)
    passes = _three_passes(model, weights, pair)
    check_weights(model)
    check_inputs(pair)
    _refuse_mixing(model, pair, passes.joint.outputs, passes.outputs_alone)
    repeated = _uses_without_batch(passes)
    if repeated:
        passes = _with_repeated(model, weights, pair, passes, repeated)
    plan = _candidate(model, weights, passes)
    _verify_rows(plan, pair)
    plan.piecewise_linear = _is_piecewise_linear(plan, pair)
    # with two equal data points nothing tells batch and positions apart
    plan.provisional |= all(torch.equal(t[0], t[1]) for t in tensors_of(pair))
    return plan


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Raise an error for a batch norm that has nothing but the statistics of the batch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise CurvatureError(
                f"module {name!r} ({type(module).__name__}) keeps no running statistics and "
                "normalises by those of the batch, so that a datum's output depends on the "
                "others; use track_running_stats=True, or another norm"
            )


def _refuse_mixing(model: nn.Module, pair: Inputs, outputs: Tensor, alone: Tensor) -> None:
    """Raise an error if the output of a datum depends on the others: it has no Jacobian then.

    Args:
        model: the user's model.
        pair: inputs of two data points.
        outputs: their outputs [2, ...] in one batch.
        alone: their outputs [2, ...], each from a batch of its own.
    """
    with torch.no_grad():
        atol = SAME * float(outputs.detach().abs().max())
        if outputs.shape != alone.shape or torch.allclose(outputs, alone, SAME, atol):
            return
        again = run(model, copied(pair))
        if not torch.allclose(outputs, again, SAME, atol):
            return  # the model is random: nothing can be said
    raise CurvatureError(
        "the model's output for a datum changes with the other data of its batch (batch "
        "statistics?); the evidence needs outputs of each datum alone"
    )


def _two_points(x: Inputs) -> Inputs:
    """The first two data points; a single one is paired with a flipped copy of itself."""
    if len(tensors_of(x)[0]) >= 2:
        return map_inputs(lambda t: t[:2], x)
    return map_inputs(lambda t: torch.cat([t, t.flip(-1) if t.dim() > 1 else t]), x)


def _three_passes(
    model: nn.Module,
    weights: dict[str, nn.Parameter],
    pair: Inputs,
    repeated: frozenset[int] = frozenset(),
) -> _ThreePasses:
    """The passes that a plan is made of; repeated: as of a `Recorder`."""
    joint = _together(model, weights, pair, repeated)
    alone = [_alone(model, weights, taken(pair, slice(i, i + 1)), repeated) for i in range(2)]
    outputs = torch.cat([outputs for _, outputs in alone])
    return _ThreePasses(joint, [recorder for recorder, _ in alone], outputs, repeated)


def _uses_without_batch(passes: _ThreePasses) -> frozenset[int]:
    """Uses that compute the same [1, ...] for all data, as positional embeddings do."""
    joint, (first, second) = passes.joint.recorder, passes.alone
    if any(signature_of(single) != signature_of(joint) for single in passes.alone):
        return frozenset()
    found = set()
    for index, uses in enumerate(zip(joint.uses, first.uses, second.uses, strict=True)):
        outputs = [use.output for use in uses]
        if (
            all(t is not None and t.dim() > 1 and len(t) == 1 for t in outputs)
            and all(
                torch.equal(outputs[0], t)  # type: ignore[arg-type]
                for t in outputs[1:]
            )
        ):
            found.add(index)
    return frozenset(found)


def _with_repeated(
    model: nn.Module,
    weights: dict[str, nn.Parameter],
    pair: Inputs,
    plain_passes: _ThreePasses,
    repeated: frozenset[int],
) -> _ThreePasses:
    """The passes with outputs repeated for all data; as they were, if that changes anything."""
    try:
        passes = _three_passes(model, weights, pair, repeated)
    except (RuntimeError, ValueError, CurvatureError):  # the model needs the axis of length one
        return plain_passes
    outputs, before = passes.joint.outputs, plain_passes.joint.outputs
    same = outputs.shape == before.shape and torch.allclose(
        outputs, before, SAME, SAME * float(before.detach().abs().max())
    )
    return passes if same else plain_passes


def _together(
    model: nn.Module,
    weights: dict[str, nn.Parameter],
    pair: Inputs,
    repeated: frozenset[int],
) -> _JointPass:
    """The pass of the two data points in one batch."""
    inputs = copied(pair)
    before = versions(tensors_of(inputs))
    parameter_bytes = sum(p.untyped_storage().nbytes() for p in model.parameters())
    saved_bytes: dict[int, int] = {}  # by address of the storage

    def count(t: Tensor) -> Tensor:
        check_autocast(t.device)
        storage = t.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return t

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
        Recorder(weights, keep_outputs=True, repeated=repeated, batch=2) as recorder,
    ):
        outputs = model(inputs)
    activation_bytes = sum(saved_bytes.values()) - parameter_bytes
    return _JointPass(
        recorder,
        checked_outputs(outputs, 2),
        writes_inputs=versions(tensors_of(inputs)) != before,
        bytes_per_input=max(1, activation_bytes // 2),
    )


def _alone(
    model: nn.Module, weights: dict[str, nn.Parameter], x: Inputs, repeated: frozenset[int]
) -> tuple[Recorder, Tensor]:
    """The pass of a single datum, and its outputs."""
    try:
        watch = Recorder(weights, keep_outputs=True, repeated=repeated, batch=1)
        with torch.enable_grad(), watch as recorder:
            outputs = model(copied(x))
    except (RuntimeError, ValueError) as error:
        raise CurvatureError(
            f"the model runs on two data points but not on one ({error}); the evidence needs "
            "outputs of each datum alone: no statistics of the batch, no fixed batch size"
        ) from error
    return recorder, checked_outputs(outputs, 1).detach()


def _candidate(model: nn.Module, weights: dict[str, nn.Parameter], passes: _ThreePasses) -> Plan:
    """The plan as the recorded passes suggest it, before its rows are verified."""
    joint = passes.joint
    uses = joint.recorder.uses
    layouts = _layouts(joint.recorder, passes.alone)
    uses_of: dict[str, list[tuple[int, str]]] = {name: [] for name in weights}
    persample = joint.recorder.opaque | (weights.keys() - joint.recorder.seen)
    for index, (use, layout) in enumerate(zip(uses, layouts, strict=True)):
        for role, name in use.names.items():
            uses_of[name].append((index, role))
        if layout is None:
            persample.update(use.names.values())
    kronecker = {
        name
        for name, places in uses_of.items()
        if name not in persample and _has_factors(uses, places)
    }
    return Plan(
        model,
        weights,
        output_shape=joint.outputs.shape[1:],
        signature=signature_of(joint.recorder),
        layouts=layouts,
        uses_of=uses_of,
        kronecker=kronecker,
        factor_sides={
            name: _sides(uses, uses_of[name], weights[name])
            for name in kronecker
            if _has_one_channel_group(uses, uses_of[name])
        },
        positions={name: _n_positions(uses, uses_of[name], weights[name]) for name in kronecker},
        has_input=[use.call.input is not None for use in uses],
        rules={name: " + ".join(_rules_of(uses, places)) for name, places in uses_of.items()},
        persample=persample,
        repeated=passes.repeated,
        writes_inputs=joint.writes_inputs,
        bytes_per_input=joint.bytes_per_input,
        bytes_of_uses=_bytes_of(uses, joint.outputs.element_size()),
    )


def _layouts(joint: Recorder, alone: list[Recorder]) -> list[Layout | None]:
    """For each use, the layout of its output; None where the data points cannot be told."""
    signature = signature_of(joint)
    if any(signature_of(single) != signature for single in alone):
        return [None for _ in joint.uses]
    first, second = (single.uses for single in alone)
    return [_layout(*uses) for uses in zip(joint.uses, first, second, strict=True)]


def _layout(both: Use, first: Use, second: Use) -> Layout | None:
    """The layout of one use, from the passes of both data points and of each alone."""
    assert both.output is not None and first.output is not None and second.output is not None
    layout = find_layout(both.output, (first.output, second.output))
    if layout is not None and both.rule.batch_first_only and layout.axis != 0:
        return None
    return layout


def _rules_of(uses: list[Use], places: list[tuple[int, str]]) -> list[str]:
    """The names of the rules of a weight's uses, each once."""
    return sorted({uses[index].rule.name for index, _ in places})


def _has_factors(uses: list[Use], places: list[tuple[int, str]]) -> bool:
    """Whether a weight has Kronecker factors, of one kind in all of its uses."""
    roles = {role for _, role in places}
    if len(roles) != 1 or len(_rules_of(uses, places)) != 1:
        return False
    return all(uses[index].rule.has_factors(uses[index].call, role) for index, role in places)


def _has_one_channel_group(uses: list[Use], places: list[tuple[int, str]]) -> bool:
    """Whether all uses of a weight have a single channel group."""
    return all(uses[index].call.options.get("groups", 1) == 1 for index, _ in places)


def _n_positions(uses: list[Use], places: list[tuple[int, str]], weight: Tensor) -> int:
    """Shared positions T per input of all uses of a weight with factors."""
    entries = sum(uses[index].shape.numel() for index, _ in places)
    n_outputs, _ = _sides(uses, places, weight)
    return entries // (2 * n_outputs)


def _sides(uses: list[Use], places: list[tuple[int, str]], weight: Tensor) -> tuple[int, int]:
    """Outputs O and inputs D of the linear map that a weight is, or is the bias of."""
    index, _ = places[0]
    n_outputs = weight.shape[uses[index].rule.output_axis if weight.dim() > 1 else 0]
    return n_outputs, weight.numel() // n_outputs


def _bytes_of(uses: list[Use], output_bytes: int) -> tuple[int, int]:
    """Bytes per input of the inputs and of the outputs of all uses.

    Args:
        uses: of the pass of two data points.
        output_bytes: of one number.
    """
    inputs = [use.call.input for use in uses if use.call.input is not None]
    of_inputs = sum(t.numel() * t.element_size() for t in inputs)
    of_outputs = sum(use.shape.numel() for use in uses) * output_bytes
    return of_inputs // 2, of_outputs // 2


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
    """One row of each of the two data points, for a random cotangent of its outputs."""
    with torch.no_grad():
        outputs = run(plan.model, copied(pair))
        outputs = outputs.reshape(len(outputs), -1)
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, outputs.shape[1])
    constants = torch.randn(shape, generator=generator, dtype=torch.float64).to(outputs)
    data = torch.arange(2, device=outputs.device)
    return Selection(_ConstantCotangents(constants), data, torch.zeros(2, 1))


def _verify_rows(plan: Plan, pair: Inputs) -> None:
    """Leave weights whose rows differ from plain per-datum gradients to the per-sample path."""
    selection = _selection(plan, pair)
    with torch.enable_grad():
        chunk = Chunk(plan, map_inputs(lambda t: t.unsqueeze(1), pair), selection)
        expected = _plain_rows(plan, pair, selection)
    largest = max(float(rows.abs().max()) for rows in expected.values())
    for name, expected_rows in expected.items():
        if name in plan.persample:
            continue
        if not _same_rows(chunk, name, expected_rows, largest):
            plan.persample.add(name)
        plan.provisional |= not expected_rows.any()
    plan.kronecker -= plan.persample
    for name in plan.persample:
        plan.rules[name] = "per-sample"
    by_rule = plan.weights.keys() - plan.persample
    needed = {index for name in by_rule for index, _ in plan.uses_of[name]}
    plan.layouts = [layout if i in needed else None for i, layout in enumerate(plan.layouts)]


def _plain_rows(plan: Plan, pair: Inputs, selection: Selection) -> dict[str, Tensor]:
    """Rows [2, *shape] of each weight, by a backward pass for each of the two data points."""
    leaves = leaves_of(plan.weights)
    parameters = list(leaves.values())
    rows = []
    for i in range(2):
        f = averaged_output(plan.model, leaves, taken(pair, slice(i, i + 1)))
        cotangent = selection.of(i).cotangents(f)[0, 0]
        rows.append(gradients(f, parameters, cotangent))
    return {name: torch.stack(both) for name, *both in zip(leaves, *rows, strict=True)}


def _same_rows(chunk: Chunk, name: str, expected: Tensor, largest: float) -> bool:
    """Whether the rows that the rules give are those expected, up to rounding.

    Args:
        chunk: the pass of the two data points.
        name: of the weight.
        expected: its rows [2, *shape].
        largest: entry of the rows of any weight.
    """
    try:
        rows = chunk.rows(name)[:, 0]
    except RuntimeError:  # shapes outside what the rule covers
        return False
    atol = SAME_ROWS * float(expected.abs().max()) + NEGLIGIBLE * largest
    return torch.allclose(rows, expected, rtol=SAME_ROWS, atol=atol)


def _is_piecewise_linear(plan: Plan, pair: Inputs) -> bool:
    """Whether the network is piecewise linear in its inputs, as the graph of the pair says."""
    if not all(t.is_floating_point() for t in tensors_of(pair)):
        return False
    selection = _selection(plan, pair)
    with torch.enable_grad():
        x = map_inputs(lambda t: t.detach().unsqueeze(1).requires_grad_(), pair)
        chunk = Chunk(plan, x, selection, differentiate="where needed")
    return not chunk.differentiable
