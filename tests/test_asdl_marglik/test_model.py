"""The user's model keeps its modes and random state, and changes of its values are noticed."""

import pytest
import torch
from small_networks import mlp, randn
from torch import nn

from asdl_marglik import (
    checksum,
    constant_besides,
    evaluating,
    map_inputs,
    matches,
    seeded,
    taken,
    trainable,
)
from asdl_marglik.watch.model import fingerprint, hyperparameters_in

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")


def test_modes_are_restored_after_an_exception():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    model[1].eval()
    modes = []

    def fail():
        modes.extend(module.training for module in model.modules())
        raise KeyError

    with pytest.raises(KeyError), evaluating(model):
        fail()
    assert modes == [False] * 3
    assert model.training and model[0].training and not model[1].training


def test_seeds_decide_inside_and_leave_the_state_outside():
    before = torch.get_rng_state()
    draws = []
    for seed in (1, 1, 2):
        with seeded(seed, CPU):
            draws.append(torch.randn(3))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), before)


CHANGES = {
    "one bit": lambda t: t.view(-1)[3].mul_(1 + 1e-15),
    "a sign": lambda t: t.view(-1)[3].neg_(),
    "all signs": lambda t: t.neg_(),
    "order": lambda t: t.copy_(t.flip(0)),
    "nothing": lambda t: t,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checksum_notices_every_change(change):
    t = randn(5, 4)
    before = checksum([t])
    CHANGES[change](t)
    assert torch.equal(checksum([t]), before) == (change == "nothing")


def test_fingerprints_are_entries_of_every_tensor():
    x = {"a": randn(4, 3), "b": torch.arange(4)}
    assert len(fingerprint(x)) == 16
    assert len(fingerprint(randn(100, 100), entries=10)) <= 11
    changed = {**x, "b": torch.arange(4) + 1}
    assert not torch.equal(fingerprint(x), fingerprint(changed))


def test_inputs_are_tensors_or_mappings_of_them():
    x = {"a": randn(4, 3), "b": torch.arange(4)}
    assert map_inputs(len, x) == {"a": 4, "b": 4} and map_inputs(len, x["a"]) == 4
    assert torch.equal(taken(x, slice(1, 3))["b"], torch.tensor([1, 2]))


def test_weights_and_hyperparameters_share_the_parameters_that_are_learned():
    model = mlp()
    model[2].bias.requires_grad_(False)
    assert list(trainable(model, ["0.b*"])) == ["0.weight", "2.weight"]
    assert list(hyperparameters_in(model, ["0.b*"])) == ["0.bias"]
    assert matches("0.bias", ["*weight", "0.*"]) and not matches("2.bias", ["0.*"])


def test_checksums_of_many_tensors_are_those_of_each_alone():
    sizes = (12, 70_000, 5, 1, 60_000, 60_000, 0, 200_000)
    tensors = [torch.randn(n) for n in sizes] + [torch.randn(3).double(), torch.randn(4, 6).t()]
    alone = torch.cat([checksum([t]) for t in tensors])
    assert torch.equal(checksum(tensors), alone)


def test_other_parameters_are_constant_inside_only():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    seen = []

    def fail():
        with constant_besides(model[1].parameters(), model):
            seen.extend(p.requires_grad for p in model.parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [False, False, True, True]
    assert [p.requires_grad for p in model.parameters()] == before
