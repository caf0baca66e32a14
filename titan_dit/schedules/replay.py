"""Simulates one measured step: each action with its own time, each link with its latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from titan_dit.schedules.action import Action, Order
from titan_dit.schedules.messages import inputs_of, output_of
from titan_dit.schedules.proof import execution, num_stages_of
from titan_dit.schedules.simulator import TimedAction


class Taken(NamedTuple):
    """Seconds from the beginning of an action to an event."""

    computed: float
    left: float
    """Until its output has left for another rank."""
    free: float
    """Until the rank can go on."""


def replay(
    order: Order,
    seconds: Mapping[Action, Taken],
    links: Mapping[tuple[int, int], float],
    ready: Sequence[float] | None = None,
) -> tuple[TimedAction, ...]:
    """The timeline of an order; raises ValueError on a deadlock.

    `links`: latency by (source, target) rank, else 0. `ready`: when each rank may begin.
    """
    num_stages = num_stages_of(order)
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    free = list(ready) if ready else [0.0] * len(order)
    ends: dict[Action, float] = {}
    timeline = []
    for rank, action in execution(order):
        start = free[rank]
        for message in inputs_of(action, num_stages):
            source = rank_of[message.stage]
            start = max(start, ends[message] + links.get((source, rank), 0.0))
        took = seconds[action]
        ends[output_of(action)], free[rank] = start + took.left, start + took.free
        timeline.append(TimedAction(rank, action, start, start + took.computed))
    return tuple(timeline)
