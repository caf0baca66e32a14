"""Simulates an order: start and end of every action, from the costs of actions."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from titan_dit.pipeline.schedules.decider import Decider, Waiting
from titan_dit.pipeline.schedules.proof import sequence_of
from titan_dit.pipeline.schedules.schedule import (
    Action,
    Kind,
    Order,
    inputs_of,
    num_stages_of,
    output_of,
    peak_activations,
    ranks_of,
    reader_of,
)

Costs: TypeAlias = Mapping[tuple[Kind, int], float]
"""Time of one microbatch by (kind, stage)."""

CostOf: TypeAlias = Callable[[Action], float]
"""Time of an action, where microbatches differ."""

Latency: TypeAlias = float | Callable[[int, int], float]
"""Time from the end of an action to the arrival of its output; may depend on (source, target)."""

MakeDecider: TypeAlias = Callable[[Sequence[Action], int, float], Decider]
"""(A rank's plan, stages, memory) -> its Decider."""


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
    """All actions; the actions of a rank are in sequence."""
    busy: tuple[float, ...]
    """Busy time of each rank."""
    peak_activations: tuple[int, ...]
    """See `schedule.peak_activations`."""
    waits: tuple[Mapping[Waiting, float], ...]
    """Time that each rank waits before its last action, by cause."""

    @property
    def order(self) -> Order:
        """The order as run."""
        spans = self.timeline
        return tuple(
            tuple(span.action for span in spans if span.rank == rank)
            for rank in range(len(self.busy))
        )

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
    costs: Costs | CostOf,
    *,
    latency: Latency = 0.0,
    slowness: Sequence[float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    memory: float | None = None,
    decider: MakeDecider = Decider,
) -> Simulation:
    """Simulate an order. Raises ValueError on a deadlock.

    `slowness`: a factor on the costs of each rank. `jitter`: standard deviation of the log of a
    random factor (mean 1) on every cost and latency. It is drawn from (seed, action): two orders of
    the same stages get the same factors. `memory`: None runs the order as planned; a number lets
    every rank decide at run time within this memory (see `Decider`), or as another `decider` does.
    """

    def took(rank: int, action: Action) -> float:
        cost = costs(action) if callable(costs) else costs[action.kind, action.stage]
        cost *= slowness[rank] if slowness else 1.0
        return cost * jitter_factor(jitter, seed, str(action))

    def travel(source: int, target: int, message: Action) -> float:
        time = latency(source, target) if callable(latency) else latency
        return time * jitter_factor(jitter, seed, f"message {message}")

    times = _Times(took, travel)
    if memory is None:
        return _simulate_planned(order, times)
    return _RunTime(order, times, memory, decider).simulate()


class _Times(NamedTuple):
    """Times of actions and messages."""

    took: Callable[[int, Action], float]
    """(rank, action) -> time of the action."""
    travel: Callable[[int, int, Action], float]
    """(source, target, message) -> latency of the message."""


def _simulate_planned(order: Order, times: _Times) -> Simulation:
    num_stages = num_stages_of(order)
    rank_of = ranks_of(order)
    free = [0.0] * len(order)
    busy = [0.0] * len(order)
    waits = [dict.fromkeys(Waiting, 0.0) for _ in order]
    made: dict[Action, float] = {}
    arrived: dict[Action, float] = {}
    last: dict[tuple[int, int, Kind], float] = {}
    timeline = []
    for rank, action in sequence_of(order):
        inputs = (
            made[x] if rank_of[x.stage] == rank else arrived[x]
            for x in inputs_of(action, num_stages)
        )
        start = max(free[rank], *inputs, 0.0)
        is_forward = action.kind is Kind.FORWARD
        waits[rank][Waiting.INPUT if is_forward else Waiting.GRADIENT] += start - free[rank]
        took = times.took(rank, action)
        free[rank] = start + took
        busy[rank] += took
        timeline.append(TimedAction(rank, action, start, free[rank]))

        message = output_of(action)
        made[message] = free[rank]
        target = rank_of.get(reader_of(message), rank)
        if target != rank:
            channel = rank, target, message.kind
            # Messages do not overtake each other.
            arrives = free[rank] + times.travel(rank, target, message)
            arrived[message] = last[channel] = max(last.get(channel, 0.0), arrives)
    return Simulation(tuple(timeline), tuple(busy), peak_activations(order), tuple(waits))


class _RunTime:
    """Virtual time in which every rank runs what its `Decider` says."""

    def __init__(self, order: Order, times: _Times, memory: float, make: MakeDecider) -> None:
        num_stages = num_stages_of(order)
        self.times, self.rank_of = times, ranks_of(order)
        self.deciders = [make(actions, num_stages, memory) for actions in order]
        self.busy = [0.0] * len(order)
        self.running: list[Action | None] = [None] * len(order)
        self.waits = [dict.fromkeys(Waiting, 0.0) for _ in order]
        self.waiting: list[tuple[Waiting, float] | None] = [None] * len(order)
        """Each rank's cause of waiting, and since when."""
        self.timeline: list[TimedAction] = []
        self.lanes: dict[tuple[Kind, int], float] = {}
        """(Kind, source stage) -> arrival of its last message."""
        self.events: list[tuple[float, int, int, Action, bool]] = []
        """(Time, number, rank, action, True if it is a message that arrives)."""
        self.num_events = 0

    def simulate(self) -> Simulation:
        """Run until every rank has finished. Raises ValueError for a deadlock."""
        for rank in range(len(self.deciders)):
            self.decide(rank, 0.0)
        while self.events:
            now = self.events[0][0]
            # All that happens at a moment is known before a rank decides.
            ranks = {self.happen(*heapq.heappop(self.events)) for _ in self.simultaneous(now)}
            for rank in sorted(ranks):
                self.decide(rank, now)
        stuck = [str(rank) for rank, decider in enumerate(self.deciders) if not decider.finished]
        if stuck:
            raise ValueError(f"Deadlock: ranks {', '.join(stuck)} wait for each other.")
        timeline, waits = tuple(self.timeline), tuple(self.waits)
        found = Simulation(timeline, tuple(self.busy), (), waits)
        return replace(found, peak_activations=peak_activations(found.order))

    def simultaneous(self, now: float) -> Iterator[None]:
        """Once for every event at this moment, also those that these events cause."""
        while self.events and self.events[0][0] == now:
            yield

    def happen(self, now: float, _: int, rank: int, action: Action, is_message: bool) -> int:
        """Report an arrival or the end of an action to the rank's Decider; returns the rank."""
        if is_message:
            self.deciders[rank].arrived(action)
            return rank
        self.deciders[rank].done(action)
        self.running[rank] = None
        message = output_of(action)
        target = self.rank_of.get(reader_of(message), rank)
        if target != rank:
            lane = message.kind, message.stage
            arrives = now + self.times.travel(rank, target, message)
            self.lanes[lane] = max(self.lanes.get(lane, 0.0), arrives)
            self.add(self.lanes[lane], target, message, is_message=True)
        return rank

    def decide(self, rank: int, now: float) -> None:
        """Begin the next action of a rank, or note the cause of its wait."""
        if self.running[rank] or self.deciders[rank].finished:
            return
        if waiting := self.waiting[rank]:
            cause, since = waiting
            self.waits[rank][cause] += now - since
            self.waiting[rank] = None
        found = self.deciders[rank].next()
        if isinstance(found, Waiting):
            self.waiting[rank] = found, now
            return
        took = self.times.took(rank, found)
        self.running[rank] = found
        self.busy[rank] += took
        self.timeline.append(TimedAction(rank, found, now, now + took))
        self.add(now + took, rank, found, is_message=False)

    def add(self, at: float, rank: int, action: Action, *, is_message: bool) -> None:
        """Add an event; events of one moment stay in sequence."""
        self.num_events += 1
        heapq.heappush(self.events, (at, self.num_events, rank, action, is_message))


def jitter_factor(jitter: float, seed: int, name: str) -> float:
    """A log-normal factor of mean 1, a pure function of (seed, name) in every process."""
    if jitter == 0:
        return 1.0
    # A text seed: hash() would differ between processes.
    return random.Random(f"{seed} {name}").lognormvariate(-jitter * jitter / 2, jitter)


class Taken(NamedTuple):
    """Seconds from the beginning of an action to an event."""

    computed: float
    left: float
    """Until its output has left for another rank."""
    free: float
    """Seconds until the rank is free."""


def replay(
    order: Order,
    seconds: Mapping[Action, Taken],
    latencies: Mapping[tuple[int, int], float],
    ready: Sequence[float] | None = None,
) -> tuple[TimedAction, ...]:
    """The timeline of an order; raises ValueError on a deadlock.

    `latencies`: by (source, target) rank, else 0. `ready`: when each rank may begin.
    """
    num_stages = num_stages_of(order)
    rank_of = ranks_of(order)
    free = list(ready) if ready else [0.0] * len(order)
    ends: dict[Action, float] = {}
    timeline = []
    for rank, action in sequence_of(order):
        start = free[rank]
        for message in inputs_of(action, num_stages):
            source = rank_of[message.stage]
            start = max(start, ends[message] + latencies.get((source, rank), 0.0))
        took = seconds[action]
        ends[output_of(action)], free[rank] = start + took.left, start + took.free
        timeline.append(TimedAction(rank, action, start, start + took.computed))
    return tuple(timeline)
