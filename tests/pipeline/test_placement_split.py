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


def costs_of(split, embed, head):
    costs = [float(count) for count in split]
    costs[0] += embed
    costs[-1] += head
    return costs


def every_split(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def test_splits_are_the_best_there_are():
    rng = random.Random(0)
    for num_layers in range(1, 12):
        for num_stages in range(1, min(num_layers, 6) + 1):
            embed, head = rng.choice([0, 0.5, 1, 3.7, 20]), rng.choice([0, 0.3, 2, 5.1])
            split = split_layers(num_layers, num_stages, embed=embed, head=head)
            assert sum(split) == num_layers
            best = min(
                (max(costs), sum(c * c for c in costs), other)
                for other in every_split(num_layers, num_stages)
                for costs in [costs_of(other, embed, head)]
            )
            costs = costs_of(split, embed, head)
            assert max(costs) == best[0], (num_layers, num_stages, embed, head)
            assert sum(c * c for c in costs) == pytest.approx(best[1])


def test_layers_left_over_go_to_the_last_stages():
    assert split_layers(28, 8) == (3, 3, 3, 3, 4, 4, 4, 4)
    assert split_layers(28, 4) == (7, 7, 7, 7)
    assert split_layers(5, 5) == (1, 1, 1, 1, 1)
    assert split_layers(7, 1) == (7,)


def test_dear_ends_hold_fewer_layers():
    assert split_layers(28, 4, embed=1, head=3) == (7, 8, 8, 5)
    assert split_layers(4, 3, embed=100) == (1, 1, 2)


def test_the_balanced_split_makes_the_shortest_step():
    order = pipeline_order("1f1b", num_ranks=4, num_microbatches=32)

    def step(split):
        return simulate(order, stage_costs(split, head=2.0)).makespan

    balanced = step(split_layers(10, 4, head=2.0))
    assert balanced <= 1.02 * min(step(split) for split in every_split(10, 4))
    assert balanced < step((2, 2, 3, 3))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(UserError, match=r"16 pipeline stages .* but the model has 12\. Reduce"):
        split_layers(12, 16)


def test_a_given_split_is_taken():
    assert check_split([9, 7, 7, 5], 28, 4) == (9, 7, 7, 5)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ([14, 14], r"split=\[14, 14\] has 2 stages, but there are 4 .*Set 4 numbers"),
        ([], "has 0 stages"),
        ([10, 10, 8, 0], "every stage needs at least one layer"),
        ([10, 10, 9, -1], "every stage needs at least one layer"),
        ([7, 7, 7, 8], "adds up to 29 layers, but the model has 28"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, words):
    with pytest.raises(UserError, match=rf"^\[pipeline\] split=.*{words}|{words}"):
        check_split(split, 28, 4)


def test_layers_keep_their_global_indices():
    assert layers_of_stages((2, 1, 3)) == (range(2), range(2, 3), range(3, 6))
