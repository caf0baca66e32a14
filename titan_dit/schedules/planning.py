"""A better order for known costs: what the Decider would run, played in the simulator.

The order that comes out is a plan: the planned loop runs it as it runs any schedule's. Where
lengths and delays are the same in every step, it gains what deciding at run time gains.

Two stages of a rank may send over one edge. A Decider uses their messages as it likes, a planned
loop only in the sequence in which they are sent. So three kinds of Decider play: a free one, one
that sees the messages of an edge one by one, and one that keeps the planned sequence of forwards
and that of backwards. The last one always ends, and its messages never overtake: only forwards and
backwards change places, and they travel apart. Of the orders that pass the proof, the fastest wins,
if it is faster than the planned order at all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from titan_dit.schedules.action import Action, Kind, Order
from titan_dit.schedules.decide import Decider, windows
from titan_dit.schedules.messages import inputs_of
from titan_dit.schedules.proof import check
from titan_dit.schedules.simulator import CostOf, Costs, Latency, MakeDecider, Simulation, simulate

PAYS = 1.01
"""An order must be this much faster than the planned one: less is lost in the noise of a step."""


@dataclass(frozen=True)
class Plan:
    """An order for known costs, and the simulated steps."""

    order: Order
    before: Simulation
    """Of the planned order."""
    after: Simulation
    """Of this order, run as planned."""
    window: tuple[int, ...]
    """Activations that each rank may hold."""

    @property
    def gain(self) -> float:
        """The planned step / the new one: 1, or at least PAYS."""
        return self.before.makespan / self.after.makespan

    @property
    def pays(self) -> bool:
        """False if this is the planned order."""
        return self.gain > 1


def plan(
    order: Order,
    stage_ranks: Sequence[int],
    num_microbatches: int,
    costs: Costs | CostOf,
    latency: Latency = 0.0,
    memory: float = 1.0,
) -> Plan:
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
    return Plan(best, before, after, windows(order, memory))


def played(
    order: Order,
    stage_ranks: Sequence[int],
    costs: Costs | CostOf,
    latency: Latency,
    memory: float,
) -> Iterator[Order]:
    """The orders that every kind of Decider runs, at the planned memory and at all of it."""
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
            except ValueError:  # One by one, ranks may wait for each other.
                continue


class OneByOne(Decider):
    """Sees a message of an edge (source rank, kind) once the one sent before it has been used."""

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
        """The messages of each edge that are here and not used yet; only the first is seen."""
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
        """Where a message comes from."""
        return self.stage_ranks[message.stage], message.kind


class InPlannedSequence(Decider):
    """Runs the forwards of all stages in their planned sequence, and so the backwards (B, I)."""

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
