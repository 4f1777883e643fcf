"""What `describe` says."""

import pytest
from cases import CASES
from marginal_likelihoods import marglik


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("structure", ["ntk", "kfac"])
def test_description_lists_every_weight_once(case, structure):
    model, x, _ = case.make()
    lines = marglik(model, structure=structure).describe(x).splitlines()
    table = [line.split() for line in lines[1:-1]]
    want = [(n, str(p.numel())) for n, p in model.named_parameters() if p.requires_grad]
    assert [(row[0], row[1]) for row in table] == want
    assert lines[-1].startswith("piecewise linear")
