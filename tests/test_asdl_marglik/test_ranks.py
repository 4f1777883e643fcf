"""What a single rank can show: spans, turns, and collectives of one.

Several ranks are in tests/test_ntkmarglik/test_distributed.py, by torchrun.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from small_networks import randn

from asdl_marglik import Ranks, RanksError

pytestmark = pytest.mark.quick


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield Ranks()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 6, 7, 20])
def test_spans_cover_everything_in_order_and_are_as_equal_as_possible(n, size):
    spans = Ranks.spans(SimpleNamespace(size=size), n)
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(n))
    lengths = [span.stop - span.start for span in spans]
    assert len(spans) == size and max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths)  # `gather` pads to it


@pytest.mark.parametrize("size", [1, 3])
def test_things_are_owned_in_turn(size):
    owners = [
        [rank for rank in range(size) if Ranks.owns(SimpleNamespace(rank=rank, size=size), number)]
        for number in range(5)
    ]
    assert owners == [[number % size] for number in range(5)]


def test_collectives_of_one_rank_change_nothing(alone):
    rows = randn(6, 4)
    assert alone.first and alone.size == 1
    assert torch.equal(alone.sum(rows.mT, "sum"), rows.mT)
    assert torch.equal(alone.gather(rows, 6, "gather"), rows)
    assert torch.equal(next(alone.visits([rows], 6, "visit"))[0], rows)
    columns = alone.columns(rows, 3, 2, "columns")
    assert torch.equal(columns, rows)
    assert torch.equal(alone.rows(columns, 6, 4, 2, "rows"), rows)
    assert alone.largest(2.5, "largest") == 2.5 and alone.agree([1.0, 2.0], "agree")
    alone.barrier("barrier")


def test_the_first_rank_computes_for_all_and_its_error_is_raised(alone):
    assert alone.from_first(lambda: {"n": 3}, "step") == {"n": 3}
    with pytest.raises(ZeroDivisionError):
        alone.from_first(lambda: 1 / 0, "step")


def test_errors_of_collectives_name_the_step_and_others_are_left_alone(alone):
    with pytest.raises(RanksError, match=r"rank 0 of 1 got no answer in the step 'sums' \(gloo"):
        with alone.named("sums"):
            raise RuntimeError("[transport.cc:12] gloo: timed out. More words")
    with pytest.raises(RuntimeError, match="something else") as error, alone.named("sums"):
        raise RuntimeError("something else")
    assert not isinstance(error.value, RanksError)
