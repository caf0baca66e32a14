"""Makes an order for known costs: the one that a Decider runs in the simulator.

The planned loop runs it like a schedule's order. If times and latencies are the same in every step,
it gains as much as a run-time order.

Two stages of a rank may send over one edge. A Decider uses their messages in any sequence, a
planned loop only in the sequence in which they are sent. So three kinds of Decider are simulated:
an unrestricted one, one that sees the messages of an edge one by one, and one that keeps the
planned sequence of forwards and that of backwards. The last one never deadlocks, and its messages
never overtake each other: only forwards and backwards change places, and these use different edges.
The fastest order that passes the proof is taken, if it is faster than the planned order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from titan_dit.pipeline.schedules.decider import Decider, windows
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import Action, Kind, Order, inputs_of
from titan_dit.pipeline.schedules.simulator import (
    CostOf,
    Costs,
    Latency,
    MakeDecider,
    Simulation,
    simulate,
)

PAYS = 1.01
"""Minimum gain over the planned order; a smaller one is lost in the noise of a step."""


@dataclass(frozen=True)
class PlannedOrder:
    """An order for known costs, and the simulated steps."""

    order: Order
    before: Simulation
    """Simulation of the planned order."""
    after: Simulation
    """Simulation of this order, run as planned."""
    window: tuple[int, ...]
    """Activations that each rank may hold."""

    @property
    def gain(self) -> float:
        """Time of the planned order / time of this one: 1, or at least PAYS."""
        return self.before.makespan / self.after.makespan

    @property
    def pays(self) -> bool:
        """False if this is the planned order."""
        return self.gain > 1


def plan_order(
    order: Order,
    stage_ranks: Sequence[int],
    num_microbatches: int,
    costs: Costs | CostOf,
    latency: Latency = 0.0,
    memory: float = 1.0,
) -> PlannedOrder:
    """The fastest order within `memory` x the planned peaks; the planned one if it is as good.

    `stage_ranks`: the rank of each stage.
    """
    before = after = simulate(order, costs, latency=latency)
    best = order
    for found in played(order, stage_ranks, costs, latency, memory):
        try:
            check(found, num_stages=len(stage_ranks), num_microbatches=num_microbatches)
        except ValueError:  # Messages overtake.
            continue
        # As the planned loop runs it, not as the Deciders did.
        timed = simulate(found, costs, latency=latency)
        if timed.makespan < after.makespan:
            best, after = found, timed
    if before.makespan < PAYS * after.makespan:
        best, after = order, before
    return PlannedOrder(best, before, after, windows(order, memory))


def played(
    order: Order,
    stage_ranks: Sequence[int],
    costs: Costs | CostOf,
    latency: Latency,
    memory: float,
) -> Iterator[Order]:
    """Yield the order that each kind of Decider runs, with memory 1 and with `memory`."""
    kinds: tuple[MakeDecider, ...] = (
        Decider,
        partial(OneByOne, stage_ranks=stage_ranks),
        InPlannedSequence,
    )
    # With spare memory a Decider has another rule, which may be the slower one.
    for allowed in sorted({1.0, memory}):
        for kind in kinds:
            try:
                yield simulate(order, costs, latency=latency, memory=allowed, decider=kind).order
            except ValueError:  # `OneByOne` may deadlock.
                continue


class OneByOne(Decider):
    """Sees a message of an edge (source rank, kind) only after the previous one has been used."""

    def __init__(
        self,
        actions: Sequence[Action],
        num_stages: int,
        memory: float = 1.0,
        *,
        stage_ranks: Sequence[int],
    ) -> None:
        super().__init__(actions, num_stages, memory)
        self.stage_ranks = stage_ranks
        self.queues: defaultdict[tuple[int, Kind], deque[Action]] = defaultdict(deque)
        """Edge -> messages that have arrived and are not used yet; only the first is seen."""
        own = {action.stage for action in actions}
        self.input_of = {
            action: message
            for action in actions
            for message in inputs_of(action, num_stages)
            if message.stage not in own
        }

    def arrived(self, message: Action) -> None:
        """See `Decider.arrived`."""
        queue = self.queues[self.edge(message)]
        queue.append(message)
        if len(queue) == 1:
            super().arrived(message)

    def done(self, action: Action) -> None:
        """See `Decider.done`."""
        super().done(action)
        if message := self.input_of.get(action):
            queue = self.queues[self.edge(message)]
            queue.popleft()
            if queue:
                super().arrived(queue[0])

    def edge(self, message: Action) -> tuple[int, Kind]:
        """The edge of a message: (source rank, kind)."""
        return self.stage_ranks[message.stage], message.kind


class InPlannedSequence(Decider):
    """Runs the rank's forwards in planned sequence, and likewise its backwards (B, I)."""

    def __init__(self, actions: Sequence[Action], num_stages: int, memory: float = 1.0) -> None:
        super().__init__(actions, num_stages, memory)
        self.forwards = deque(action for action in actions if action.kind is Kind.FORWARD)
        backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        self.backwards = deque(action for action in actions if action.kind in backward)

    def ready_of(self, stage: int) -> list[Action]:
        """See `Decider.ready_of`."""
        heads = {*list(self.forwards)[:1], *list(self.backwards)[:1]}
        return [
            action
            for action in super().ready_of(stage)
            if action.kind is Kind.BACKWARD_WEIGHT or action in heads
        ]

    def done(self, action: Action) -> None:
        """See `Decider.done`."""
        super().done(action)
        for queue in (self.forwards, self.backwards):
            if queue and queue[0] == action:
                queue.popleft()
