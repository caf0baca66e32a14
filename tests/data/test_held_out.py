from functools import partial

import numpy as np
import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.data import held_out as chosen
from titan_dit.data.base import DataFacts, Source
from titan_dit.data.held_out import held_out_rows, proportional, rows_below, shares
from titan_dit.data.order import EpochOrder, mix, round_keys
from titan_dit.data.sections import Digits


class Grouped(Source):
    """A source with only groups."""

    def __init__(self, groups):
        self.groups_of = None if isinstance(groups, int) else torch.tensor(groups)
        self.facts = DataFacts(count=groups if isinstance(groups, int) else len(groups))
        self.fields = {}

    def groups(self):
        return self.groups_of


@pytest.fixture(params=["feistel", "sort"])
def data_order(request):
    return request.param


@pytest.fixture
def held_out(data_order):
    return partial(checked, data_order)


def checked(data_order, groups, count, seed=0):
    """Return the held-out rows, and their number per group."""
    rows = held_out_rows(Grouped(groups), seed, count, data_order)
    assert list(rows) == sorted(set(rows))
    assert len(rows) == count
    assert all(0 <= row < len(Grouped(groups)) for row in rows)
    if isinstance(groups, int):
        return rows, None
    return rows, torch.tensor(groups)[list(rows)].bincount(minlength=max(groups) + 1).tolist()


@pytest.mark.parametrize("count", [1, 4, 5, 12, 13, 40, 79])
def test_rows_are_taken_evenly_from_every_group(held_out, count):
    _, taken = held_out([i % 4 for i in range(80)], count)
    assert sum(taken) == count
    assert max(taken) - min(taken) <= 1


@pytest.mark.parametrize("seed", [0, 1])
def test_a_group_smaller_than_its_share_gives_all_it_has(held_out, seed):
    groups = [0] * 50 + [1] * 2 + [2] * 40 + [3] * 5
    _, taken = held_out(groups, 40, seed)
    assert (taken[1], taken[3]) == (2, 5)
    assert sorted((taken[0], taken[2])) == [16, 17]


def test_a_group_without_rows_gives_none(held_out):
    _, taken = held_out([0, 3, 0, 3, 0, 3], 4)
    assert taken == [2, 0, 0, 2]


def test_all_rows_but_one_can_leave(held_out):
    _, taken = held_out([0] * 7 + [1] * 3, 9)
    assert sum(taken) == 9


def test_without_groups_any_row_may_leave(held_out):
    often = torch.zeros(20)
    for seed in range(200):
        rows, _ = held_out(20, 5, seed)
        often[list(rows)] += 1
    # Each 50 times on average; a standard deviation is 6.
    assert (often.min(), often.max()) > (25, 0)
    assert often.max() < 75
    # So many are not sorted.
    rows, _ = held_out(100_000, 2_000)
    assert 45_000 < np.mean(rows) < 55_000


def test_rows_within_a_group_leave_equally_often(held_out):
    often = torch.zeros(20)
    for seed in range(200):
        rows, _ = held_out([i % 2 for i in range(20)], 10, seed)
        often[list(rows)] += 1
    assert often.min() > 70
    assert often.max() < 130


def test_the_rows_are_a_function_of_the_seed_alone(data_order):
    source = Digits().open()
    rows = held_out_rows(source, 5, 100, data_order)
    torch.manual_seed(7)
    assert held_out_rows(Digits().open(), 5, 100, data_order) == rows
    assert held_out_rows(source, 6, 100, data_order) != rows
    assert source.labels[list(rows)].bincount(minlength=10).tolist() == [10] * 10
    # Held-out rows are independent of the order in an epoch.
    epoch = EpochOrder(5, 1797, data_order=data_order).rows(range(500))
    assert 0 < len(set(rows) & set(epoch)) < 60


def test_no_rows_leave_where_none_are_asked_for():
    assert held_out_rows(Grouped([0, 1]), 0, 0, "feistel") == ()
    assert held_out_rows(Grouped(3), 0, 0, "feistel") == ()


@pytest.mark.parametrize("count", [20, 21, 1000])
def test_a_dataset_that_would_have_nothing_left_is_refused(count):
    with pytest.raises(UserError) as caught:
        held_out_rows(Grouped(20), 0, count, "feistel")
    assert str(caught.value) == (
        f"[validation] samples={count} holds out all 20 rows of [data], so none "
        "remain for training. Set fewer, such as samples = 2."
    )


class InParts(Grouped):
    """Groups in parts, which alone are in memory."""

    def groups(self):
        raise AssertionError("the whole")

    def group_parts(self):
        return iter(self.groups_of.split(13))


@pytest.mark.parametrize("sizes", [(500, 300, 200), (900, 0, 4), (1, 1, 1, 400), (1000,)])
def test_each_group_gives_its_rows_of_the_smallest_keys(sizes):
    """Compared with sorting all rows; the parts do not matter."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    groups = np.random.default_rng(0).permutation(groups)
    (key,) = round_keys(3, "validation", 0, 1)
    keys = mix(key, np.arange(len(groups), dtype=np.uint64)) >> np.uint64(1)
    wanted = shares(torch.tensor(sizes), 60).tolist()
    expected = [
        row
        for group, share in enumerate(wanted)
        for row in sorted(np.flatnonzero(groups == group), key=keys.__getitem__)[:share]
    ]
    assert held_out_rows(InParts(groups.tolist()), 3, 60, "feistel") == tuple(sorted(expected))


def test_a_share_that_was_guessed_too_small_is_taken_again(monkeypatch):
    groups, asked = [i % 3 for i in range(3000)], []

    def few(source, key, limits):
        asked.append(limits)
        return rows_below(source, key, limits // np.uint64(20 if len(asked) < 3 else 1))

    expected = held_out_rows(Grouped(groups), 0, 300, "feistel")
    monkeypatch.setattr(chosen, "rows_below", few)
    assert held_out_rows(Grouped(groups), 0, 300, "feistel") == expected
    assert len(asked) == 3


class BySize(Grouped):
    """Groups that are buckets."""

    keeps_groups = held_out_by_size = True


@pytest.mark.parametrize("count", [1, 3, 16, 64, 128, 700])
def test_a_bucket_gives_rows_in_proportion_to_its_size(count, data_order):
    sizes = [600, 20, 300]
    source = BySize(np.repeat(np.arange(3), sizes).tolist())
    rows = held_out_rows(source, 0, count, data_order)
    taken = source.groups()[list(rows)].bincount(minlength=3).tolist()
    assert sum(taken) == count
    assert all(n <= -(-count * size // 920) for n, size in zip(taken, sizes, strict=True))
    assert all(n >= count * size // 920 - 1 for n, size in zip(taken, sizes, strict=True))
    assert min(taken) > 0 or count < 3


def test_a_bucket_keeps_one_row_and_the_others_fill_the_gap():
    sizes = torch.tensor([3, 0, 40, 1])
    assert proportional(sizes, sizes.sub(1).clamp(min=0), 40).tolist() == [2, 0, 38, 0]
    assert proportional(sizes, sizes.sub(1).clamp(min=0), 41).tolist() == [2, 0, 39, 0]
    assert proportional(sizes, sizes, 3).tolist() == [1, 0, 1, 1]
