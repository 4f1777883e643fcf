"""What `describe` says."""

from types import SimpleNamespace

import pytest
import torch
from cases import CASES
from marginal_likelihoods import marglik

from asdl_marglik import Arrangement
from laplace_marglik.evidence.description import described


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("structure", ["ntk", "kfac"])
def test_description_lists_every_weight_once(case, structure):
    model, x, _ = case.make()
    lines = marglik(model, structure=structure).describe(x).splitlines()
    table = [line.split() for line in lines[1:-1]]
    want = [(n, str(p.numel())) for n, p in model.named_parameters() if p.requires_grad]
    assert [(row[0], row[1]) for row in table] == want
    assert lines[-1].startswith("piecewise linear")


@pytest.mark.quick
@pytest.mark.parametrize("name", ["a", "parameter", "a_name_that_is_longer_than_the_header"])
@pytest.mark.parametrize("rule", ["linear", "linear + convolution + embedding + elementwise"])
def test_columns_are_aligned_whatever_the_names_are(name, rule):
    weights = {name: torch.zeros(3), "b": torch.zeros(10**6)}
    plan = SimpleNamespace(weights=weights, rules={name: rule, "b": "x"}, piecewise_linear=True)
    term = SimpleNamespace(label="kernel", names=(name, "b"))
    header, first, second, _ = described(plan, [term], Arrangement(1, False, 0, 0)).splitlines()
    sizes = header.index("size") + len("size")  # aligned at the right
    rules, labels = header.index("rows by"), header.index("curvature")
    for line, cells in ((first, (name, "3", rule)), (second, ("b", "1000000", "x"))):
        assert line[:sizes].split() == [*cells[:2]] and line[sizes - 1] == cells[1][-1]
        assert line[rules:labels].rstrip() == cells[2] and line[labels:] == "kernel"
