"""Rows and factors of a chunk against the definition, with augmented copies too."""

import pytest
import torch
from cases import CASES, Shift
from small_networks import mlp, randn

from asdl_marglik import Chunk, Selection, make_plan, naive

BY_NAME = {case.name: case for case in CASES}


class Constant:
    """Cotangents [K, C] that are the same for all data points."""

    cotangents_follow_outputs = False

    def __init__(self, cotangents):
        self.of_one = cotangents

    def cotangents(self, f, y, columns):
        return self.of_one.expand(len(f), -1, -1)

    def mixing(self, f, y, columns):
        return None


def chunk_of(model, x, cotangents):
    """A chunk of inputs [n, A, ...] and its weights."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plan = make_plan(model, weights, x[:, 0])
    n = len(x)
    rows = Selection(Constant(cotangents), torch.zeros(n), torch.zeros(n, len(cotangents)))
    with torch.enable_grad():
        return Chunk(plan, x, rows), weights


def averaged_jacobian(model, weights, x):
    """J of outputs that are averaged over copies [n, C, P]."""
    return torch.stack([naive.jacobian(model, weights, copies).mean(0) for copies in x])


@pytest.mark.parametrize("name", ["mlp", "mininet", "fixup", "raw", "repeated"])
@pytest.mark.parametrize("augmented", [False, True])
def test_rows_are_those_of_the_jacobian(name, augmented):
    model, x, _ = BY_NAME[name].make()
    model.eval()
    x = Shift(3).double()(x).detach() if augmented else x.unsqueeze(1)
    cotangents = randn(2, model(x[:, 0]).shape[1])
    chunk, weights = chunk_of(model, x, cotangents)
    want = cotangents @ averaged_jacobian(model, weights, x)
    found = [chunk.rows(n).reshape(len(x), 2, -1) for n in weights]
    torch.testing.assert_close(torch.cat(found, 2), want.detach())


@pytest.mark.quick
def test_rows_are_outer_products_of_their_factors():
    chunk, _ = chunk_of(mlp(), randn(5, 1, 4), randn(2, 3))
    (patches,) = chunk.input_factors("0.weight", "all")
    (positions,) = chunk.output_factors("0.weight", "all")
    product = torch.einsum("ntgd,nktgo->nkod", patches, positions)
    torch.testing.assert_close(product, chunk.rows("0.weight"))
    torch.testing.assert_close(patches[:, 0, 0], chunk.x[:, 0])


@pytest.mark.quick
def test_one_data_point_does_not_see_the_others():
    x, cotangents = randn(5, 1, 4), randn(2, 3)
    whole, _ = chunk_of(mlp(), x, cotangents)
    part, _ = chunk_of(mlp(), x[1:3], cotangents)
    torch.testing.assert_close(part.rows("0.weight"), whole.rows("0.weight")[1:3])
