"""Streams of CUDA tensors by nixl: from device memory to device memory (GPUDirect RDMA).

Registering device memory takes milliseconds. So a sender copies a message into memory of its own
that stays registered, and the NIC writes from there into the receiver's slot. No host waits for a
device: a write starts when the query of its copy's event says so, and a slot gets a credit when
its last use on the receiver's device is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from titan_dit.models.base import Stream
from titan_dit.pipeline.transports.base import End
from titan_dit.pipeline.transports.cuda_driver import Cuda
from titan_dit.pipeline.transports.cuda_slots import CudaReceiver, gather
from titan_dit.pipeline.transports.meeting import Notice
from titan_dit.pipeline.transports.nixl import TARGET, Flying, NixlSender, WrittenReceiver
from titan_dit.pipeline.transports.nixl_agent import Agent, Piece
from titan_dit.pipeline.transports.shared_memory import SLOT


class Staged(NamedTuple):
    """A message on its way into registered memory; its tensors live until it is there."""

    number: int
    slot: int
    source: Piece
    done: torch.cuda.Event
    tensors: Stream


class DeviceNixlSender(NixlSender):
    """Copies messages into registered memory, and writes them into the receiver's slots."""

    def __init__(self, end: End, agent: Agent, cuda: Cuda | None = None) -> None:
        super().__init__(end, agent)
        self.cuda = cuda or Cuda(end.device)
        self.computed: dict[int, torch.cuda.Event] = {}
        self.staged: deque[Staged] = deque()
        self.idle: list[Piece] = []
        """Registered memory that no message uses."""
        self.registered: list[Any] = []

    def made(self, number: int) -> None:
        """See `Sender.made`."""
        self.computed[number] = self.cuda.record(self.cuda.event(), self.cuda.computing())

    def send(self, number: int, tensors: Stream, credit: Notice) -> None:
        """See `Sender.send`."""
        slot = self.slot_of(credit)
        source = self.idle.pop() if self.idle else self.new_source()
        done = self.cuda.event()
        computed = self.computed.pop(number)
        gather(self.cuda, self.layout, tensors, computed, source.address, done)
        self.staged.append(Staged(number, slot, source, done, tensors))
        self.progress()

    def new_source(self) -> Piece:
        """Register memory for one message."""
        size = self.layout.num_bytes
        source = self.agent.piece(self.cuda.allocate(size), size)
        self.registered.append(self.agent.register([source]))
        return source

    def progress(self) -> bool:
        """See `Sender.progress`: write what is copied, announce what is written."""
        while self.staged and self.cuda.is_done(self.staged[0].done):
            number, slot, source, *_ = self.staged.popleft()
            address, device = self.slots[slot]
            target = Piece(address, source.num_bytes, device)
            transfer = self.agent.write([source], [target], self.receiver)

            def free(source: Piece = source) -> None:
                self.idle.append(source)

            self.flying.append(Flying(number, transfer, free))
        return super().progress() or bool(self.staged)

    def close(self) -> None:
        """See `Sender.close`."""
        for registered in self.registered:
            self.agent.release(registered)
        for source in self.idle:
            self.cuda.free(source.address)
        self.registered.clear()
        self.idle.clear()


class DeviceNixlReceiver(WrittenReceiver, CudaReceiver):
    """Slots in device memory that the network writes."""

    def __init__(self, end: End, agent: Agent, cuda: Cuda | None = None) -> None:
        self.agent, self.registered = agent, []
        super().__init__(end, cuda)

    def grow(self) -> None:
        """Add a slot."""
        super().grow()
        piece = self.agent.piece(self.slots[-1].address, self.layout.num_bytes)
        self.registered.append(self.agent.register([piece]))

    def post(self, number: int) -> tuple[bytes, Sequence[int]]:
        """See `Receiver.post`: the sender cannot wait for this device, so a slot must be read."""
        read = (i for i in tuple(self.free) if self.cuda.is_done(self.slots[i].read))
        if (index := next(read, None)) is None:
            index = len(self.slots)
            self.grow()
        self.free.remove(index)
        self.posted[number] = index
        self.num_expected += 1
        credit = SLOT.pack(index)
        if index in self.fresh:
            self.fresh.remove(index)
            credit += TARGET.pack(self.slots[index].address, self.agent.index)
            credit += self.agent.describe(self.registered[index])
        return credit, ()
