"""The messages between the ranks of a pipeline."""

import pytest
from known import SCHEDULES

from titan_dit.pipeline.schedules.placement import pipeline_order, rank_of_stage, stages_per_rank
from titan_dit.pipeline.schedules.schedule import (
    Action,
    Kind,
    channels,
    inputs_of,
    neighbours,
    output_of,
    reader_of,
)

P, M = 4, 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_input_from_another_rank_is_one_message(schedule):
    order = pipeline_order(schedule, num_ranks=P, num_microbatches=M)
    count = P * stages_per_rank(schedule)
    places = [rank_of_stage(schedule, stage, P) for stage in range(count)]
    sent = {message: pair for pair, line in channels(order, places).items() for message in line}
    needed = {}
    for rank, actions in enumerate(order):
        for action in actions:
            for message in inputs_of(action, count):
                if places[message.stage] != rank:
                    needed[message] = places[message.stage], rank
    assert sent == needed
    assert channels(order, places).keys() == neighbours(places)
    assert sum(map(len, channels(order, places).values())) == len(needed)


def test_messages_have_the_sequence_of_the_sender():
    order = pipeline_order("interleaved_zero_bubble", num_ranks=2, num_microbatches=4)
    places = [0, 1, 0, 1]
    for (source, _), line in channels(order, places).items():
        made = [output_of(action) for action in order[source]]
        assert [made.index(message) for message in line] == sorted(map(made.index, line))


def test_the_pipelines_own_outputs_have_no_reader():
    order = ((Action(Kind.FORWARD, 0, 0),), (Action(Kind.FORWARD, 1, 0),))
    assert channels(order, [0, 1]) == {(0, 1): (Action(Kind.FORWARD, 0, 0),)}
    assert reader_of(Action(Kind.BACKWARD_INPUT, 0, 0)) == -1
    assert reader_of(Action(Kind.BACKWARD_WEIGHT, 1, 0)) == 1
