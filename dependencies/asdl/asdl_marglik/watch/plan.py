"""Where the rows of each weight come from, for one model and one kind of input."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from asdl_marglik.watch.batch_axis import Layout
from asdl_marglik.watch.record import Recorder, Use


@dataclass
class Plan:
    """Where the rows of each weight come from, for one model and one kind of input."""

    model: nn.Module
    weights: dict[str, nn.Parameter]
    output_shape: torch.Size  # of one datum
    signature: list[tuple[str, tuple[tuple[str, str], ...]]]
    layouts: list[Layout | None]
    uses_of: dict[str, list[tuple[int, str]]]  # weight -> (index of the use, role in it)
    kronecker: set[str]  # weights whose uses all have Kronecker factors
    factor_sides: dict[str, tuple[int, int]]  # (O, D) of those with a single group
    positions: dict[str, int]  # their shared positions T per input, over all uses
    has_input: list[bool]  # whether the rows of a use depend on its input
    rules: dict[str, str]  # weight -> how its rows are computed, for people
    persample: set[str] = field(default_factory=set)
    # in the inputs, on the two data points; every pass looks at its own graph
    piecewise_linear: bool = False
    writes_inputs: bool = False  # the model changes its inputs in place
    # all cotangents were zero (a zero-initialised last layer): the checks say nothing yet
    provisional: bool = False
    bytes_per_input: int = 0  # activations that the graph of the outputs holds
    # inputs and outputs of all operations with weights, per input
    bytes_of_uses: tuple[int, int] = (0, 0)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def matched(self, recorder: Recorder, batch: int) -> list[tuple[Use, Layout | None]]:
        """The uses of a pass with their layouts; refuses a pass that used the weights in another
        way than planned.
        """
        if self.persample == set(self.weights):
            return []  # each datum goes its own way
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


def signature_of(recorder: Recorder) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(use.rule.name, tuple(use.names.items())) for use in recorder.uses]
