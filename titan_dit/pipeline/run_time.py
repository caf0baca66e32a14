"""Run-time order: a pipeline rank runs what has arrived, within the rules of its planned order.

In a tp x cp group the first rank decides and sends its decisions to the others.
"""

from __future__ import annotations

import select
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from titan_dit.models.base import Stream
from titan_dit.parallel.p2p_groups import named, opened
from titan_dit.pipeline.events import Mark, PipelineEvent
from titan_dit.pipeline.pipelined import (
    Loop,
    Microbatches,
    PipelinedExecutor,
    PipelineParts,
    reduce_gradients,
)
from titan_dit.pipeline.schedules.decider import Decider, Waiting
from titan_dit.pipeline.schedules.schedule import Action, Kind, inputs_of
from titan_dit.pipeline.transports.base import Transport
from titan_dit.pipeline.transports.meeting import Peer, meet
from titan_dit.ranks import process_group

MAX_QUEUED = 2
"""Maximum unfinished actions on a device: one that runs, and the next one. An action that is
decided earlier could not use messages that arrive in the meantime."""
POLL_S = 5e-5
"""Seconds between a host's checks if its device has ended an action, while it has MAX_QUEUED."""


class DecidingExecutor(PipelinedExecutor):
    """Runs training passes in run-time order; passes without backward keep the planned one."""

    def __init__(self, given: PipelineParts, *, memory: float, links: Links) -> None:
        """`memory`: see `Decider`."""
        super().__init__(given, [links.line])
        self.memory, self.links = memory, links
        self.transport, self.decisions = links.transport, links.decisions

    def learn(self, work: Microbatches) -> None:
        """See `PipelinedExecutor.learn`."""
        self.transport.use(self.shapes.stream)
        decider = Decider(self.order[self.p2p.rank], len(self.stage_ranks), self.memory)
        messages = Deciding(
            decider,
            self.transport,
            self.decisions,
            self.stage_ranks,
            self.p2p.rank,
            self.device,
            self.mark,
        )
        loop = Loop(self.stages, len(self.stage_ranks), messages, work, self.mark)
        loop.run(messages.actions())
        # Replicas decide differently and finish their stages in different orders, but all must
        # issue their collectives in one order.
        for _, stage in sorted(self.stages.items()):
            reduce_gradients(stage)


class Links:
    """The connections of a rank in run-time order; the executors of all buckets share them."""

    def __init__(self, transport: Transport, line: str, decisions: Decisions) -> None:
        """`line`: the console line about the transport."""
        self.transport, self.line, self.decisions = transport, line, decisions
        transport.watched += decisions.peers
        # Executors have no close(): sockets are freed at garbage collection or process exit.
        weakref.finalize(self, close, transport, decisions)


def close(transport: Transport, decisions: Decisions) -> None:
    """Close the sockets and memory of some links."""
    transport.close()
    decisions.close()


