"""Run-time order: a pipeline rank runs what has arrived, inside its planned order's rules."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_dit.execution.base import Output
from titan_dit.execution.loop import Loop
from titan_dit.execution.pipelined import PipelinedExecutor, reduce_gradients
from titan_dit.models.base import SideInputs, Stream
from titan_dit.parallel.decisions import Decisions
from titan_dit.parallel.transports.base import Transport
from titan_dit.schedules.action import Action
from titan_dit.schedules.decide import Decider, Waiting
from titan_dit.schedules.messages import inputs_of
from titan_dit.schedules.moments import Mark, Moment

AHEAD = 2
"""Maximum unfinished actions on a device: one that runs, and the next one. An action that is
decided earlier could not use messages that arrive in the meantime."""
POLL_S = 5e-5
"""Seconds between a host's checks if its device has ended an action, while AHEAD are unfinished."""


class DecidingExecutor(PipelinedExecutor):
    """Runs training passes in run-time order; passes without backward keep the planned one."""

    def __init__(
        self,
        *planned: Any,
        memory: float,
        transport: Transport,
        decisions: Decisions,
        notes: Sequence[str] = (),
    ) -> None:
        """`planned`: the arguments of `PipelinedExecutor`; `memory`: see `Decider`."""
        super().__init__(*planned)
        self.notes = notes
        self.memory, self.transport, self.decisions = memory, transport, decisions
        transport.watched += decisions.peers
        # Executors have no close(): sockets are freed at garbage collection or process exit.
        weakref.finalize(self, close, transport, decisions)

    def learn(
        self,
        inputs: Sequence[Mapping[str, Tensor]],
        side_inputs: Sequence[SideInputs],
        finish: Callable[[Output, int], Tensor],
    ) -> None:
        """See `PipelinedExecutor.learn`."""
        decider = Decider(self.order[self.links.rank], len(self.stage_ranks), self.memory)
        source = Deciding(
            decider,
            self.transport,
            self.decisions,
            self.stage_ranks,
            self.links.rank,
            self.device,
            self.mark,
        )
        loop = Loop(self.stages, len(self.stage_ranks), source, self.mark)
        loop.run(source.actions(), inputs, side_inputs, finish)
        # Replicas decide differently and finish their stages in different orders, but all must
        # issue their collectives in one order.
        for _, stage in sorted(self.stages.items()):
            reduce_gradients(stage)


def close(transport: Transport, decisions: Decisions) -> None:
    """Close the sockets and memory of an executor."""
    transport.close()
    decisions.close()


class Deciding:
    """The source of actions of one pass, and its messages.

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
        self.mark(Moment.DECIDES, None)
        self.receive()
        waits = False
        while isinstance(found := self.decider.next(), Waiting):
            if not waits:
                self.mark(Moment.WAITS, found)
            waits = True
            self.transport.wait()
            self.receive()
        if waits:
            self.mark(Moment.WAITS, None)
        self.decisions.tell(found)
        return found

    def followed(self) -> Action:
        """The next action, as chosen by the group's first rank; waits for its messages."""
        self.mark(Moment.DECIDES, None)
        self.receive()
        waits = False
        action = self.decisions.told()
        while not (action and self.remote_inputs(action) <= self.here):
            if not waits:
                self.mark(Moment.WAITS, Waiting.INPUT)
            waits = True
            self.transport.wait()
            self.receive()
            action = action or self.decisions.told()
        if waits:
            self.mark(Moment.WAITS, None)
        return action

    def remote_inputs(self, action: Action) -> set[Action]:
        """The messages of other ranks that an action uses."""
        inputs = inputs_of(action, len(self.stage_ranks))
        return {message for message in inputs if self.stage_ranks[message.stage] != self.rank}

    def receive(self) -> None:
        """Register the messages that have arrived, and post the receives that are allowed."""
        self.decisions.read()
        for message in self.transport.arrived():
            self.mark(Moment.ARRIVED, message)
            self.here.add(message)
            self.decider.arrived(message)
        for message in self.decider.may_receive():
            self.transport.post(message)
            self.mark(Moment.ALLOWS, message)

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
        """True while the device has AHEAD actions that have not ended."""
        while self.ends and self.ends[0].query():  # type: ignore[no-untyped-call]
            self.ends.popleft()
        return len(self.ends) >= AHEAD
