"""A step as it was: actions with their own times, links with their latency."""

import pytest

from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.schedule import Action, Kind
from titan_dit.pipeline.schedules.simulator import Taken, replay, simulate

F0, F1, B0, B1 = (Action(k, s, 0) for k in (Kind.FORWARD, Kind.BACKWARD) for s in (0, 1))
ORDER = ((F0, B0), (F1, B1))


def test_messages_leave_late_and_ranks_go_on_later():
    seconds = {F0: Taken(2, 3, 4), F1: Taken(1, 1, 1), B1: Taken(5, 6, 6), B0: Taken(2, 2, 2)}
    found = replay(ORDER, seconds, {(0, 1): 10.0, (1, 0): 20.0}, ready=[1.0, 0.0])
    spans = {span.action: (span.start, span.end) for span in found}
    # 0 begins at 1 and sends at 4.
    assert spans == {F0: (1, 3), F1: (14, 15), B1: (15, 20), B0: (41, 43)}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
def test_equal_costs_give_what_the_simulator_gives(schedule):
    order = pipeline_order(schedule, num_ranks=4, num_microbatches=8)
    actions = [action for actions in order for action in actions]
    cost = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.1,
            Kind.BACKWARD_WEIGHT: 0.9}  # fmt: skip
    expected = simulate(order, {(a.kind, a.stage): cost[a.kind] for a in actions}, latency=0.3)
    edges = {(a, b): 0.3 for a in range(4) for b in range(4) if a != b}
    found = replay(order, {a: Taken(*[cost[a.kind]] * 3) for a in actions}, edges)
    assert found == expected.timeline
