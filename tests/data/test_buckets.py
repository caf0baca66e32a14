"""Laws of the order of buckets: nothing dropped, a pure function of the cursor, fast."""

import random
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
from refusals import refused

from titan_dit.config.section import UserError
from titan_dit.config.training import TrainingConfig
from titan_dit.data import buckets
from titan_dit.data.base import SampleOrder
from titan_dit.data.buckets import BucketOrder, BucketPlan
from titan_dit.data.order import LaterOrder, steps_from

UNEVEN = ([1000, 333, 97, 40, 7, 1], [16, 24, 12, 8, 32, 48])


def order_of(sizes, batch_sizes, seed=3, held_out=()):
    names = [f"{number}x8" for number in range(len(sizes))]
    return BucketOrder.of(seed, names, sizes, batch_sizes, held_out)


def walked(order, rounds):
    """(step, rows) of every step of the first rounds."""
    end = order.samples_before(rounds)
    for step in steps_from(BucketPlan(order), 0):
        if step.numbers.start == end:
            return
        yield step, order.rows(step.numbers)


def random_sizes(seed):
    draw = random.Random(seed)
    number = draw.randint(1, 8)
    sizes = [
        draw.choice([1, 2, 5, draw.randint(1, 60), draw.randint(1, 900)]) for _ in range(number)
    ]
    return sizes, [draw.randint(1, 48) for _ in range(number)]


@pytest.mark.parametrize("case", [UNEVEN, *map(random_sizes, range(12))])
@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_rows_seen_and_waiting_are_all_rows(case, rounds):
    order = order_of(*case)
    seen = np.zeros(order.num_rows, dtype=int)
    for step, rows in walked(order, rounds):
        bucket = order.buckets[step.bucket]
        assert len(rows) == len(step.numbers) == bucket.batch_size
        assert all(bucket.first <= row < bucket.first + bucket.num_rows for row in rows)
        np.add.at(seen, rows, 1)
    for bucket, waiting in zip(order.buckets, order.waiting_before(rounds), strict=True):
        own = seen[bucket.first : bucket.first + bucket.num_rows]
        # Nothing is dropped: what has not come yet comes first in the next round.
        assert own.sum() + waiting == rounds * bucket.num_rows
        assert 0 <= waiting < bucket.batch_size
        assert own.max() - own.min() <= 1


def test_what_waits_comes_first_in_the_next_round():
    order = order_of(*UNEVEN)
    bucket = order.buckets[0]
    rows = [row for step, rows in walked(order, 2) if step.bucket == 0 for row in rows]
    wanted = sorted(range(bucket.num_rows))
    assert order.waiting_before(1)[0] > 0
    assert sorted(rows[: bucket.num_rows]) == wanted


def test_rows_of_a_bucket_come_once_in_a_pass_at_every_step():
    order, seen = order_of(*UNEVEN), np.zeros(1478, dtype=int)
    for step, rows in walked(order, 3):
        np.add.at(seen, rows, 1)
        bucket = order.buckets[step.bucket]
        own = seen[bucket.first : bucket.first + bucket.num_rows]
        assert own.max() - own.min() <= 1


def test_a_step_is_found_from_its_cursor_alone():
    walk = list(walked(order_of(*UNEVEN), 6))
    for step, rows in random.Random(0).sample(walk, 60):
        alone = order_of(*UNEVEN)
        assert alone.step(step.numbers.start) == step
        assert alone.rows(step.numbers) == rows


def test_rows_do_not_depend_on_what_they_are_asked_with():
    order = order_of(*UNEVEN)
    assert isinstance(order, SampleOrder)
    every = [row for _, rows in walked(order, 2) for row in rows]
    numbers = random.Random(1).sample(range(len(every)), 300)
    assert order.rows(numbers) == [every[number] for number in numbers]


