"""Transport of a pipeline rank: its ends of all lanes, and the notices that wake it.

A lane carries the messages of one kind and stage to another rank, in sequence of microbatches:
messages need no tags. The receiver posts a message before it may be sent: that is the sender's
credit. Nothing arrives that was not posted, so received memory is bounded by what was posted.

Credits and announcements are notices on the socket of two ranks (meeting.py); the tensors travel
as the lane's Sender and Receiver have it.
"""

from __future__ import annotations

import math
import os
import select
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from titan_dit.models.base import Stream
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline.schedules.schedule import Action, Kind
from titan_dit.pipeline.transports.meeting import Notice, Peer

POLL_S = 2e-4
"""Sleep between two looks at a device or a network card, which cannot wake a poll()."""
SHORTEST_POLL_S = 1e-3
"""poll() counts in milliseconds."""


class Lane(NamedTuple):
    """The messages of one kind (F or I) that a stage on rank `source` makes for rank `target`."""

    kind: Kind
    stage: int
    source: int
    target: int

    def __str__(self) -> str:
        """Stage and kind, "2F", as `Action` writes them."""
        return f"{self.stage}{self.kind}"

    def message(self, number: int) -> Action:
        """The message of a microbatch."""
        return Action(self.kind, self.stage, number)


def lanes(stage_ranks: Sequence[int]) -> tuple[Lane, ...]:
    """All lanes between different ranks, in the same sequence on every rank."""
    found = []
    for stage, (rank, following) in enumerate(pairwise(stage_ranks)):
        if rank != following:
            found.append(Lane(Kind.FORWARD, stage, rank, following))
            found.append(Lane(Kind.BACKWARD_INPUT, stage + 1, following, rank))
    return tuple(found)


