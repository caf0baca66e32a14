import itertools
import re

import pytest

from titan_dit.config import ParallelConfig, TrainingConfig
from titan_dit.parallel.mesh import AxisSizes, check_batch, followed, solve
from titan_dit.section import UserError


@pytest.mark.parametrize(
    ("settings", "ranks", "dp_shard"),
    [({}, 1, 1), ({}, 8, 8), ({"dp_replicate": 2}, 8, 4), ({"dp_replicate": 8}, 8, 1)],
)
def test_minus_one_takes_the_remaining_ranks(settings, ranks, dp_shard):
    sizes = solve(ParallelConfig(**settings), ranks)
    assert sizes.dp_shard == dp_shard
    assert sizes.data == ranks
    assert (sizes.pp, sizes.cp, sizes.tp) == (1, 1, 1)


def test_sizes_that_fit_are_taken_as_they_are():
    assert solve(ParallelConfig(dp_replicate=2, dp_shard=3), 6) == AxisSizes(
        dp_replicate=2, dp_shard=3
    )


def test_sizes_are_told_in_words():
    assert str(AxisSizes(dp_shard=2, tp=4)) == "dp_shard 2 x tp 4"
    assert str(AxisSizes()) == "one rank"


def refusal(ranks, **settings):
    with pytest.raises(UserError) as caught:
        solve(ParallelConfig(**settings), ranks)
    return str(caught.value)


def test_a_product_that_is_not_the_number_of_ranks_is_shown_factor_by_factor():
    assert refusal(8, dp_shard=2, tp=2) == (
        "[parallel] dp_shard=2 x tp=2 = 4 ranks, but 8 were started. "
        "Set dp_shard = 4 or launch 4 ranks."
    )
    assert "but 1 was started" in refusal(1, dp_shard=2)


def test_sizes_that_do_not_divide_the_ranks_are_shown():
    message = refusal(8, dp_replicate=3)
    assert message == (
        "[parallel] dp_replicate=3 does not divide the 8 ranks started. "
        "Launch a multiple of 3 ranks, or change the sizes."
    )


def test_a_size_of_zero_is_refused():
    assert "dp_shard=0" in refusal(4, dp_shard=0)


def test_every_axis_counts_in_the_product():
    sizes = solve(ParallelConfig(pp=2, dp_replicate=3, cp=2, tp=4), 2 * 3 * 5 * 2 * 4)
    assert sizes == AxisSizes(pp=2, dp_replicate=3, dp_shard=5, cp=2, tp=4)
    message = refusal(9, pp=2, cp=2, tp=2)
    assert message.startswith("[parallel] pp=2 x cp=2 x tp=2 does not divide the 9 ranks started.")


# Every combination of small sizes and ranks: what is refused says how to put it right.
SIZES = list(itertools.product((1, 2, 3), (-1, 1, 2, 3, 4), range(1, 9)))


def test_every_fix_that_a_message_names_works():
    refused = 0
    for dp_replicate, dp_shard, ranks in SIZES:
        settings = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
        try:
            sizes = solve(ParallelConfig(**settings), ranks)
        except UserError as error:
            message, refused = str(error), refused + 1
        else:
            assert sizes.data == ranks
            continue
        fixes = 0
        assert f"dp_replicate={dp_replicate}" in message or dp_replicate == 1
        if found := re.search(r"Set dp_shard = (\d+)", message):
            assert (
                solve(ParallelConfig(**settings | {"dp_shard": int(found[1])}), ranks).data == ranks
            )
            fixes += 1
        if found := re.search(r"[Ll]aunch (?:a multiple of )?(\d+) ranks", message):
            assert solve(ParallelConfig(**settings), int(found[1])).data == int(found[1])
            fixes += 1
        assert fixes, message
        assert str(ranks) in message
    assert 20 < refused < len(SIZES)


def training(batch, micro=None):
    return TrainingConfig(steps=1, global_batch_size=batch, microbatch_size=micro)


@pytest.mark.parametrize(
    ("batch", "micro", "ranks"), [(8, None, 1), (8, None, 4), (8, 2, 4), (8, 8, 1), (24, 3, 4)]
)
def test_a_batch_that_divides_is_taken(batch, micro, ranks):
    assert check_batch(training(batch, micro), AxisSizes(dp_shard=ranks)) is None
    with pytest.raises(UserError):
        check_batch(training(batch + 1, 2), AxisSizes(dp_shard=ranks))


