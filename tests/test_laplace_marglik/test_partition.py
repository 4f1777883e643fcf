"""Partitions: every row exactly once, honest randomness, and errors that say what was wrong."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_marglik import ClassPartition, MarglikError, Partition

pytestmark = pytest.mark.quick


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make(kind, n, c, s, k, columns, seed=0):
    if kind == "random":
        return Partition(n, c, s, k, columns=columns, generator=generator(seed))
    labels = torch.randint(3, (n,), generator=generator(seed + 1))
    return ClassPartition(labels, c, s, k, columns=columns, generator=generator(seed))


def rows(blocks):
    """All (data point, column) pairs of some blocks."""
    return [
        (int(i), int(c))
        for block in blocks
        for i, own in zip(block.index, block.columns, strict=True)
        for c in own
    ]


def assert_is_a_partition(partition, n, c, s, k):
    blocks = list(partition)
    assert len(blocks) == len(partition) == -(-n // s) * -(-c // k)
    assert Counter(rows(blocks)) == Counter((i, j) for i in range(n) for j in range(c))
    sizes = {len(b.index) for b in blocks}
    assert max(sizes) <= s and max(sizes) - min(sizes) <= 1
    widths = {b.columns.shape[1] for b in blocks}
    assert max(widths) <= k and max(widths) - min(widths) <= 1
    assert {(b.n_data_blocks, b.n_column_blocks) for b in blocks} == {(-(-n // s), -(-c // k))}
    assert {b.n_blocks for b in blocks} == {len(partition)}


@given(
    data=st.data(),
    kind=st.sampled_from(["random", "class"]),
    columns=st.sampled_from(["shared", "iid"]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_row_is_in_exactly_one_block(data, kind, columns):
    n, c = data.draw(st.integers(1, 23)), data.draw(st.integers(1, 7))
    s, k = data.draw(st.integers(1, n)), data.draw(st.integers(1, c))
    partition = make(kind, n, c, s, k, columns, data.draw(st.integers(0, 1000)))
    assert_is_a_partition(partition, n, c, s, k)
    partition.redraw()
    assert_is_a_partition(partition, n, c, s, k)


@pytest.mark.parametrize("kind", ["random", "class"])
@pytest.mark.parametrize("columns", ["shared", "iid"])
# all, single rows, remainders, even
@pytest.mark.parametrize("s, k", [(10, 3), (1, 1), (4, 2), (5, 3)])
def test_named_extremes(kind, columns, s, k):
    assert_is_a_partition(make(kind, 10, 3, s, k, columns), 10, 3, s, k)


def test_defaults_are_one_block_of_everything():
    (block,) = Partition(6, 3)
    assert sorted(block.index.tolist()) == list(range(6))
    assert block.columns.sort(1).values.tolist() == [[0, 1, 2]] * 6
    assert block.n_blocks == 1


def test_shared_columns_are_equal_within_a_block_and_iid_columns_are_not():
    shared, iid = (make("random", 12, 6, 12, 2, columns) for columns in ("shared", "iid"))
    assert all((block.columns == block.columns[0]).all() for block in shared)
    assert not any((block.columns == block.columns[0]).all() for block in iid)


@pytest.mark.parametrize("kind", ["random", "class"])
def test_sampling_goes_through_all_blocks_before_it_repeats_one(kind):
    partition = make(kind, 10, 3, 4, 1, "iid")
    orders = []
    for _ in range(3):
        blocks = [partition.sample() for _ in range(len(partition))]
        assert Counter(rows(blocks)) == Counter((i, j) for i in range(10) for j in range(3))
        orders.append(rows(blocks))
    assert orders[0] != orders[1] or orders[1] != orders[2]  # each round has its own order


def test_every_block_is_equally_likely_to_be_drawn():
    draws = 2000
    partition = make("random", 7, 3, 3, 2, "shared")
    known = [rows([block]) for block in partition]
    counts = Counter()
    for _ in range(draws):
        partition._pending = []  # only the first draw of a round is not determined by others
        counts[known.index(rows([partition.sample()]))] += 1
    expected = draws / len(partition)
    assert set(counts) == set(range(len(partition)))
    # chi^2 with 5 degrees, p = 1e-4
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 25


def test_every_pair_of_data_points_is_equally_likely_to_share_a_block():
    draws, together, partition = 2000, Counter(), make("random", 4, 1, 2, 1, "shared")
    for _ in range(draws):
        for block in partition:
            together[tuple(sorted(block.index.tolist()))] += 1
        partition.redraw()
    assert len(together) == 6
    assert all(abs(count - draws / 3) < 5 * (draws * 2 / 9) ** 0.5 for count in together.values())


@pytest.mark.parametrize("kind", ["random", "class"])
@pytest.mark.parametrize("columns", ["shared", "iid"])
def test_redraw_changes_data_and_columns_and_starts_a_new_round(kind, columns):
    partition = make(kind, 20, 6, 5, 2, columns)
    before = [(set(b.index.tolist()), b.columns.clone()) for b in partition]
    partition.sample()
    partition.redraw()
    after = [(set(b.index.tolist()), b.columns.clone()) for b in partition]
    assert [index for index, _ in before] != [index for index, _ in after]
    assert any(not torch.equal(c, d) for (_, c), (_, d) in zip(before, after, strict=True))
    assert len(rows([partition.sample() for _ in range(len(partition))])) == 20 * 6


@pytest.mark.parametrize("kind", ["random", "class"])
def test_the_generator_alone_decides(kind):
    def draw(seed):
        partition = make(kind, 20, 6, 5, 2, "iid")
        partition.generator = generator(seed)
        partition.redraw()
        return rows([partition.sample() for _ in range(5)])

    state = torch.get_rng_state()
    first = draw(7)
    torch.manual_seed(123)
    assert draw(7) == first
    assert draw(8) != first
    torch.set_rng_state(state)
    draw(7)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_generator_the_global_seed_decides_and_is_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = rows(Partition(9, 3, 2, 1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert rows(Partition(9, 3, 2, 1)) == first


def test_classes_stay_together():
    labels = torch.arange(30) % 3
    blocks = list(ClassPartition(labels, 3, 5, generator=generator()))
    # 5 divides the 10 of each class
    assert all(len(labels[block.index].unique()) == 1 for block in blocks)
    mixed = [
        len(labels[b.index].unique()) for b in ClassPartition(labels, 3, 7, generator=generator())
    ]
    # only blocks on the border of two classes
    assert max(mixed) == 2 and sum(m == 2 for m in mixed) <= 2
    plain = [len(labels[b.index].unique()) for b in Partition(30, 3, 5, generator=generator())]
    assert min(plain) > 1


def test_classes_may_be_unbalanced_and_labels_have_gaps():
    labels = torch.tensor([7] * 9 + [2] * 2 + [40])
    partition = ClassPartition(labels, 3, 3, generator=generator())
    assert Counter(rows(partition)) == Counter((i, j) for i in range(12) for j in range(3))
    assert sum(len(labels[b.index].unique()) == 1 for b in partition) >= 2


def test_which_class_comes_first_and_who_is_with_whom_is_random():
    labels = torch.arange(12) % 3
    firsts, mates = set(), set()
    for seed in range(30):
        block = ClassPartition(labels, 3, 2, generator=generator(seed))[0]
        firsts.add(int(labels[block.index[0]]))
        mates.add(tuple(sorted(block.index.tolist())))
    assert firsts == {0, 1, 2} and len(mates) > 6


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((5, 3, 6), "subset.*5 data points.*6"),
        ((5, 3, 2, 4), "outputs.*3 outputs.*4"),
        ((5, 3, 0), "subset.*0"),
        ((5, 3, 2, 0), "outputs.*0"),
        ((5, 3, -1), "subset.*-1"),
        ((0, 3), "0"),
        ((5, 0), "0"),
    ],
)
def test_impossible_sizes_are_refused(arguments, words):
    with pytest.raises(MarglikError, match=words):
        Partition(*arguments)


def test_no_labels_are_refused():
    with pytest.raises(MarglikError):
        ClassPartition(torch.empty(0, dtype=torch.long), 3)


def test_other_mistakes_are_refused():
    with pytest.raises(MarglikError, match=r"shared.*iid.*own"):
        Partition(5, 3, columns="own")
    partition = Partition(5, 3, 2, 1)
    for position in (-1, len(partition)):
        with pytest.raises(IndexError, match=str(len(partition))):
            partition[position]
