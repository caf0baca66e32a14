"""How long an order takes: every action's start and end, from what each costs.

A rank computes one action at a time, in its order, as soon as the rank is free and the input is
there. Messages take time but no computing; between two ranks they stay in sequence. Units are the
caller's: what comes out is in the unit of the costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from titan_dit.schedules.action import Action, Kind, Order, peak_activations
from titan_dit.schedules.proof import execution, made_by, needs, num_stages_of

Costs: TypeAlias = Mapping[tuple[Kind, int], float]
"""Time of one microbatch by (kind, stage)."""

Latency: TypeAlias = float | Callable[[int, int], float]
"""Time from the end of an action to the arrival of its output, or that by (source, target) rank."""


class TimedAction(NamedTuple):
    """One action on the timeline."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What an order did, per rank where it says so."""

    timeline: tuple[TimedAction, ...]
    """Every action; the actions of one rank in the sequence in which it ran them."""
    busy: tuple[float, ...]
    """Time that each rank computed."""
    peak_activations: tuple[int, ...]
    """The most microbatches that each rank held at once, counted per stage."""

    @property
    def makespan(self) -> float:
        """From the start to the end of the last action of any rank."""
        return max(span.end for span in self.timeline)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time that each rank waited, from the start to the end of the last action of any rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle_fraction(self) -> float:
        """The share of all ranks' time that was waited away: the bubble."""
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
    """Costs of stages that hold so many layers each; a full backward costs both its parts.

    `forward`, `backward_input` and `backward_weight` are what one layer takes; `embed` and `head`
    are what they cost beside the first and the last stage's layers, in layers.
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
    """Run an order through time. Raises ValueError where its ranks wait for each other.

    `slowness` multiplies the costs of each rank. `jitter` is the standard deviation of the
    logarithm of a factor of mean 1 on every cost and latency. It is drawn from (seed, action), so
    that two orders of the same stages meet the same luck.
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
            made[x] if rank_of[x.stage] == rank else arrived[x] for x in needs(action, num_stages)
        )
        start = max(free[rank], *inputs, 0.0)
        took = costs[action.kind, action.stage] * luck(jitter, seed, str(action))
        took *= slowness[rank] if slowness else 1.0
        free[rank] = start + took
        busy[rank] += took
        timeline.append(TimedAction(rank, action, start, free[rank]))

        message = made_by(action)
        made[message] = free[rank]
        target = rank_of.get(_reader(message), rank)
        if target != rank:
            travel = latency(rank, target) if callable(latency) else latency
            travel *= luck(jitter, seed, f"message {message}")
            channel = rank, target, message.kind
            # Messages do not overtake each other.
            last[channel] = max(last.get(channel, 0.0), free[rank] + travel)
            arrived[message] = last[channel]
    return Simulation(tuple(timeline), tuple(busy), peak_activations(order))


def _reader(message: Action) -> int:
    """The stage that waits for a stage's output; for a weight gradient the stage itself."""
    onward = {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: -1}
    return message.stage + onward.get(message.kind, 0)


def luck(jitter: float, seed: int, name: str) -> float:
    """A factor of mean 1, log-normal, the same for the same seed and name in every process."""
    if jitter == 0:
        return 1.0
    # Seeded with text, random.Random takes all of it; hash() would differ between processes.
    return random.Random(f"{seed} {name}").lognormvariate(-jitter * jitter / 2, jitter)
