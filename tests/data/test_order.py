import itertools
from collections import Counter

import numpy as np
import pytest

from titan_dit.data.order import BatchPlan, EpochOrder, Permutation, RankOrder
from titan_dit.rng import permutation


def batches(global_batch, rows, rank=0, ranks=1, cursor=0, seed=0, data_order="feistel"):
    epochs = EpochOrder(seed, rows, data_order=data_order)
    order = RankOrder(BatchPlan(global_batch), epochs, rank, ranks)
    return order.batches(cursor)


def take(steps, *args, **kwargs):
    return list(itertools.islice(batches(*args, **kwargs), steps))


# Batch sizes that divide the epoch, do not divide it, and exceed it.
SIZES = [(4, 12, 1), (4, 12, 4), (6, 17, 1), (6, 17, 2), (6, 17, 3), (12, 7, 4), (30, 7, 5)]


def permuted(data_order, seed, epoch, rows):
    if data_order == "sort" or rows < 65_536:
        return permutation(seed, epoch, rows).tolist()
    return Permutation.of(seed, "data_order", epoch, rows)(np.arange(rows)).tolist()


@pytest.mark.parametrize("data_order", ["feistel", "sort"])
@pytest.mark.parametrize(("batch", "rows", "ranks"), SIZES)
def test_every_row_comes_once_in_each_epoch(batch, rows, ranks, data_order):
    steps = 3 * rows  # 3 * batch whole epochs
    of_ranks = [take(steps, batch, rows, r, ranks, data_order=data_order) for r in range(ranks)]
    seen = [pair for shares in zip(*of_ranks, strict=True) for share in shares for pair in share]
    # The numbers are consecutive over ranks and steps: no duplicates, no gaps.
    assert [number for number, _ in seen] == list(range(steps * batch))
    for epoch in range(3 * batch):
        part = [row for _, row in seen[epoch * rows : (epoch + 1) * rows]]
        assert Counter(part) == Counter(range(rows))
        assert part == permuted(data_order, 0, epoch, rows)


