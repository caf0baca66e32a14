import itertools
import random

import pytest

from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules.placement import (
    check_split,
    layers_of_stages,
    pipeline_order,
    split_layers,
)
from titan_dit.pipeline.schedules.simulator import simulate, stage_costs


def equal(num_layers):
    """Costs of layers that are all alike."""
    return (1.0,) * num_layers


def costs_of(split, costs, embed, head):
    ends = [*itertools.accumulate(split, initial=0)]
    found = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    found[0] += embed
    found[-1] += head
    return found


def every_split(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(
    "drawn", [[1.0], [1.0, 2.5], [0.25, 1.0, 7.0]], ids=["one", "two", "three"]
)
def test_splits_are_the_best_there_are(drawn):
    rng = random.Random(0)
    for num_layers in range(1, 12):
        for num_stages in range(1, min(num_layers, 6) + 1):
            embed, head = rng.choice([0, 0.5, 1, 3.75, 20]), rng.choice([0, 0.25, 2, 5.5])
            layers = tuple(rng.choices(drawn, k=num_layers))
            split = split_layers(layers, num_stages, embed=embed, head=head)
            assert sum(split) == num_layers
            # Ties: few layers in the first stages.
            best = min(
                (max(costs), sum(c * c for c in costs), other)
                for other in every_split(num_layers, num_stages)
                for costs in [costs_of(other, layers, embed, head)]
            )
            assert split == best[2], (layers, num_stages, embed, head)


def test_double_and_single_blocks_are_balanced():
    # As FLUX.2 klein: 5 double blocks, then 20 single ones, at a few ratios of their costs.
    for double in (0.9, 1.0, 1.4, 2.0):
        costs = (double,) * 5 + (1.0,) * 20
        split = split_layers(costs, 4, embed=0.1, head=0.05)
        slowest = [max(costs_of(s, costs, 0.1, 0.05)) for s in (split, *every_split(25, 4))]
        assert slowest[0] == pytest.approx(min(slowest))


def test_layers_left_over_go_to_the_last_stages():
    assert split_layers(equal(28), 8) == (3, 3, 3, 3, 4, 4, 4, 4)
    assert split_layers(equal(28), 4) == (7, 7, 7, 7)
    assert split_layers(equal(5), 5) == (1, 1, 1, 1, 1)
    assert split_layers(equal(7), 1) == (7,)


def test_dear_ends_hold_fewer_layers():
    assert split_layers(equal(28), 4, embed=1, head=3) == (7, 8, 8, 5)
    assert split_layers(equal(4), 3, embed=100) == (1, 1, 2)


def test_the_balanced_split_makes_the_shortest_step():
    order = pipeline_order("1f1b", num_ranks=4, num_microbatches=32)

    def step(split):
        return simulate(order, stage_costs(split, head=2.0)).makespan

    balanced = step(split_layers(equal(10), 4, head=2.0))
    assert balanced <= 1.02 * min(step(split) for split in every_split(10, 4))
    assert balanced < step((2, 2, 3, 3))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(UserError, match=r"16 pipeline stages .* but the model has 12\. Reduce"):
        split_layers(equal(12), 16)


def test_a_given_split_is_taken():
    assert check_split([9, 7, 7, 5], 28, 4) == (9, 7, 7, 5)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ([14, 14], r"split=\[14, 14\] has 2 stages, but there are 4 .*Set 4 numbers"),
        ([], "has 0 stages"),
        ([10, 10, 8, 0], "Give every stage at least one layer"),
        ([10, 10, 9, -1], "Give every stage at least one layer"),
        ([7, 7, 7, 8], "adds up to 29 layers, but the model has 28"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, words):
    with pytest.raises(UserError, match=rf"^\[pipeline\] split=.*{words}|{words}"):
        check_split(split, 28, 4)


def test_layers_keep_their_global_indices():
    assert layers_of_stages((2, 1, 3)) == (range(2), range(2, 3), range(3, 6))