def test_a_batch_that_does_not_divide_is_shown_with_what_it_is_divided_by():
    with pytest.raises(UserError) as caught:
        check_batch(training(130, 8), AxisSizes(dp_replicate=2, dp_shard=2))
    assert str(caught.value) == (
        "[training] global_batch_size=130 does not divide into microbatch_size=8 x "
        "4 data-parallel ranks. Set global_batch_size = 128 or 160."
    )


def test_every_batch_size_that_a_message_names_divides():
    refused = 0
    for batch, micro, replicas, shards in itertools.product(
        (1, 2, 7, 12, 33), (None, 1, 3, 8), (1, 2), (1, 3)
    ):
        sizes = AxisSizes(dp_replicate=replicas, dp_shard=shards)
        try:
            check_batch(training(batch, micro), sizes)
        except UserError as error:
            refused += 1
            valid = re.search(r"Set global_batch_size = (.*)\.$", str(error))[1].split(" or ")
            for size in map(int, valid):
                assert size > 0
                check_batch(training(size, micro), sizes)
        else:
            assert batch % ((micro or 1) * replicas * shards) == 0
    assert refused > 20


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({"dp_shard": 4}, 2, {"dp_shard": 2}),
        ({"dp_shard": 4}, 3, {"dp_shard": 3}),
        ({}, 7, {"dp_shard": 7}),
        ({"dp_replicate": 2, "dp_shard": 2}, 3, {"dp_replicate": 1, "dp_shard": 3}),
        ({"dp_replicate": 4, "dp_shard": 1}, 6, {"dp_replicate": 2, "dp_shard": 3}),
        ({"dp_replicate": 2}, 8, {"dp_replicate": 2, "dp_shard": 4}),
        ({"tp": 2, "pp": 2, "dp_shard": 2}, 4, {"tp": 2, "pp": 2, "dp_shard": 1}),
        ({"tp": 2, "cp": 2, "dp_shard": 1}, 12, {"tp": 2, "cp": 2, "dp_shard": 3}),
    ],
)
def test_a_run_that_has_begun_follows_the_ranks(settings, ranks, expected):
    config = ParallelConfig(**settings)
    sizes = solve(config, ranks, following=True)
    assert sizes == AxisSizes(**expected)
    changed = {
        axis: f"[parallel] {axis} follows the ranks: {settings[axis]} -> {getattr(sizes, axis)}"
        for axis in ("dp_replicate", "dp_shard")
        if axis in settings and settings[axis] != getattr(sizes, axis)
    }
    assert followed(config, sizes) == list(changed.values())


def test_every_number_of_ranks_is_followed_or_answered_with_some_that_would_do():
    refused = 0
    for tp, cp, pp, ranks in itertools.product((1, 2, 3), (1, 2), (1, 3), range(1, 13)):
        config = ParallelConfig(tp=tp, cp=cp, pp=pp, dp_shard=2, dp_replicate=2)
        try:
            sizes = solve(config, ranks, following=True)
        except UserError as error:
            message, refused = str(error), refused + 1
            offered = re.search(r"can go on with (.*?) ranks", message)[1].split(" or ")
            for good in map(int, offered):
                assert good > 0
                assert solve(config, good, following=True).data * tp * cp * pp == good
            assert f"the {ranks} that" in message
        else:
            assert (sizes.tp, sizes.cp, sizes.pp) == (tp, cp, pp)
            assert sizes.data * tp * cp * pp == ranks
    assert refused > 20


def test_a_world_with_more_data_ranks_than_samples_cannot_hold_the_batch():
    assert check_batch(training(7), AxisSizes(dp_shard=7, tp=2), following=True) is None
    with pytest.raises(UserError) as caught:
        check_batch(training(7), AxisSizes(dp_shard=8, tp=2), following=True)
    assert str(caught.value) == (
        "[training] global_batch_size=7 cannot be held by 8 data-parallel ranks: there are more "
        "ranks than samples. Launch 14 ranks at most."
    )
