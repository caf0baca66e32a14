"""Simulates a step whose messages NCCL carries, from what each rank's host posts and when.

NCCL runs the operations of one queue one after another. An operation starts when it is the first of
its queue on both ends, and when the computations before it on both ends are done. A host never
waits: computations wait for the messages that they use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from titan_dit.pipeline.pipelined import Planned
from titan_dit.pipeline.schedules.schedule import (
    Action,
    Call,
    Calls,
    Order,
    channels,
    inputs_of,
    output_of,
    reader_of,
)
from titan_dit.pipeline.schedules.simulator import Costs

LATENCY = 0.02
"""Time of a message, in forwards of an average stage."""

QueueOf: TypeAlias = Callable[[int, int, int], Hashable]
"""(rank, source, target) -> the queue on this rank of a message from `source` to `target`."""


def one_for_each_direction(rank: int, source: int, target: int) -> Hashable:
    """Queues of `P2PGroups`: one for each pair of ranks and direction."""
    return rank, source, target


class _Noted:
    """Stands for the groups of a rank: notes the receives that `Planned` posts."""

    def __init__(self, rank: int, calls: list[Call]) -> None:
        self.rank, self.calls = rank, calls

    def receive(self, message: Any, source: int) -> list[Any]:
        """Note a message, whose name stands for its buffers."""
        self.calls.append(Call("receive", message))
        return []


Sends: TypeAlias = Sequence[Mapping[Action, Sequence[Action]]]
"""By rank: action -> the messages that are sent after it, before the next action."""


def planned_calls(order: Order, stage_ranks: Sequence[int], sends: Sends | None = None) -> Calls:
    """The calls of every rank if receives are posted as by `Planned`, from `Planned` itself.

    `stage_ranks`: the rank of each stage. `sends`: None sends each output at once.
    """
    sequences = channels(order, stage_ranks)
    found = []
    for rank, actions in enumerate(order):
        calls: list[Call] = []
        groups: Any = _Noted(rank, calls)
        messages: Any = Planned(stage_ranks, sequences, groups, (), torch.device("cpu"))
        messages.empty = lambda message: message
        own = {m for (sender, _), out in sequences.items() if sender == rank for m in out}
        for action in messages.actions(actions):
            calls.append(Call("run", action))
            output = output_of(action)
            at_once = [output] if output in own else []
            sent = at_once if sends is None else sends[rank].get(action, ())
            calls += [Call("send", message) for message in sent]
        found.append(tuple(calls))
    return tuple(found)


def sends_of(calls: Calls) -> Sends:
    """The sends of recorded calls."""
    found: list[dict[Action, list[Action]]] = []
    for line in calls:
        sent: dict[Action, list[Action]] = {}
        latest: list[Action] = []
        for what, action in line:
            if what == "run":
                latest = sent.setdefault(action, [])
            elif what == "send":
                latest.append(action)
        found.append(sent)
    return found


def check_messages(calls: Calls, stage_ranks: Sequence[int], *, receives: bool) -> None:
    """Raise ValueError unless each pair of ranks sends its messages in the sequence of its actions.

    Messages carry no names: the receiver takes them in this sequence. A message is sent once, after
    its computation. `receives`: receives are compared, too.
    """
    order = tuple(tuple(call.action for call in line if call.what == "run") for line in calls)
    for what in ("send", "receive") if receives else ("send",):
        left = {pair: deque(sent) for pair, sent in channels(order, stage_ranks).items()}
        for rank, line in enumerate(calls):
            made: set[Action] = set()
            for call in line:
                if call.what == "run":
                    made.add(output_of(call.action))
                elif call.what == what:
                    message, reader = call.action, reader_of(call.action)
                    in_range = max(message.stage, reader) < len(stage_ranks)
                    pair = (stage_ranks[message.stage], stage_ranks[reader]) if in_range else None
                    due = left.get(pair) if pair else None
                    if not due or due.popleft() != message:
                        raise ValueError(f"Rank {rank} {what}s {message} out of sequence")
                    if what == "send" and message not in made:
                        raise ValueError(f"Rank {rank} sends {message} before it is computed")
        for (source, target), due in left.items():
            if due:
                rank = source if what == "send" else target
                raise ValueError(f"Rank {rank} never {what}s {due[0]}")


def makespan(
    calls: Calls,
    stage_ranks: Sequence[int],
    costs: Costs,
    queue_of: QueueOf = one_for_each_direction,
) -> float | None:
    """The time of the last action; None for a deadlock. `stage_ranks`: the rank of each stage."""
    return _Ranks(calls, stage_ranks, costs, queue_of).run()


class _Ranks:
    """Ranks that compute, and queues that carry their messages."""

    def __init__(
        self, calls: Calls, stage_ranks: Sequence[int], costs: Costs, queue_of: QueueOf
    ) -> None:
        self.num_stages, self.costs = len(stage_ranks), costs
        self.order = tuple(
            tuple(call.action for call in line if call.what == "run") for line in calls
        )
        sequences = channels(self.order, stage_ranks)
        self.ends = {message: pair for pair, sent in sequences.items() for message in sent}
        self.posts: dict[Action, list[tuple[int, int]]] = {}
        """Message -> (rank, computations before it) of both ends."""
        self.queues: dict[Hashable, deque[Action]] = {}
        self.queues_of: dict[Action, list[Hashable]] = {}
        for rank, line in enumerate(calls):
            done = 0
            for what, name in line:
                if what == "run":
                    done += 1
                    continue
                queue = queue_of(rank, *self.ends[name])
                self.posts.setdefault(name, []).append((rank, done))
                self.queues.setdefault(queue, deque()).append(name)
                self.queues_of.setdefault(name, []).append(queue)
        self.finished = [[0.0] for _ in calls]
        """By rank: when its first n actions are done."""
        self.free = dict.fromkeys(self.queues, 0.0)
        self.arrived: dict[Action, float] = {}

    def run(self) -> float | None:
        """See `makespan`."""
        progress = True
        while progress:
            progress = any([self.advance(rank) for rank in range(len(self.order))])
            for queue in self.queues:
                while self.deliver(queue):
                    progress = True
        pairs = zip(self.finished, self.order, strict=True)
        if any(len(done) <= len(actions) for done, actions in pairs):
            return None
        return max(done[-1] for done in self.finished)

    def advance(self, rank: int) -> bool:
        """Run the actions of a rank whose messages have arrived."""
        done = self.finished[rank]
        before = len(done)
        for action in self.order[rank][before - 1 :]:
            inputs = inputs_of(action, self.num_stages)
            needed = [m for m in inputs if m in self.ends and self.ends[m][1] == rank]
            if any(m not in self.arrived for m in needed):
                break
            start = max([done[-1], *(self.arrived[m] for m in needed)])
            done.append(start + self.costs[action.kind, action.stage])
        return len(done) > before

    def deliver(self, queue: Hashable) -> bool:
        """Carry the first message of a queue, if both ends are there."""
        if not self.queues[queue]:
            return False
        name = self.queues[queue][0]
        both = self.queues_of[name]
        if len(both) < 2 or any(self.queues[q][0] != name for q in both):
            return False
        if any(done >= len(self.finished[rank]) for rank, done in self.posts[name]):
            return False
        ready = [self.finished[rank][done] for rank, done in self.posts[name]]
        ready += [self.free[q] for q in both]
        self.arrived[name] = max(ready) + LATENCY
        for q in both:
            self.free[q] = self.arrived[name]
            self.queues[q].popleft()
        return True
