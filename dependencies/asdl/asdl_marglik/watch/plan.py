"""Where the rows of each weight come from, for one model and one kind of input."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from asdl_marglik.watch.batch_axis import Layout
from asdl_marglik.watch.record import Recorder, Use

# one entry per use: the name of its rule, and the roles and names of its weights
Signature = list[tuple[str, tuple[tuple[str, str], ...]]]


@dataclass
class Plan:
    """Where the rows of each weight come from, for one model and one kind of input.

    A use is one call of an operation with weights; uses are numbered in order of execution.

    Args:
        model: the user's model.
        weights: its weights by name.
        output_shape: shape of the outputs of one datum.
        signature: what a pass has to look like for the plan to hold.
        layouts: for each use, where its output has the data points; None: it is not followed.
        uses_of: for each weight, the numbers of its uses and its role in them.
        kronecker: weights whose uses all have Kronecker factors.
        factor_sides: sides (O, D) of the factors of weights with a single channel group.
        positions: shared positions T per input, over all uses of a weight with factors.
        has_input: for each use, whether its rows depend on its input.
        rules: for each weight, the names of the rules behind its rows, as shown to users.
        persample: weights whose rows are computed datum by datum.
        repeated: uses that compute the same for all data, whose outputs are repeated for each.
        piecewise_linear: whether the network is, in its inputs, on the two data points of the plan;
            every pass looks at its own graph.
        writes_inputs: whether the model changes its inputs in place.
        provisional: whether all cotangents were zero (a zero-initialised last layer) or the two
            data points equal, so that the checks say nothing yet.
        bytes_per_input: activations that the graph of the outputs holds, per input.
        bytes_of_uses: inputs and outputs of all uses, per input.
    """

    model: nn.Module
    weights: dict[str, nn.Parameter]
    output_shape: torch.Size
    signature: Signature
    layouts: list[Layout | None]
    uses_of: dict[str, list[tuple[int, str]]]
    kronecker: set[str]
    factor_sides: dict[str, tuple[int, int]]
    positions: dict[str, int]
    has_input: list[bool]
    rules: dict[str, str]
    persample: set[str] = field(default_factory=set)
    repeated: frozenset[int] = frozenset()
    piecewise_linear: bool = False
    writes_inputs: bool = False
    provisional: bool = False
    bytes_per_input: int = 0
    bytes_of_uses: tuple[int, int] = (0, 0)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def matched(self, recorder: Recorder, batch: int) -> list[tuple[Use, Layout | None]]:
        """The uses of a pass with their layouts; `PlanChanged` if it is not as planned.

        Args:
            recorder: of the pass.
            batch: number of inputs of the network, augmented copies included.
        """
        if self.persample == set(self.weights):
            return []  # datum by datum, nothing is read off the pass
        if signature_of(recorder) != self.signature or not recorder.opaque <= self.persample:
            raise PlanChanged
        uses = list(zip(recorder.uses, self.layouts, strict=True))
        for use, layout in uses:
            if layout is None:
                continue
            # no more positions than the layouts were found for
            if layout.single and use.shape[layout.axis] != batch:
                raise PlanChanged
            use.call.axis = layout.axis
        return uses


class PlanChanged(Exception):
    """The model took another path than when it was planned: plan again on the new data."""


def signature_of(recorder: Recorder) -> Signature:
    """The rules and weights of all uses of a pass, in order."""
    return [(use.rule.name, tuple(use.names.items())) for use in recorder.uses]
