"""A slow rank or link is named, and nobody else."""

import pytest
from recorded import costs_of, order_of, timeline_of

from titan_dit.pipeline.schedules.schedule import neighbours
from titan_dit.pipeline.timeline import suspects

SCHEDULES = [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2),
             ("zbv_zero_bubble", 1)]  # fmt: skip
SEEDS = 5


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_a_slow_rank_is_named_and_nobody_without(schedule, virtual_stages, lengths):
    order = order_of(schedule, virtual_stages=virtual_stages)
    for seed in range(SEEDS):
        for slow in (None, seed % 4):
            costs = costs_of(order, seed, slow, sigma=0.1, lengths=lengths)
            found = suspects(timeline_of(order, costs))
            assert list(found.ranks) == ([] if slow is None else [slow]), (seed, slow, found)
            assert not found.links
            assert all(1.2 < ratio < 1.42 for ratio in found.ranks.values())


@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_a_link_that_a_rank_waits_for_is_named(schedule, virtual_stages):
    order = order_of(schedule, virtual_stages=virtual_stages)
    for seed, edge in enumerate(sorted(neighbours(range(4)))):
        found = suspects(timeline_of(order, costs_of(order, seed), late={edge: 5e-3}))
        assert list(found.links) == [edge], (schedule, found)
        assert found.links[edge] == pytest.approx(5e-3, rel=0.1)
        assert not found.ranks


def test_a_slow_sender_or_receiver_accuses_no_link():
    """Two actions run three times as long: messages wait for their receiver, not on the way."""
    order = order_of("1f1b", virtual_stages=1)
    even = costs_of(order, 0)

    def seconds(action, number):
        return even(action, number) * (3.0 if action.stage == 1 else 1.0)

    found = suspects(timeline_of(order, seconds))
    assert (list(found.ranks), dict(found.links)) == ([1], {})


def test_ranks_are_compared_per_layer():
    order = order_of("interleaved_1f1b")
    layers = [1, 1, 2, 1, 1, 1, 3, 1]
    even = costs_of(order, 0)
    costs = lambda action, number: even(action, number) * layers[action.stage]  # noqa: E731
    assert not suspects(timeline_of(order, costs, sizes=layers))
    assert list(suspects(timeline_of(order, costs)).ranks) == [2]


def test_an_end_of_the_model_does_not_make_its_rank_slow():
    """The head costs a layer more than planned, but the rank has a stage without an end, too."""
    order = order_of("interleaved_1f1b")
    even = costs_of(order, 0)
    costs = lambda action, number: even(action, number) * (1 + (action.stage == 7))  # noqa: E731
    assert not suspects(timeline_of(order, costs))


def test_of_a_rank_with_an_end_only_the_line_says_so():
    order = order_of("1f1b", ranks=2, virtual_stages=1)
    [line] = suspects(timeline_of(order, costs_of(order, 0, slow=1))).lines()
    assert line.startswith("slow rank: 1, 1.")
    assert line.endswith("or its end of the model costs more than planned")


def test_nobody_is_said_to_be_nobody():
    order = order_of()
    assert suspects(timeline_of(order, costs_of(order, 0))).lines() == [
        "no slow rank, no slow link"
    ]
