"""Simulates an order: start and end of every action, from the costs of actions.

A rank runs its actions in order, each as soon as its input has arrived. Messages have a latency but
do not occupy the ranks, and between two ranks they stay in sequence. Times are in the unit of the
costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from titan_dit.schedules.action import Action, Kind, Order, peak_activations
from titan_dit.schedules.messages import inputs_of, output_of, reader_of
from titan_dit.schedules.proof import execution, num_stages_of

Costs: TypeAlias = Mapping[tuple[Kind, int], float]
"""Time of one microbatch by (kind, stage)."""

Latency: TypeAlias = float | Callable[[int, int], float]
"""Time from the end of an action to the arrival of its output; may depend on (source, target)."""


class TimedAction(NamedTuple):
    """One action on the timeline."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The timeline of an order."""

    timeline: tuple[TimedAction, ...]
    """All actions; those of one rank are in sequence."""
    busy: tuple[float, ...]
    """Busy time of each rank."""
    peak_activations: tuple[int, ...]
    """See `action.peak_activations`."""

    @property
    def makespan(self) -> float:
        """Time from the start to the end of the last action."""
        return max(span.end for span in self.timeline)

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle time of each rank within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle_fraction(self) -> float:
        """The bubble: idle fraction of all ranks' time."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def stage_costs(
    layers: Sequence[float],
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    embed: float = 0.0,
    head: float = 0.0,
) -> dict[tuple[Kind, int], float]:
    """Costs of stages with `layers` layers each; a full backward costs the sum of its parts.

    `forward`, `backward_input`, `backward_weight`: times of one layer. `embed`, `head`: extra costs
    of the first and last stage, in layers.
    """
    size = list(layers)
    size[0] += embed
    size[-1] += head
    per_layer = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward_input + backward_weight,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
    }
    return {
        (kind, stage): cost * size[stage]
        for kind, cost in per_layer.items()
        for stage in range(len(size))
    }


def simulate(
    order: Order,
    costs: Costs,
    *,
    latency: Latency = 0.0,
    slowness: Sequence[float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Simulate an order. Raises ValueError on a deadlock.

    `slowness`: a factor on the costs of each rank. `jitter`: standard deviation of the log of a
    random factor (mean 1) on every cost and latency. It is drawn from (seed, action): two orders of
    the same stages get the same factors.
    """
    num_stages = num_stages_of(order)
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    free = [0.0] * len(order)
    busy = [0.0] * len(order)
    made: dict[Action, float] = {}
    arrived: dict[Action, float] = {}
    last: dict[tuple[int, int, Kind], float] = {}
    timeline = []
    for rank, action in execution(order):
        inputs = (
            made[x] if rank_of[x.stage] == rank else arrived[x]
            for x in inputs_of(action, num_stages)
        )
        start = max(free[rank], *inputs, 0.0)
        took = costs[action.kind, action.stage] * jitter_factor(jitter, seed, str(action))
        took *= slowness[rank] if slowness else 1.0
        free[rank] = start + took
        busy[rank] += took
        timeline.append(TimedAction(rank, action, start, free[rank]))

        message = output_of(action)
        made[message] = free[rank]
        target = rank_of.get(reader_of(message), rank)
        if target != rank:
            travel = latency(rank, target) if callable(latency) else latency
            travel *= jitter_factor(jitter, seed, f"message {message}")
            channel = rank, target, message.kind
            # Messages do not overtake each other.
            last[channel] = max(last.get(channel, 0.0), free[rank] + travel)
            arrived[message] = last[channel]
    return Simulation(tuple(timeline), tuple(busy), peak_activations(order))


def jitter_factor(jitter: float, seed: int, name: str) -> float:
    """A log-normal factor of mean 1, a pure function of (seed, name) in every process."""
    if jitter == 0:
        return 1.0
    # A text seed: hash() would differ between processes.
    return random.Random(f"{seed} {name}").lognormvariate(-jitter * jitter / 2, jitter)
