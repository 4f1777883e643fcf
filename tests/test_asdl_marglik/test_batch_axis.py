"""Where the data points are in an activation, however the network lays them out."""

import pytest
import torch
from small_networks import randn

from asdl_marglik.watch.batch_axis import Layout, find_layout

pytestmark = pytest.mark.quick
T, D = 3, 4
LAYOUTS = {
    "batch first": (lambda x: x, Layout(0)),
    "time first": (lambda x: x.transpose(0, 1), Layout(1)),
    "last": (lambda x: x.movedim(0, -1), Layout(2)),
    "flattened with positions": (lambda x: x.flatten(0, 1), Layout(0)),
    "flattened, batch fast": (lambda x: x.transpose(0, 1).flatten(0, 1), Layout(0, fast=True)),
}


def alone_and_together(lay_out):
    x = randn(2, T, D)
    return lay_out(x), (lay_out(x[:1]), lay_out(x[1:]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_is_found(name):
    lay_out, expected = LAYOUTS[name]
    found = find_layout(*alone_and_together(lay_out))
    assert (found.axis, found.fast) == (expected.axis, expected.fast)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("n, copies", [(2, 1), (3, 2)])
def test_the_standard_form_has_the_data_points_first(name, n, copies):
    lay_out, layout = LAYOUTS[name]
    x = randn(n * copies, T, D)
    standard = layout.standard(lay_out(x), n * copies, n)
    assert len(standard) == n
    for i in range(n):
        own = standard[i].reshape(-1).sort().values
        assert torch.equal(own, x[i * copies : (i + 1) * copies].reshape(-1).sort().values)


def test_one_position_does_not_tell_fast_from_slow():
    x = randn(2, 1, D)
    assert find_layout(x.flatten(0, 1), (x[0], x[1])) == Layout(0, single=True)


@pytest.mark.parametrize(
    "joint",
    [randn(D), randn(4, T, D), randn(2, T, D)],
    ids=["no batch", "another length", "other values"],
)
def test_what_does_not_carry_the_batch_has_no_layout(joint):
    x = randn(2, T, D, seed=1)
    assert find_layout(joint, (x[:1], x[1:])) is None
