"""Plans follow the data and the weights."""

import copy

import pytest
import torch
from marginal_likelihoods import STRUCTURES, X, Y, close, marglik
from small_networks import filled, randn
from torch import nn

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
