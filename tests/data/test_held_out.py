import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.data.base import DataFacts, Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latents import Digits
from titan_dit.rng import permutation


class Grouped(Source):
    """A source with only groups."""

    def __init__(self, groups):
        self.groups_of = None if isinstance(groups, int) else torch.tensor(groups)
        self.facts = DataFacts(count=groups if isinstance(groups, int) else len(groups))
        self.fields = {}

    def groups(self):
        return self.groups_of


def held_out(groups, count, seed=0):
    """Return the held-out rows, and their number per group."""
    rows = held_out_rows(Grouped(groups), seed, count)
    assert list(rows) == sorted(set(rows))
    assert len(rows) == count
    assert all(0 <= row < len(Grouped(groups)) for row in rows)
    if isinstance(groups, int):
        return rows, None
    return rows, torch.tensor(groups)[list(rows)].bincount(minlength=max(groups) + 1).tolist()


@pytest.mark.parametrize("count", [1, 4, 5, 12, 13, 40, 79])
def test_rows_are_taken_evenly_from_every_group(count):
    _, taken = held_out([i % 4 for i in range(80)], count)
    assert sum(taken) == count
    assert max(taken) - min(taken) <= 1


@pytest.mark.parametrize("seed", [0, 1])
def test_a_group_smaller_than_its_share_gives_all_it_has(seed):
    groups = [0] * 50 + [1] * 2 + [2] * 40 + [3] * 5
    _, taken = held_out(groups, 40, seed)
    assert (taken[1], taken[3]) == (2, 5)
    assert sorted((taken[0], taken[2])) == [16, 17]


def test_a_group_without_rows_gives_none():
    _, taken = held_out([0, 3, 0, 3, 0, 3], 4)
    assert taken == [2, 0, 0, 2]


def test_all_rows_but_one_can_leave():
    _, taken = held_out([0] * 7 + [1] * 3, 9)
    assert sum(taken) == 9


def test_without_groups_any_row_may_leave():
    often = torch.zeros(20)
    for seed in range(200):
        rows, _ = held_out(20, 5, seed)
        often[list(rows)] += 1
    # Each 50 times on average; a standard deviation is 6.
    assert (often.min(), often.max()) > (25, 0)
    assert often.max() < 75


def test_rows_within_a_group_leave_equally_often():
    often = torch.zeros(20)
    for seed in range(200):
        rows, _ = held_out([i % 2 for i in range(20)], 10, seed)
        often[list(rows)] += 1
    assert often.min() > 70
    assert often.max() < 130


def test_the_rows_are_a_function_of_the_seed_alone():
    source = Digits().open()
    rows = held_out_rows(source, 5, 100)
    torch.manual_seed(7)
    assert held_out_rows(Digits().open(), 5, 100) == rows
    assert held_out_rows(source, 6, 100) != rows
    assert source.labels[list(rows)].bincount(minlength=10).tolist() == [10] * 10
    # Held-out rows are independent of the order in an epoch.
    assert 0 < len(set(rows) & set(permutation(5, 0, 1797)[:500].tolist())) < 60


def test_no_rows_leave_where_none_are_asked_for():
    assert held_out_rows(Grouped([0, 1]), 0, 0) == ()
    assert held_out_rows(Grouped(3), 0, 0) == ()


@pytest.mark.parametrize("count", [20, 21, 1000])
def test_a_dataset_that_would_have_nothing_left_is_refused(count):
    with pytest.raises(UserError) as caught:
        held_out_rows(Grouped(20), 0, count)
    assert str(caught.value) == (
        f"[validation] samples={count} holds out all 20 rows of [data], so none "
        "remain for training. Set fewer, such as samples = 2."
    )
