"""Uses of weights as they are recorded in a forward pass."""

import pytest
import torch
from small_networks import mlp, randn
from torch import nn
from torch.nn import functional as F

from asdl_marglik import CurvatureError
from asdl_marglik.watch.record import Recorder

pytestmark = pytest.mark.quick


def recorded(model, x, **options):
    recorder = Recorder(dict(model.named_parameters()), **options)
    with recorder:
        model(x)
    return recorder


class Written(nn.Module):
    """A network as a function of its weights, its first layer used twice."""

    def __init__(self, forward):
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(4, 4)), nn.Parameter(randn(4, seed=1))
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def test_every_call_with_a_weight_is_a_use_in_order():
    x = randn(5, 4)
    recorder = recorded(mlp(), x)
    names = [use.names for use in recorder.uses]
    assert names == [{"weight": f"{i}.weight", "bias": f"{i}.bias"} for i in (0, 2)]
    assert recorder.uses[0].input is x and recorder.uses[1].shape == (5, 3)
    assert recorder.opaque == set()
    assert recorder.seen == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_weight_used_twice_has_two_uses():
    model = Written(lambda m, x: F.linear(F.linear(x, m.weight), m.weight, m.bias))
    names = [use.names for use in recorded(model, randn(5, 4)).uses]
    assert names == [{"weight": "weight"}, {"weight": "weight", "bias": "bias"}]


def test_a_weight_in_a_call_without_a_rule_is_opaque():
    model = Written(lambda m, x: x @ torch.matrix_exp(m.weight) + m.bias)
    recorder = recorded(model, randn(5, 4))
    assert recorder.opaque == {"weight"}
    assert [use.names for use in recorder.uses] == [{"weight": "bias"}]  # a factor or a summand
    assert recorder.seen == {"weight", "bias"}


def test_questions_about_a_weight_are_no_uses():
    model = Written(lambda m, x: x * m.weight.shape[0] + m.bias.dim())
    recorder = recorded(model, randn(5, 4))
    assert not recorder.uses and not recorder.seen


def test_composites_are_looked_into():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = randn(2, 3, 4)
    recorder = Recorder(dict(attention.named_parameters()))
    with recorder:
        attention(x, x, x, need_weights=False)
    assert not recorder.opaque
    assert {name for use in recorder.uses for name in use.names.values()} == recorder.seen


def test_an_input_that_was_overwritten_is_refused():
    x = randn(5, 4)
    recorder = recorded(mlp(), x)
    x.mul_(2)
    with pytest.raises(CurvatureError, match=r"0\.weight.*modified in place"):
        _ = recorder.uses[0].input


def test_outputs_are_kept_for_the_planner_alone():
    model, x = mlp(), randn(5, 4)
    assert all(use.output is None for use in recorded(model, x).uses)
    kept = recorded(model, x, keep_outputs=True).uses[1]
    torch.testing.assert_close(kept.output, model(x).detach())
    forgotten = kept.without_graph()
    assert forgotten.edge is None and forgotten.call.input is None
