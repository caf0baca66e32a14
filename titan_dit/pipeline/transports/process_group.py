"""Streams through a process group of torch: gloo on a CPU, NCCL on a GPU.

Each lane has a group of its own, opened by its two ends: the sequence within it is known.

gloo: a receive is posted with the credit, and data flows while both ranks compute. gloo reports
neither a send nor a receive as complete, so a message counts as arrived when its sender announces
it; `take` waits for the rest. A credit says how many messages were taken: those need no more
memory of the sender.

NCCL: a kernel that waits for the other rank would hold SMs of the GPU. A send is announced and
started when its tensors are computed, a receive when the message is announced.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_dit.models.base import Stream
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline.transports.base import End, Receiver, Sender
from titan_dit.pipeline.transports.meeting import Notice

TAKEN = struct.Struct("<I")
"""Payload of a credit: messages taken so far."""


class Flying(NamedTuple):
    """A message on its way."""

    tensors: Stream
    works: Sequence[dist.Work]


def opened(end: End) -> P2PGroups:
    """The group of a lane. Both ends open theirs in the sequence of all lanes."""
    p2p = P2PGroups(end.p2p.mesh, f"{end.lane}:")
    p2p.open([(end.lane.source, end.lane.target)])
    return p2p


def wait(works: Sequence[dist.Work]) -> None:
    """Wait for works; on a GPU only the current CUDA stream waits."""
    for work in works:
        work.wait()


class GroupSender(Sender):
    """Sends by gloo."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.p2p = opened(end)
        self.flying: deque[Flying] = deque()
        self.num_taken = 0
        """Messages that the receiver is known to have taken."""

    def send(self, number: int, tensors: Stream, credit: Notice) -> None:
        """See `Sender.send`."""
        self.forget(*TAKEN.unpack(credit.payload))
        self.flying.append(Flying(tensors, self.p2p.send(tensors, self.end.lane.target)))
        self.end.tell(number)

    def forget(self, num_taken: int) -> None:
        """Free messages that were taken: waiting for them takes no time."""
        for _ in range((num_taken - self.num_taken) % (1 << 32)):
            wait(self.flying.popleft().works)
        self.num_taken = num_taken

    def flush(self) -> None:
        """See `Sender.flush`: what gloo has not sent when a rank ends is lost."""
        for flying in self.flying:
            wait(flying.works)
        # The receiver will count them as taken.
        self.flying = deque(Flying((), ()) for _ in self.flying)


class GroupReceiver(Receiver):
    """Receives by gloo."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.p2p = opened(end)
        self.flying: dict[int, Flying] = {}
        self.num_taken = 0

    def post(self, number: int) -> tuple[bytes, Sequence[int]]:
        """See `Receiver.post`."""
        self.receive(number)
        return TAKEN.pack(self.num_taken % (1 << 32)), ()

    def receive(self, number: int) -> None:
        """Start receiving."""
        buffers = self.end.empty()
        works = self.p2p.receive(buffers, self.end.lane.source)
        self.flying[number] = Flying(buffers, works)

    def take(self, number: int) -> Stream:
        """See `Receiver.take`."""
        buffers, works = self.flying.pop(number)
        wait(works)
        self.num_taken += 1
        return buffers


class DeviceGroupSender(Sender):
    """Sends by NCCL, on a CUDA stream of its own: a message waits for its own computation only."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.p2p = opened(end)
        self.side = torch.cuda.Stream(end.device)  # type: ignore[no-untyped-call]
        self.computed: dict[int, torch.cuda.Event] = {}
        self.computing: deque[tuple[int, Stream, torch.cuda.Event]] = deque()
        self.flying: deque[Flying] = deque()

    def made(self, number: int) -> None:
        """See `Sender.made`."""
        self.computed[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.computed[number].record()

    def send(self, number: int, tensors: Stream, credit: Notice) -> None:
        """See `Sender.send`."""
        self.computing.append((number, tensors, self.computed.pop(number)))
        self.progress()

    def progress(self) -> bool:
        """See `Sender.progress`: start what is computed, free what was sent."""
        while self.computing and self.computing[0][2].query():  # type: ignore[no-untyped-call]
            number, tensors, _ = self.computing.popleft()
            with torch.cuda.stream(self.side):
                self.flying.append(Flying(tensors, self.p2p.send(tensors, self.end.lane.target)))
            self.end.tell(number)
        while self.flying and all(work.is_completed() for work in self.flying[0].works):
            self.flying.popleft()
        return bool(self.computing)

    def flush(self) -> None:
        """See `Sender.flush`."""
        if self.computing:
            self.computing[-1][2].synchronize()
            self.progress()
        for flying in self.flying:
            wait(flying.works)


class DeviceGroupReceiver(GroupReceiver):
    """Receives by NCCL, once a message is announced."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.side = torch.cuda.Stream(end.device)  # type: ignore[no-untyped-call]
        self.coming: deque[int] = deque()

    def post(self, number: int) -> tuple[bytes, Sequence[int]]:
        """See `Receiver.post`."""
        return b"", ()

    def announced(self, notice: Notice) -> None:
        """See `Receiver.announced`."""
        # Buffers of the side stream: no kernel of the computation still uses their memory.
        with torch.cuda.stream(self.side):
            self.receive(notice.number)
        self.coming.append(notice.number)

    def progress(self) -> bool:
        """See `Receiver.progress`."""
        while self.coming and all(w.is_completed() for w in self.flying[self.coming[0]].works):
            self.here.append(self.coming.popleft())
        return bool(self.coming or self.here)

    def take(self, number: int) -> Stream:
        """See `Receiver.take`."""
        buffers = super().take(number)
        for tensor in buffers:
            tensor.record_stream(torch.cuda.current_stream(self.end.device))
        return buffers


def ends(device: torch.device) -> tuple[type[Sender], type[Receiver]]:
    """The two ends of a lane, for tensors on a device."""
    if device.type == "cuda":
        return DeviceGroupSender, DeviceGroupReceiver
    return GroupSender, GroupReceiver