def test_cursors_are_consecutive_and_those_inside_a_step_are_refused():
    order, cursor = order_of(*UNEVEN), 0
    for step in islice(steps_from(BucketPlan(order), 0), 200):
        assert (step.numbers.start, step.numbers.stop) == (cursor, step.next_cursor)
        cursor = step.next_cursor
    first = order.step(0)
    with pytest.raises(UserError, match="which is inside a step of"):
        order.step(first.next_cursor - 1)


def test_a_bucket_smaller_than_a_step_repeats_its_rows_within_one():
    order = order_of([7, 300], [32, 10])
    small = [(step, rows) for step, rows in walked(order, 32) if step.bucket == 0]
    assert len(small) == 7  # 32 rounds of 7 rows are 7 steps of 32.
    for _, rows in small:
        counts = np.bincount(rows, minlength=7)
        assert counts.max() - counts.min() <= 2


def test_seeds_and_buckets_have_their_own_orders():
    walks = [list(islice(walked(order_of(*UNEVEN, seed=seed), 3), 40)) for seed in (3, 4)]
    assert [s.bucket for s, _ in walks[0]] != [s.bucket for s, _ in walks[1]]
    twins = order_of([500, 500], [500, 500])
    (_, one), (_, other) = walked(twins, 1)
    assert [row % 500 for row in one] != [row % 500 for row in other]
    assert one != order_of([500, 500], [500, 500], seed=5).rows(range(500))


def test_neighbouring_steps_are_of_the_same_bucket_as_often_as_by_chance():
    steps = islice(steps_from(BucketPlan(order_of(*UNEVEN)), 0), 4000)
    drawn = np.array([step.bucket for step in steps])
    share = np.bincount(drawn) / len(drawn)
    chance, sigma = (share**2).sum(), (1 / len(drawn)) ** 0.5
    assert abs((drawn[1:] == drawn[:-1]).mean() - chance) < 3 * sigma


def test_skips_jump_to_the_end_of_whole_steps():
    order = order_of(*UNEVEN)
    steps = [step for step, _ in walked(order, 2)]
    skipped = (
        (steps[2].numbers.start, steps[4].next_cursor),
        (
            steps[7].numbers.start,
            steps[7].next_cursor,
        ),
    )
    plan = BucketPlan(order, skipped)
    left = [step for number, step in enumerate(steps) if number not in (2, 3, 4, 7)]
    assert list(islice(steps_from(plan, 0), len(left))) == left
    assert plan(steps[2].numbers.start) == steps[5]


def test_held_out_rows_are_never_trained_on():
    held_out = (3, 999, 1000, 1332, 1333)
    order = order_of([1000, 333, 97], [16, 24, 12], held_out=held_out)
    rows = {row for _, found in walked(order, 2) for row in found}
    assert rows == set(range(1430)) - set(held_out)
    assert order.num_rows == 1430 - len(held_out)
    said = refused(lambda: order_of([5, 1], [2, 2], held_out=(0, 5)))
    assert said == (
        "[validation] samples=2 holds out all 1 rows of the bucket 1x8, so none remain for "
        "training. Set fewer."
    )


def samples(tokens, tokens_per_step, batch_multiple=None):
    config = TrainingConfig(steps=1, tokens_per_step=tokens_per_step, batch_multiple=batch_multiple)
    return config.samples_per_step(tokens, "4x64x64")


def test_samples_per_step_are_multiples_below_the_tokens():
    assert [samples(tokens, 65_536) for tokens in (4096, 1024, 1000)] == [16, 64, 64]
    said = refused(lambda: samples(4096, 30_000))
    assert said == (
        "[training] tokens_per_step=30000 holds 7 samples of the bucket 4x64x64 (4096 tokens "
        "each), less than batch_multiple=8. Set tokens_per_step to at least 32768, or "
        "batch_multiple to at most 7."
    )
    said = refused(lambda: samples(4096, 4000, 1))
    assert said.endswith("batch_multiple=1. Set tokens_per_step to at least 4096.")
    said = refused(lambda: samples(1, 2**30))
    assert said.endswith("are 1,073,741,824 samples of 1 tokens. Set at most 1048576.")