@dataclass
class End:
    """One end of a lane: the other rank, and the tensors of a message."""

    lane: Lane
    index: int
    """Index of the lane in `lanes`."""
    peer: Peer
    p2p: P2PGroups
    tensors: Stream
    """Shapes and dtypes of a message, on the meta device; see `Transport.use`."""
    device: torch.device

    @classmethod
    def of(
        cls,
        lane: Lane,
        index: int,
        peer: Peer,
        p2p: P2PGroups,
        stream: Stream,
        device: torch.device,
    ) -> End:
        """An end; `stream`: the tensors between two stages."""
        return cls(lane, index, peer, p2p, tensors_of(stream, lane.kind), device)

    @property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def empty(self) -> Stream:
        """Buffers for one message."""
        return tuple(
            torch.empty_like(tensor, device=self.device, requires_grad=False)
            for tensor in self.tensors
        )

    def tell(self, number: int, payload: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send the other end a notice about a message; closes the files."""
        self.peer.tell(self.index, number, payload, files)


class Sender(ABC):
    """The sending end of a lane."""

    def __init__(self, end: End) -> None:
        self.end = end

    def made(self, number: int) -> None:  # noqa: B027 On a CPU it is complete.
        """The message is enqueued on the device; `send` follows, perhaps after later actions."""

    @abstractmethod
    def send(self, number: int, tensors: Stream, credit: Notice) -> None:
        """Start sending a message that has a credit, and announce it. Must not block.

        `tensors`: contiguous and without gradients; computed when the message was `made`.
        `credit`: with the payload and the files (now owned) of `Receiver.post`. An announcement is
        one `end.tell`, for each message, in sequence; it may also follow in `progress`.
        """

    def reshape(self) -> None:  # noqa: B027 Some have no use for the shapes.
        """The tensors of the end's messages have changed, to no more bytes than at first."""

    def progress(self) -> bool:
        """Progress the copies that were started; True while it must be called again soon."""
        return False

    def flush(self) -> None:  # noqa: B027 Some have nothing to wait for.
        """Wait until every message that was started has left and needs this rank no more."""

    def close(self) -> None:  # noqa: B027 Some have nothing to free.
        """Free what the lane holds; views that a user holds stay valid."""


class Receiver(ABC):
    """The receiving end of a lane."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.here: list[int] = []
        """Messages that can be taken and have not been returned by `arrived`."""

    def reshape(self) -> None:  # noqa: B027 Some have no use for the shapes.
        """See `Sender.reshape`."""

    @abstractmethod
    def post(self, number: int) -> tuple[bytes, Sequence[int]]:
        """Make room for a message; payload and files of the credit."""

    def announced(self, notice: Notice) -> None:
        """The sender has announced the next message; unless overridden, it can be taken."""
        self.here.append(notice.number)

    def arrived(self) -> Sequence[int]:
        """Messages that can be taken, each returned once, in sequence. Must not block."""
        found, self.here = self.here, []
        return found

    def progress(self) -> bool:
        """Progress the copies that were announced; True while it must be called again soon."""
        return False

    @abstractmethod
    def take(self, number: int) -> Stream:
        """The tensors of a message that has arrived."""

    def close(self) -> None:  # noqa: B027 Some have nothing to free.
        """Free what the lane holds; tensors that were taken stay valid."""


class Outgoing:
    """The messages of a lane that wait for their credits, and the credits that wait for them."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.waiting: deque[tuple[int, Stream]] = deque()
        self.credits: deque[Notice] = deque()

    def push(self) -> bool:
        """Send the messages that have a credit; True if one left."""
        went = False
        while self.waiting and self.credits:
            number, tensors = self.waiting.popleft()
            credit = self.credits.popleft()
            assert credit.number == number, f"{self.sender.end.lane}: {number} after {credit}"
            self.sender.send(number, tensors, credit)
            went = True
        return went


class Transport:
    """The ends of all lanes of one rank. Used by one thread; none of its own."""

    def __init__(
        self,
        peers: Mapping[int, Peer],
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
    ) -> None:
        """`peers` by rank; `senders` and `receivers` by the index of their lane."""
        self.peers, self.receivers = peers, receivers
        self.watched: list[Peer] = []
        """Sockets without lanes, whose notices end a `wait`, too; their owner reads them."""
        self.outgoing = {index: Outgoing(sender) for index, sender in senders.items()}
        ends: list[Sender | Receiver] = [*senders.values(), *receivers.values()]
        idle = Sender.progress, Receiver.progress
        self.working = [end for end in ends if type(end).progress not in idle]
        """Ends whose copies progress only while they are called."""
        self.every = ends
        self.stream: Stream | None = None
        """The tensors between two stages; None before the first `use`."""
        names = {(e.lane.kind, e.lane.stage): i for i, e in self.ends().items()}
        self.names: dict[tuple[Kind, int], int] = names
        self.posted: set[Action] = set()
        """Messages that may arrive and have not been taken."""
        self.fresh: list[Action] = []
        """Messages that have arrived since the last call of `arrived`."""
        self.here: set[Action] = set()
        """Messages that have arrived and have not been taken."""

    def ends(self) -> dict[int, End]:
        """The end of each lane of this rank, by the index of the lane."""
        senders = {index: out.sender.end for index, out in self.outgoing.items()}
        return senders | {index: receiver.end for index, receiver in self.receivers.items()}

    def use(self, stream: Stream) -> None:
        """Let the messages of the next pass have these tensors; by all ranks, between two passes.

        `stream`: the tensors between two stages, on the meta device, of no more bytes than those of
        the start.
        """
        if stream is self.stream:
            return
        self.stream = stream
        for each in self.every:
            each.end.tensors = tensors_of(stream, each.end.lane.kind)
            each.reshape()

    def lane_of(self, message: Action) -> int:
        """The index of a message's lane."""
        return self.names[message.kind, message.stage]

    def post(self, message: Action) -> None:
        """Allow a message to arrive: the credit of its sender. In sequence for each lane."""
        index = self.lane_of(message)
        receiver = self.receivers[index]
        payload, files = receiver.post(message.microbatch)
        self.posted.add(message)
        receiver.end.tell(message.microbatch, payload, files)

    def send(self, message: Action, tensors: Stream) -> None:
        """Send a message once it has its credit; never blocks. Keeps the tensors until then."""
        outgoing = self.outgoing[self.lane_of(message)]
        # Before `made`, whose event would not cover a copy that is made later.
        whole = tuple(tensor.detach().contiguous() for tensor in tensors)
        outgoing.sender.made(message.microbatch)
        outgoing.waiting.append((message.microbatch, whole))
        if not outgoing.push():  # Its credit may be here, unread.
            self.poll()

    def arrived(self) -> list[Action]:
        """Posted messages that arrived since the last call; also sends what has credit.

        Never blocks.
        """
        if not self.fresh:
            self.poll()
        found, self.fresh = self.fresh, []
        return found

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until a message has arrived or left, or for `timeout_s`.

        A notice of a watched socket ends it, too.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.fresh:
            left = deadline - time.monotonic()
            if left <= 0 or self.sleep(left) or self.poll():
                return

    def sleep(self, seconds: float) -> bool:
        """Sleep until a notice comes, at most `seconds`; briefly while a device is at work.

        True if it is one for the owner of a watched socket.
        """
        if any([end.progress() for end in self.working]):
            seconds = min(seconds, POLL_S)
        if seconds < SHORTEST_POLL_S:
            time.sleep(seconds)
            seconds = 0.0
        poll = select.poll()
        for peer in (*self.peers.values(), *self.watched):
            if not peer.has_left:
                poll.register(peer.socket, select.POLLIN | (select.POLLOUT * peer.has_backlog))
        ready = dict(poll.poll(None if seconds == math.inf else seconds * 1e3))
        return any(ready.get(peer.socket.fileno(), 0) & select.POLLIN for peer in self.watched)

    def poll(self) -> bool:
        """Read notices, send messages that have credit, collect arrivals. Never blocks.

        True if any message arrived or left.
        """
        for peer in self.watched:
            peer.write()
        for peer in self.peers.values():
            for notice in peer.exchange():
                if notice.lane in self.receivers:
                    self.receivers[notice.lane].announced(notice)
                else:
                    self.outgoing[notice.lane].credits.append(notice)
        changed = [out.push() for out in self.outgoing.values()]
        for end in self.working:
            end.progress()
        for receiver in self.receivers.values():
            for number in receiver.arrived():
                message = receiver.end.lane.message(number)
                self.fresh.append(message)
                self.here.add(message)
                changed.append(True)
        return any(changed)

    def take(self, message: Action) -> Stream:
        """The tensors of a posted message; waits for it if it has not arrived."""
        assert message in self.posted, f"{message} was not posted"
        while message not in self.here:
            self.wait_for_progress()
        self.here.remove(message)
        self.posted.remove(message)
        return self.receivers[self.lane_of(message)].take(message.microbatch)

    def flush(self) -> None:
        """Wait until everything sent has left. At the end of a pass, before any collective."""
        while any(out.waiting for out in self.outgoing.values()):
            self.wait_for_progress()
        for out in self.outgoing.values():
            out.sender.flush()
        while any(peer.has_backlog for peer in self.peers.values()):
            self.wait_for_progress()

    def wait_for_progress(self) -> None:
        """Make progress once; if nothing arrived or left, wait for a notice."""
        if not self.poll():
            self.sleep(math.inf)

    def close(self) -> None:
        """Close all lanes and sockets. Both ends flush before."""
        for outgoing in self.outgoing.values():
            for credit in outgoing.credits:
                for file in credit.files:
                    os.close(file)
        for outgoing in self.outgoing.values():
            outgoing.sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        for peer in self.peers.values():
            peer.close()


def tensors_of(stream: Stream, kind: Kind) -> Stream:
    """The tensors of a message: the stream's, or for a gradient only its floating-point ones."""
    return tuple(t for t in stream if kind is Kind.FORWARD or t.is_floating_point())
