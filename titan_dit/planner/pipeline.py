"""The time of a pipeline's pass: `schedules.simulator` for a search, which repeats an order often.

The inputs of an action depend on the order alone: they are looked up once, then simulated with the
times of many layouts. The ends are those of `simulate`. A pass of many microbatches is simulated
with fewer: once the pipeline is full, every further round takes the same time.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titan_dit.pipeline.schedules.looped import round_size
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.proof import sequence_of
from titan_dit.pipeline.schedules.schedule import (
    Action,
    Kind,
    Order,
    inputs_of,
    num_stages_of,
    output_of,
    ranks_of,
    schedule_of,
)
from titan_dit.plan import RunPlan

MIN_ROUNDS = 3
"""Minimum number of rounds to play. A round is `pp` microbatches, or the group of an interleaved
schedule."""
MAX_ACTIONS = 8192
"""Maximum number of actions of a pass that is simulated whole."""
LAST_KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""Actions that end a stage's work on a microbatch."""


class CompiledAction(NamedTuple):
    """An action of a compiled order."""

    rank: int
    cost: tuple[Kind, int]
    """(kind, stage)."""
    source: int
    """The step of another rank whose output it needs; -1 for none."""
    sends: tuple[int, int] | None
    """(source, target) rank, if another rank needs its output."""
    is_last: bool
    """True if the action ends the work of its stage."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of actions and messages, in seconds."""

    costs: Mapping[tuple[Kind, int], float]
    """Duration of an action by (kind, stage), as for `simulate`."""
    latency: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Time from the end of an action to the arrival of its output, by (source, target) rank;
    default 0."""
    in_turn: bool = False
    """True: a rank sends one message after another, each for its latency, as on one link. False:
    messages do not delay each other, as in `simulate`."""
    ready: Sequence[float] = ()
    """Time at which each rank can begin; empty: 0."""
    after: Mapping[int, float] = field(default_factory=dict)
    """Time that a rank needs, by stage, after its last action of that stage; default 0."""


class PassTimes(NamedTuple):
    """A simulated pass; both fields by rank, in seconds."""

    ends: tuple[float, ...]
    """Time at which the rank is free."""
    busy: tuple[float, ...]
    """Sum of its actions' durations."""

    @property
    def makespan(self) -> float:
        """Time at which every rank is free."""
        return max(self.ends)

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the makespan that each rank waits."""
        return tuple(1 - busy / self.makespan for busy in self.busy)


def compiled(order: Order) -> tuple[CompiledAction, ...]:
    """The actions of an order, each after its inputs. Raises ValueError on a deadlock."""
    num_stages = num_stages_of(order)
    rank_of = ranks_of(order)
    left = Counter(a.stage for actions in order for a in actions if a.kind in LAST_KINDS)
    made: dict[Action, int] = {}
    steps: list[CompiledAction] = []
    sends: dict[int, tuple[int, int]] = {}
    for rank, action in sequence_of(order):
        source = -1
        # What the rank makes itself it has made before.
        for message in inputs_of(action, num_stages):
            if rank_of[message.stage] != rank:
                source = made[message]
                sends[source] = rank_of[message.stage], rank
        made[output_of(action)] = len(steps)
        left[action.stage] -= action.kind in LAST_KINDS
        is_last = action.kind in LAST_KINDS and not left[action.stage]
        steps.append(CompiledAction(rank, (action.kind, action.stage), source, None, is_last))
    return tuple(step._replace(sends=sends.get(number)) for number, step in enumerate(steps))


def play(steps: Sequence[CompiledAction], num_ranks: int, times: Durations) -> PassTimes:
    """Simulate one pass: every action runs as soon as its rank and its input are ready.

    A channel has one latency for all messages, so none overtakes another.
    """
    costs, latency, in_turn = times.costs, times.latency, times.in_turn
    free, busy = list(times.ready or (0.0,) * num_ranks), [0.0] * num_ranks
    sent = [0.0] * num_ranks
    arrivals: list[float] = []
    for rank, cost, source, sends, is_last in steps:
        start = free[rank]
        if source >= 0 and arrivals[source] > start:
            start = arrivals[source]
        took = costs[cost]
        end = start + took
        busy[rank] += took
        arrives = end
        if sends:
            if in_turn and sent[rank] > end:
                arrives = sent[rank]
            arrives += latency.get(sends, 0.0)
            sent[rank] = arrives
        arrivals.append(arrives)
        free[rank] = end + times.after.get(cost[1], 0.0) if is_last else end
    return PassTimes(tuple(free), tuple(busy))


def pass_times(plan: RunPlan, times: Durations) -> PassTimes:
    """Simulate the pass of a training step; a run-time order counts as planned."""
    count, pp = plan.num_microbatches, plan.sizes.pp
    if plan.order_of_file is not None:
        return play(compiled(plan.order(count)), pp, times)
    size, pipeline = round_of(plan), plan.pipeline
    kinds = 3 if plan.splits_backward else 2
    whole = max(MIN_ROUNDS, MAX_ACTIONS // (kinds * plan.num_stages * size))
    if count <= (whole + 1) * size:
        return play(program(pipeline.schedule, pp, pipeline.virtual_stages, count), pp, times)
    # The growth of half of the rounds: messages may let a round last longer, the next one less.
    grows = whole // 2
    more = whole * size + count % size
    fewer = more - grows * size
    some, most = (
        play(program(pipeline.schedule, pp, pipeline.virtual_stages, number), pp, times)
        for number in (fewer, more)
    )
    times_grown = (count - more) / (grows * size)

    def grown(few: Sequence[float], many: Sequence[float]) -> tuple[float, ...]:
        return tuple(b + times_grown * (b - a) for a, b in zip(few, many, strict=True))

    return PassTimes(grown(some.ends, most.ends), grown(some.busy, most.busy))


def round_of(plan: RunPlan) -> int:
    """Microbatches of a round, after which an order repeats itself."""
    pp = plan.sizes.pp
    if schedule_of(plan.pipeline.schedule).interleaved:
        return round_size(pp, plan.num_microbatches)
    return pp


@functools.lru_cache(maxsize=256)
def program(
    schedule: str, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> tuple[CompiledAction, ...]:
    """The compiled order of a schedule. Cached: a search replays it with many durations."""
    return compiled(
        pipeline_order(
            schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
        )
    )