def test_microbatches_divide_a_ranks_share():
    config = TrainingConfig(steps=1, global_batch_size=48, tokens_per_microbatch=1000)
    sizes = [config.samples_per_microbatch(tokens, 12) for tokens in (64, 100, 180, 2000)]
    assert sizes == [12, 6, 4, 1]
    assert config.samples_per_microbatch(180, 11) == 1
    assert config.samples_per_microbatch(180, 11, pads=True) == 5


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"global_batch_size": 8, "tokens_per_step": 64},
        {"global_batch_size": 8, "batch_multiple": 4},
        {"tokens_per_step": 64, "microbatch_size": 1, "tokens_per_microbatch": 8},
    ],
)
def test_sizes_that_are_missing_or_given_twice_are_refused(keys):
    said = refused(lambda: TrainingConfig(steps=1, **keys))
    assert ("is missing" if not keys else "are both set. Keep one of them.") in said


def test_large_rounds_are_computed_in_blocks(monkeypatch):
    """Steps from 65,536 on are permuted by Feistel, and blocks do not change the order."""
    order = order_of([400_000, 90_000], [4, 3])
    cursors = [0, order.samples_before(1), order.samples_before(2)]
    found = [list(islice(steps_from(BucketPlan(order), cursor), 1500)) for cursor in cursors]
    order = order_of([400_000, 90_000], [4, 3])
    monkeypatch.setattr(buckets, "BLOCK", 500)
    again = [list(islice(steps_from(BucketPlan(order), cursor), 1500)) for cursor in cursors]
    assert again == found
    assert len({tuple(step.bucket for step in steps) for steps in found}) == 3


BILLION = """
import resource, time
from itertools import islice
import numpy as np
from titan_dit.data.buckets import BucketOrder, BucketPlan
from titan_dit.data.order import steps_from

draw = np.random.default_rng(0)
sizes = [max(1, int(share * 1e9)) for share in draw.dirichlet(np.ones(40))]
batch_sizes, held_out = draw.integers(256, 2048, 40).tolist(), range(0, sum(sizes), 20_000)
order = BucketOrder.of(0, ["any"] * 40, sizes, batch_sizes, held_out)
cursor, kibibytes = order.samples_before(5), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
order.rows(order.step(cursor).numbers)
first = time.process_time() - began
began = time.process_time()
for step in islice(steps_from(BucketPlan(order), cursor), 500):
    order.rows(step.numbers)
each = (time.process_time() - began) / 500
kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kibibytes
print(first, each, kibibytes / 1024)
"""


@pytest.mark.alone
def test_a_billion_rows_in_40_buckets_are_ordered_in_milliseconds():
    """In a process of its own: here every call checks its types."""
    done = subprocess.run([sys.executable, "-c", BILLION], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, each, mebibytes = map(float, done.stdout.split())
    assert first <= 0.5
    assert each <= 2e-3
    assert mebibytes <= 64


def test_an_order_that_begins_later_takes_the_same_rows_and_skips_its_own_numbers():
    """As a stage does, after 1,000 samples of others."""
    order, first = order_of([100, 40], [16, 8]), 1000
    later = LaterOrder(order, first)
    steps = list(islice(steps_from(buckets.step_plan(order, 0), 0), 30))
    # Skipped: numbers of an earlier stage and, across its end, the first two steps of this one.
    skipped = ((10, 20), (990, first + steps[1].next_cursor))
    moved = list(islice(steps_from(buckets.step_plan(later, 0, skipped), first), 28))
    assert moved[0].numbers[0] == first + steps[2].numbers[0]
    for step, found in zip(steps[2:], moved, strict=True):
        assert (found.bucket, found.next_cursor) == (step.bucket, step.next_cursor + first)
        assert later.rows(found.numbers) == order.rows(step.numbers)
    assert later.num_rows == order.num_rows
