"""Plans follow the data and the weights."""

import copy

import pytest
import torch
from marginal_likelihoods import STRUCTURES, X, Y, by_name, close, marglik
from small_networks import filled, randn
from torch import nn

from asdl_marglik import make_plan, trainable
from laplace_marglik import MarglikError

every_structure = pytest.mark.parametrize("structure", STRUCTURES)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.up(x) if x.sum() > 0 else self.down(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.attention(x, x, x, need_weights=False)[0]).mean(1))


@every_structure
@pytest.mark.parametrize(
    "model, before, after",
    [
        (Branches, X.abs(), -X.abs()),
        (Attention, randn(6, 1, 4), randn(6, 3, 4)),  # sequences of another length
        (Attention, randn(6, 5, 4), randn(6, 2, 4)),
        # data points that cannot be told apart
        (Attention, torch.ones(6, 3, 4).double(), randn(6, 3, 4)),
        (Attention, torch.zeros(6, 1, 4).double(), randn(6, 1, 4)),
    ],
    ids=["another path", "longer", "shorter", "constant", "zero"],
)
def test_values_do_not_depend_on_earlier_data(structure, model, before, after):
    model = filled(model())
    used, fresh = marglik(model, structure=structure), marglik(model, structure=structure)
    used(before, Y)
    close(used(after, Y).total, fresh(after, Y).total)


@every_structure
@pytest.mark.parametrize("zero", [["head"], ["attention.out_proj", "head"]], ids=" ".join)
def test_values_do_not_depend_on_earlier_weights(structure, zero):
    """Layers initialised with zeros hide what the layers before them do."""
    model, x = filled(Attention()), randn(6, 3, 4)
    trained = copy.deepcopy(model.state_dict())
    for name in zero:
        for p in model.get_submodule(name).parameters():
            nn.init.zeros_(p)
    ml = marglik(model, structure=structure)
    ml(x, Y)
    model.load_state_dict(trained)
    close(ml(x, Y).total, marglik(model, structure=structure)(x, Y).total)


def test_paths_that_change_within_a_block_are_refused():
    with pytest.raises(MarglikError, match=r"control flow.*separate blocks"):
        marglik(filled(Branches()), chunk=3)(torch.cat([X[:3].abs(), -X[3:].abs()]), Y)


def test_positional_embeddings_need_no_pass_per_datum():
    """Outputs [1, T, D] for all data are repeated, so that each datum has its own cotangent."""
    model, x, _ = by_name["position_numbers"].make()
    plan = make_plan(model, trainable(model), x)
    assert not plan.persample and len(plan.repeated) == 2
    model, x, _ = by_name["positions"].make()  # [T, D]: no axis to repeat along
    assert make_plan(model, trainable(model), x).persample


class NeedsOne(nn.Module):
    """Uses the axis of length one of its positions in a way that repeating would break."""

    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        p = self.position(torch.arange(4).unsqueeze(0))
        return self.head(x + p.squeeze(0).mean(0) * len(p))


def test_positions_that_cannot_be_repeated_are_left_to_single_data():
    model = NeedsOne().double()
    plan = make_plan(model, trainable(model), randn(3, 3))
    assert plan.persample == {"position.weight"} and not plan.repeated
