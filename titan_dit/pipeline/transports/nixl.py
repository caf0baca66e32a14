"""Streams between hosts by RDMA writes of nixl, into slots that the receiver owns.

As in shared_memory.py a credit names the slot that its message fills. The first one of a slot also
carries what the sender needs to write there: the addresses of the receiver's agent and the keys of
the memory. The sender's NIC writes from the tensors themselves. When the write is complete the
sender announces the message, by a notice: so the receiver is woken, which nixl cannot do.

A write goes on, and ends, only while its sender polls: in `Transport.arrived`, `wait` and `flush`.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from titan_dit.models.base import Stream
from titan_dit.pipeline.transports.base import POLL_S, End, Receiver, Sender
from titan_dit.pipeline.transports.meeting import Notice
from titan_dit.pipeline.transports.nixl_agent import Agent, Piece
from titan_dit.pipeline.transports.shared_memory import SLOT, Layout, SharedReceiver

TARGET = struct.Struct("<QI")
"""Address and GPU of a slot, in its first credit; what the agent describes follows."""


class Flying(NamedTuple):
    """A write on its way; its memory must live and stay registered."""

    number: int
    transfer: Any
    free: Callable[[], None]
    """Call it when the write is done."""
    tensors: Stream = ()


class NixlSender(Sender):
    """Writes messages into the receiver's slots."""

    def __init__(self, end: End, agent: Agent) -> None:
        super().__init__(end)
        self.agent, self.layout = agent, Layout(end.tensors)
        self.slots: dict[int, tuple[int, int]] = {}
        """Slot -> its address and GPU."""
        self.receiver = ""
        """The name of the receiver's agent."""
        self.flying: deque[Flying] = deque()

    def reshape(self) -> None:
        """See `Sender.reshape`."""
        self.layout = self.layout.reshaped(self.end.tensors)

    def send(self, number: int, tensors: Stream, credit: Notice) -> None:
        """See `Sender.send`."""
        slot = self.slot_of(credit)
        sources, targets = self.pieces(tensors, slot)
        registered = self.agent.register(sources)
        transfer = self.agent.write(sources, targets, self.receiver)
        free = partial(self.agent.release, registered)
        self.flying.append(Flying(number, transfer, free, tensors))
        self.progress()

    def slot_of(self, credit: Notice) -> int:
        """The slot of a credit; meets the receiver's agent when a slot is new."""
        slot: int = SLOT.unpack_from(credit.payload)[0]
        if new := credit.payload[SLOT.size :]:
            self.slots[slot] = TARGET.unpack_from(new)
            self.receiver = self.agent.meet(new[TARGET.size :])
        return slot

    def pieces(self, tensors: Stream, slot: int) -> tuple[list[Piece], list[Piece]]:
        """The memory of some tensors, and where it goes."""
        address, device = self.slots[slot]
        sources, targets = [], []
        for tensor, offset in zip(tensors, self.layout.offsets, strict=True):
            if size := tensor.numel() * tensor.element_size():
                sources.append(self.agent.piece(tensor.data_ptr(), size))
                targets.append(Piece(address + offset, size, device))
        return sources, targets

    def progress(self) -> bool:
        """See `Sender.progress`: announce what is written."""
        while self.flying and self.agent.is_done(self.flying[0].transfer):
            flying = self.flying.popleft()
            flying.free()
            self.end.tell(flying.number)
        return bool(self.flying)

    def flush(self) -> None:
        """See `Sender.flush`."""
        while self.progress():
            self.agent.progress()  # The other rank may write at the same time.
            time.sleep(POLL_S)


class WrittenReceiver(Receiver):
    """Base of receivers whose slots the network writes."""

    agent: Agent
    registered: list[Any]
    num_expected = 0
    """Messages that were posted and not announced."""

    def announced(self, notice: Notice) -> None:
        """See `Receiver.announced`: the message is in its slot."""
        self.num_expected -= 1
        self.here.append(notice.number)

    def progress(self) -> bool:
        """See `Receiver.progress`."""
        self.agent.progress()
        return self.num_expected > 0

    def close(self) -> None:
        """See `Receiver.close`."""
        for registered in self.registered:
            self.agent.release(registered)
        self.registered.clear()
        super().close()


class NixlReceiver(WrittenReceiver, SharedReceiver):
    """Slots that the network writes."""

    def __init__(self, end: End, agent: Agent) -> None:
        self.agent, self.registered = agent, []
        self.fresh: dict[int, bytes] = {}
        """Slot that the sender does not know -> what it needs to know."""
        super().__init__(end)

    def grow(self) -> None:
        """Add a slot."""
        super().grow()
        mapping = self.slots[-1]
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        piece = self.agent.piece(address, len(mapping))
        self.registered.append(self.agent.register([piece]))
        described = self.agent.describe(self.registered[-1])
        self.fresh[len(self.slots) - 1] = TARGET.pack(piece.address, piece.device) + described

    def post(self, number: int) -> tuple[bytes, Sequence[int]]:
        """See `Receiver.post`."""
        credit, files = super().post(number)
        for file in files:
            os.close(file)  # It is for a sender of this host.
        self.num_expected += 1
        return credit + self.fresh.pop(self.posted[number], b""), ()
