import pytest

from titan_dit.config.layout import ParallelConfig
from titan_dit.parallel.mesh import AxisSizes, refitted, solve


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


def test_every_axis_counts_in_the_product():
    sizes = solve(ParallelConfig(pp=2, dp_replicate=3, cp=2, tp=4), 2 * 3 * 5 * 2 * 4)
    assert sizes == AxisSizes(pp=2, dp_replicate=3, dp_shard=5, cp=2, tp=4)


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
    sizes = solve(config, ranks, resuming=True)
    assert sizes == AxisSizes(**expected)
    changed = {
        axis: f"[parallel] {axis} follows the ranks: {settings[axis]} -> {getattr(sizes, axis)}"
        for axis in ("dp_replicate", "dp_shard")
        if axis in settings and settings[axis] != getattr(sizes, axis)
    }
    assert refitted(config, sizes) == list(changed.values())