class Deciding:
    """The actions and the messages of one pass in run-time order.

    In a tp x cp group the first rank's `Decider` chooses. The other ranks run its choices, once the
    messages that these need have arrived; their Deciders only name the messages to receive.
    """

    def __init__(
        self,
        decider: Decider,
        transport: Transport,
        decisions: Decisions,
        stage_ranks: Sequence[int],
        rank: int,
        device: torch.device,
        mark: Mark,
    ) -> None:
        self.decider, self.transport, self.decisions = decider, transport, decisions
        self.stage_ranks, self.rank = stage_ranks, rank
        self.queue, self.mark = DeviceQueue(device), mark
        self.here: set[Action] = set()
        """Messages of other ranks that have arrived and are not yet used."""

    def actions(self) -> Iterator[Action]:
        """Yield this rank's actions of the pass, each when it is to run."""
        choose = self.chosen if self.decisions.leads else self.followed
        while not self.decider.finished:
            action = choose()
            yield action
            self.queue.grow()
            self.decider.done(action)

    def chosen(self) -> Action:
        """The next action, by this rank's Decider; waits for messages while none can run."""
        while self.queue.is_full():
            self.transport.wait(POLL_S)
            self.receive()  # A wait ends at once while something is unread.
        self.mark(PipelineEvent.DECIDES, None)
        self.receive()
        waits = False
        while isinstance(found := self.decider.next(), Waiting):
            if not waits:
                self.mark(PipelineEvent.WAITS, found)
            waits = True
            self.transport.wait()
            self.receive()
        if waits:
            self.mark(PipelineEvent.WAITS, None)
        self.decisions.send(found)
        return found

    def followed(self) -> Action:
        """The next action, as chosen by the group's first rank; waits for its messages."""
        self.mark(PipelineEvent.DECIDES, None)
        self.receive()
        waits = False
        action = self.decisions.next_decision()
        while not (action and self.remote_inputs(action) <= self.here):
            if not waits:
                self.mark(PipelineEvent.WAITS, Waiting.INPUT)
            waits = True
            self.transport.wait()
            self.receive()
            action = action or self.decisions.next_decision()
        if waits:
            self.mark(PipelineEvent.WAITS, None)
        return action

    def remote_inputs(self, action: Action) -> set[Action]:
        """The messages of other ranks that an action uses."""
        inputs = inputs_of(action, len(self.stage_ranks))
        return {message for message in inputs if self.stage_ranks[message.stage] != self.rank}

    def receive(self) -> None:
        """Register the messages that have arrived, and post the receives that are allowed."""
        self.decisions.read()
        for message in self.transport.arrived():
            self.mark(PipelineEvent.ARRIVED, message)
            self.here.add(message)
            self.decider.arrived(message)
        for message in self.decider.may_receive():
            self.transport.post(message)
            self.mark(PipelineEvent.ALLOWS, message)

    def take(self, message: Action) -> Stream:
        """Take the tensors of a message that has arrived."""
        self.here.remove(message)
        return self.transport.take(message)

    def send(self, message: Action, tensors: Stream) -> None:
        """Send a message to the rank that uses it."""
        self.transport.send(message, tensors)

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        self.transport.flush()
        self.decisions.flush()


class DeviceQueue:
    """Unfinished actions on a device, counted by CUDA events; always none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ends: deque[torch.cuda.Event] = deque()

    def grow(self) -> None:
        """Call after an action is enqueued."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self.ends.append(event)

    def is_full(self) -> bool:
        """True while the device has MAX_QUEUED actions that have not ended."""
        while self.ends and self.ends[0].query():  # type: ignore[no-untyped-call]
            self.ends.popleft()
        return len(self.ends) >= MAX_QUEUED


class Decisions:
    """The decisions of a group of ranks: the first rank sends them, the others receive them.

    The ranks share collectives, so they must run the same actions in the same order, although
    messages may arrive in a different order on each. Decisions travel over sockets of the hosts,
    also in a run on GPUs: no device waits for them.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """`ranks`: global ranks of the group. Collective over them."""
        own = list(ranks).index(dist.get_rank())
        self.leads = own == 0
        self.peers: list[Peer] = []
        """Connections: on the first rank to all others, on the others to the first."""
        if len(ranks) > 1:
            wanted = range(1, len(ranks)) if self.leads else [0]
            self.peers = [*meet(open_group(ranks), wanted).values()]
        self.received: deque[Action] = deque()

    def send(self, action: Action) -> None:
        """Send this rank's next action to the other ranks; never blocks."""
        for peer in self.peers:
            peer.tell(action.stage, action.microbatch, action.kind.encode())

    def read(self) -> None:
        """Read the decisions that have arrived; never blocks.

        Raises:
            NetworkFailure: a rank of the group has ended.
        """
        for peer in self.peers:
            for stage, microbatch, kind, _ in peer.exchange():
                self.received.append(Action(Kind(kind.decode()), stage, microbatch))

    def next_decision(self) -> Action | None:
        """The next received action; None if none has been read yet."""
        return self.received.popleft() if self.received else None

    def flush(self) -> None:
        """Wait until all decisions have left; at the end of a pass, before any collective."""
        for peer in self.peers:
            while peer.has_backlog:
                waiting = select.poll()
                waiting.register(peer.socket, select.POLLOUT)
                waiting.poll()
                peer.write()

    def close(self) -> None:
        """Close the sockets."""
        for peer in self.peers:
            peer.close()


def open_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The gloo group over which the ranks connect; only they open it."""
    name = f"decisions of ranks {','.join(map(str, ranks))}"
    if group := opened(name):  # By an earlier build in this process.
        return group
    with process_group.opening(f"the group of the {name}"), named(name):
        found: dist.ProcessGroup = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True, group_desc=name
        )
    return found
