"""Which rows a block has, and in which form they are computed."""

import pytest
import torch
from small_networks import randn

from laplace_marglik import Categorical, Gaussian, MarglikError
from laplace_marglik.evidence.rows import (
    Contrasts,
    RootColumns,
    SingleOutputs,
    checked_columns,
    cotangents_per_datum,
    draw_columns,
    rows_for,
)

pytestmark = pytest.mark.quick
F, Y = randn(4, 3), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("iid", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_drawn_columns_are_distinct_and_shared_unless_iid(k, iid):
    generator = torch.Generator().manual_seed(0)
    columns = draw_columns(50, 3, k, generator, iid=iid)
    assert columns.shape == (50, k)
    assert all(len(set(row)) == k for row in columns.tolist())
    assert (columns == columns[0]).all() == (not iid or k == 3)


@pytest.mark.parametrize(
    "likelihood, root, k, form",
    [
        (Categorical(), "fisher", 3, Contrasts),
        (Categorical(), "paper", 1, SingleOutputs),
        (Categorical(), "fisher", 2, RootColumns),
        (Gaussian(), "fisher", 1, SingleOutputs),
        (Gaussian(), "eigen", 3, SingleOutputs),
    ],
)
def test_the_form_of_rows(likelihood, root, k, form):
    assert type(rows_for(likelihood, torch.Size([3]), root, k)) is form


@pytest.mark.parametrize("contrasts", [True, False])
def test_rows_of_all_outputs_give_the_whole_curvature(contrasts):
    likelihood = Categorical()
    rows = rows_for(likelihood, torch.Size([3]), "paper", 3, contrasts=contrasts)
    columns = torch.arange(3).expand(4, -1)
    mixing = rows.mixing(F, Y, columns)
    U = (mixing.mT @ rows.cotangents(F, Y, columns)).mT
    torch.testing.assert_close(U @ U.mT, likelihood.hessian(F, Y))
    assert rows.cotangents(F, Y, columns).shape[1] == cotangents_per_datum(rows, 3)
    assert cotangents_per_datum(rows, 3) == (2 if contrasts else 3)


@pytest.mark.parametrize(
    "columns, words",
    [
        (torch.tensor([3]), r"in 0\.\.2"),
        (torch.tensor([-1]), r"in 0\.\.2"),
        (torch.tensor([1, 1]), "distinct"),
        (torch.tensor([[1], [2]]), r"\[4, K\]"),
        (torch.tensor([0.5]), "integers"),
        (torch.tensor([], dtype=torch.long), "integers"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns, words):
    with pytest.raises(MarglikError, match=words):
        checked_columns(columns, 4, 3)


def test_columns_for_all_data_points_are_repeated():
    assert checked_columns(torch.tensor([2, 0]), 4, 3).tolist() == [[2, 0]] * 4