@pytest.mark.parametrize("data_order", ["feistel", "sort"])
def test_each_epoch_of_many_rows_has_an_order_of_its_own(data_order):
    rows = 65_537
    order = EpochOrder(0, rows, data_order=data_order)
    found = order.rows(range(3 * rows))
    epochs = [found[epoch * rows : (epoch + 1) * rows] for epoch in range(3)]
    for epoch, part in enumerate(epochs):
        assert Counter(part) == Counter(range(rows))
        assert part == permuted(data_order, 0, epoch, rows)
    for one, other in itertools.combinations(epochs, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 20  # 1 is expected.


@pytest.mark.parametrize(("batch", "rows", "ranks"), SIZES)
def test_the_ranks_share_the_batch_of_one_process(batch, rows, ranks):
    whole = take(9, batch, rows)
    shares = [take(9, batch, rows, rank, ranks) for rank in range(ranks)]
    for step, expected in enumerate(whole):
        assert [pair for share in shares for pair in share[step]] == expected
        assert all(len(share[step]) == batch // ranks for share in shares)


@pytest.mark.parametrize(("batch", "rows", "ranks"), SIZES)
def test_resuming_from_a_cursor_continues_the_order(batch, rows, ranks):
    whole = take(12, batch, rows, ranks - 1, ranks)
    for done in (1, 5, 11):
        rest = take(12 - done, batch, rows, ranks - 1, ranks, cursor=done * batch)
        assert rest == whole[done:]


def test_resuming_on_other_ranks_repeats_and_forgets_nothing():
    before = take(3, 6, 17)
    after = [take(4, 6, 17, rank, 3, cursor=18) for rank in range(3)]
    numbers = [n for batch in before for n, _ in batch]
    numbers += [n for step in range(4) for share in after for n, _ in share[step]]
    assert numbers == list(range(42))


def test_a_row_does_not_depend_on_the_batch_size():
    small = dict(pair for batch in take(30, 4, 17) for pair in batch)
    large = dict(pair for batch in take(10, 12, 17) for pair in batch)
    assert small == large


def test_seeds_give_different_orders():
    assert take(5, 6, 100) != take(5, 6, 100, seed=1)


# (batch size, skipped ranges): before, inside, across and far after the batches.
SKIPPED = [
    (4, ((0, 3),)),
    (4, ((4, 8),)),
    (5, ((3, 4), (6, 9), (20, 41))),
    (3, ((1, 2), (3, 4), (5, 6), (7, 8), (1000, 1001))),
    (7, ((2, 30),)),
]


@pytest.mark.parametrize(("batch", "skipped"), SKIPPED)
def test_a_plan_goes_round_what_is_skipped(batch, skipped):
    """Compare with a plan computed number by number."""
    plan = BatchPlan(batch, skipped)
    allowed = (n for n in itertools.count() if not any(a <= n < b for a, b in skipped))
    cursor = 0
    for _ in range(30):
        numbers, after, _ = plan(cursor)
        assert list(numbers) == list(itertools.islice(allowed, batch))
        assert after == numbers[-1] + 1 > cursor
        assert plan(cursor) == (numbers, after, 0)
        cursor = after


@pytest.mark.parametrize(("batch", "skipped"), SKIPPED)
def test_a_plan_depends_on_nothing_but_the_cursor(batch, skipped):
    """From any cursor, even in a skipped range, a batch is the next unskipped numbers."""
    plan = BatchPlan(batch, skipped)
    for cursor in range(60):
        later = (n for n in itertools.count(cursor) if not any(a <= n < b for a, b in skipped))
        assert list(plan(cursor)[0]) == list(itertools.islice(later, batch))


@pytest.mark.parametrize(
    ("batch", "ranks", "rows"), [(12, 5, None), (16, 3, 6), (7, 7, 1), (7, 6, 4), (128, 3, 44)]
)
def test_ranks_that_do_not_divide_the_batch_repeat_their_last_sample(batch, ranks, rows):
    plan, epochs = BatchPlan(batch, ((20, 31),)), EpochOrder(0, 17)
    sizes = (rows,) if rows else ()
    orders = [RankOrder(plan, epochs, rank, ranks, sizes) for rank in range(ranks)]
    parts = [list(itertools.islice(order.batches(3), 6)) for order in orders]
    cursor = 3
    for step in range(6):
        numbers, after, _ = plan(cursor)
        found = []
        for order, part in zip(orders, parts, strict=True):
            mine, size, step_size = order.share(plan(cursor))
            assert (len(part[step]), step_size) == (size, batch)
            assert size == (rows or -(-batch // ranks))
            real, filler = part[step][: len(mine)], part[step][len(mine) :]
            assert [n for n, _ in real] == list(mine) != []
            assert set(filler) <= {real[-1]}
            found += real
        assert found == list(zip(numbers, epochs.rows(numbers), strict=True))
        cursor = after


@pytest.mark.parametrize("held_out", [(0,), (9,), (0, 1, 2), (3, 4, 8, 9), (0, 2, 4, 6, 8), ()])
def test_an_epoch_has_every_row_once_but_those_held_out(held_out):
    order = EpochOrder.of(5, 10, held_out, "feistel")
    left = order.num_rows
    assert left == 10 - len(held_out)
    for epoch in range(4):
        rows = order.rows(range(epoch * left, (epoch + 1) * left))
        assert sorted(rows) == [row for row in range(10) if row not in held_out]
    assert order.rows(range(left)) != order.rows(range(left, 2 * left))


def test_rows_of_a_held_out_order_do_not_depend_on_what_they_are_asked_with():
    order = EpochOrder.of(5, 100, tuple(range(0, 100, 7)), "feistel")
    whole = order.rows(range(300))
    assert [order.rows([number])[0] for number in range(300)] == whole
    assert order.rows(range(80, 120)) == whole[80:120]


def test_without_held_out_rows_the_order_is_that_of_the_whole_dataset():
    assert EpochOrder.of(5, 50, (), "feistel") == EpochOrder(5, 50)


@pytest.mark.parametrize("data_order", ["feistel", "sort"])
@pytest.mark.parametrize("rows", [1, 50, 65_535, 65_536])
def test_few_rows_are_sorted_and_many_only_by_sort(rows, data_order):
    order = EpochOrder.of(5, rows, (), data_order)
    assert order.rows(range(rows)) == permuted(data_order, 5, 0, rows)
