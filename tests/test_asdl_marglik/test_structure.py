"""Every structure against the naive reference: values and gradients, for every kind of model, block
and likelihood.

A structure that is registered inherits all of it, and needs its definition in `reference.py`.
"""

import pytest
import torch
from cases import CASES, LIKELIHOOD_CASES, Shift
from marginal_likelihoods import STRUCTURES, X, Y, by_name, close, expected, marglik, setup

from asdl_marglik import CurvatureError, Structure, register_structure

# weights that the library factorises although the naive reference does not know how (attention,
# grouped convolutions)
BEYOND_REFERENCE_KFAC = {
    "addmm",
    "conv_zoo",
    "transformer",
    "transformer_time_first",
    "vit",
    "tied_embedding",
    "positions",
    "position_numbers",
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_with_one_two_and_all_outputs(case, structure):
    if structure == "kfac" and case.name in BEYOND_REFERENCE_KFAC:
        pytest.skip("covered by test_kron: the reference has no Kronecker form for these weights")
    for columns in (torch.tensor([1]), torch.tensor([2, 0]), None):
        ml, x, y = setup(case, structure)
        if columns is not None and len(columns) == 2 and case.name == "segmentation":
            columns = torch.tensor([2, 11])
        got = ml(x, y, columns)
        want = expected(ml, case, x, y, columns)
        for part in ("total", "log_likelihood", "scatter", "log_det_ratio"):
            close(getattr(got, part), getattr(want, part))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", LIKELIHOOD_CASES, ids=str)
def test_value_for_every_likelihood(case, structure):
    for columns in (torch.tensor([1]), None):
        ml, x, y = setup(case, structure)
        close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total)


@pytest.mark.parametrize("root", ["paper", "fisher", "symmetric", "eigen"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "mininet", "segmentation"])
def test_value_for_every_root(name, structure, root):
    case = by_name[name]
    for columns in (torch.tensor([1]), torch.tensor([0, 2]), None):
        ml, x, y = setup(case, structure, root=root)
        close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total, rtol=1e-7)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("root", ["paper", "fisher"])
def test_value_with_columns_per_data_point(structure, root):
    case = by_name["mininet"]
    ml, x, y = setup(case, structure, root=root)
    columns = torch.stack(
        [torch.randperm(3, generator=torch.Generator().manual_seed(i))[:2] for i in range(len(y))]
    )
    close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", [c for c in CASES if c.augmentable], ids=str)
def test_value_with_augmentation(case, structure):
    if structure == "kfac" and case.name in BEYOND_REFERENCE_KFAC:
        pytest.skip("covered by test_kron: the reference has no Kronecker form for these weights")
    augment = Shift(3).double()
    with torch.no_grad():
        augment.eta.copy_(torch.tensor([0.3, -0.2]))
    for columns in (torch.tensor([1]), None):
        ml, x, y = setup(case, structure, augment=augment)
        close(ml(x, y, columns).total, expected(ml, case, x, y, columns).total)


@pytest.mark.parametrize(
    "prior", ["scalar", "layerwise", "diagonal", {"*weight": "weights", "*": "rest"}], ids=str
)
@pytest.mark.parametrize("structure", ["ntk", "full", "blockdiag", "diag"])
def test_value_for_every_prior(structure, prior):
    case = by_name["mininet"]
    ml, x, y = setup(case, structure, prior=prior)
    close(ml(x, y).total, expected(ml, case, x, y, None).total)


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_chunks_change_nothing(structure, chunk):
    case = by_name["mininet"]
    values = []
    for size in (chunk, 1000):
        ml, x, y = setup(case, structure, augment=Shift(3).double(), chunk=size)
        total = ml(x, y, torch.tensor([1])).total
        values.append([total, *torch.autograd.grad(total, ml.hyperparameters())])
    for ours, theirs in zip(*values, strict=True):
        close(ours, theirs)


@pytest.mark.quick
def test_a_registered_structure_guarantees_nothing_unless_it_says_so(monkeypatch):
    plain = Structure("plain", STRUCTURES["ntk"].parts)
    monkeypatch.setitem(STRUCTURES, plain.name, plain)
    assert marglik(structure="plain")(X, Y).status == "approximation"
    assert marglik(structure="ntk")(X, Y).status == "exact"
    with pytest.raises(CurvatureError, match="already a structure named 'plain'"):
        register_structure(plain)
