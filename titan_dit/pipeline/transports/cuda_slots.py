"""Streams of CUDA tensors within a host: slots in the receiver's device memory, read in place.

As in shared_memory.py the receiver owns the slots, and a credit names the one that its message
fills. If the sender's device can reach the slot (the same device, or a peer), it copies into it:
CUDA IPC. Otherwise it copies into pinned host memory that both ranks map, and the receiver from
there into the slot. The sender finds out as it opens the first slot.

No host waits for a device. A slot has two events that both processes know:

- `read`, by the receiver: after the last use of the last message on its device. A slot is given
  back when no tensor of it is left on the host; the sender's copy waits for the event.
- `written`, by the sender: after its copy. The announcement leaves when it is recorded; the
  message has arrived when the receiver's query says so.

A copy into host memory is announced when it is done: its event is the sender's own.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_dit.models.base import Stream
from titan_dit.pipeline.transports.base import End, Receiver, Sender
from titan_dit.pipeline.transports.cuda_driver import HANDLE_BYTES, Cuda, Region
from titan_dit.pipeline.transports.meeting import Notice
from titan_dit.pipeline.transports.shared_memory import Layout, mapped, new_slot

CREDIT = struct.Struct("<II")
"""Payload of a credit: the slot, and how many messages were copied from host memory so far. For a
new slot the handles of its memory and of `read` follow."""
HOST = struct.Struct("<I")
"""Payload of a message in host memory: the index of its host buffer. A message in its slot has an
empty payload, or the handle of `written` when the slot is used first."""


@dataclass
class Slot:
    """Device memory for one message, as either end knows it."""

    address: int
    read: torch.cuda.Event
    written: torch.cuda.Event | None = None


class Loan:
    """A reference that all tensors of a taken message hold: its slot is free once they are."""


class Pinned(NamedTuple):
    """Host memory that both ranks map, pinned."""

    mapping: mmap.mmap
    address: int

    @classmethod
    def of(cls, cuda: Cuda, mapping: mmap.mmap) -> Pinned:
        """Pin a mapping."""
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        cuda.pin(address, len(mapping))
        return cls(mapping, address)


class Copying(NamedTuple):
    """A copy on the way; the tensors live until it is done."""

    number: int
    done: torch.cuda.Event
    tensors: Stream = ()
    host: int = -1
    """The host memory that it fills, or reads."""


def gather(
    cuda: Cuda,
    layout: Layout,
    tensors: Stream,
    computed: torch.cuda.Event,
    address: int,
    done: torch.cuda.Event,
) -> None:
    """Enqueue the copy of tensors that are being computed to where a message lies."""
    cuda.wait(computed, cuda.side)
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        if size := tensor.numel() * tensor.element_size():
            cuda.copy(address + offset, tensor.data_ptr(), size)
    cuda.record(done, cuda.side)


class CudaSender(Sender):
    """Copies messages into the receiver's slots, or into pinned host memory."""

    def __init__(self, end: End, cuda: Cuda | None = None, *, may_reach: bool = True) -> None:
        """`may_reach` False: through host memory also where the devices are peers."""
        super().__init__(end)
        self.cuda = cuda or Cuda(end.device)
        self.layout = Layout(end.tensors)
        self.may_reach = may_reach
        self.slots: dict[int, Slot] = {}
        self.computed: dict[int, torch.cuda.Event] = {}
        """Messages that wait for their credits, and when they are computed."""
        self.flying: deque[Copying] = deque()
        """Copies into slots."""
        self.leaving: deque[Copying] = deque()
        """Copies into host memory; announced when they are done."""
        self.pinned: list[Pinned] = []
        self.files: dict[int, int] = {}
        """Files of host memory that the receiver does not know yet."""
        self.idle: deque[int] = deque()
        self.unread: deque[int] = deque()
        """The host memory of each message that the receiver has not copied, in sequence."""
        self.num_copied = 0

    def reshape(self) -> None:
        """See `Sender.reshape`."""
        self.layout = self.layout.reshaped(self.end.tensors)

    def made(self, number: int) -> None:
        """See `Sender.made`."""
        self.computed[number] = self.cuda.record(self.cuda.event(), self.cuda.computing())

    def send(self, number: int, tensors: Stream, credit: Notice) -> None:
        """See `Sender.send`."""
        self.progress()
        slot, num_copied = CREDIT.unpack_from(credit.payload)
        for _ in range((num_copied - self.num_copied) % (1 << 32)):
            self.idle.append(self.unread.popleft())
        self.num_copied = num_copied
        if handles := credit.payload[CREDIT.size :]:
            self.open(slot, handles[:HANDLE_BYTES], handles[HANDLE_BYTES:])
        if slot in self.slots:
            self.write(number, tensors, self.slots[slot])
        else:
            self.write_to_host(number, tensors)

    def open(self, slot: int, memory: bytes, read: bytes) -> None:
        """Map a slot of the receiver, if this device can reach it."""
        if not self.may_reach:
            return
        try:
            event = self.cuda.open_event(read)
            self.slots[slot] = Slot(self.cuda.open(memory), event)
        except RuntimeError:  # DriverFailed, or torch's own error.
            self.may_reach = False

    def write(self, number: int, tensors: Stream, slot: Slot) -> None:
        """Enqueue the copy into a slot, and announce it at once."""
        handle = b""
        if slot.written is None:
            slot.written = self.cuda.shared_event()
            handle = self.cuda.handle(slot.written)
        self.cuda.wait(slot.read, self.cuda.side)
        computed = self.computed.pop(number)
        gather(self.cuda, self.layout, tensors, computed, slot.address, slot.written)
        self.flying.append(Copying(number, slot.written, tensors))
        self.end.tell(number, handle)

    def write_to_host(self, number: int, tensors: Stream) -> None:
        """Enqueue the copy into host memory that the receiver has read."""
        if not self.idle:
            what = f"stream {self.end.lane} of pipeline rank {self.end.lane.source}"
            file, mapping = new_slot(self.layout.num_bytes, what)
            self.files[len(self.pinned)] = file
            self.idle.append(len(self.pinned))
            self.pinned.append(Pinned.of(self.cuda, mapping))
        host = self.idle.popleft()
        self.unread.append(host)
        done = self.cuda.event()
        computed = self.computed.pop(number)
        gather(self.cuda, self.layout, tensors, computed, self.pinned[host].address, done)
        self.leaving.append(Copying(number, done, tensors, host))

    def progress(self) -> bool:
        """See `Sender.progress`: free what was copied, announce what is in host memory."""
        while self.flying and self.cuda.is_done(self.flying[0].done):
            self.flying.popleft()
        while self.leaving and self.cuda.is_done(self.leaving[0].done):
            number, _, _, host = self.leaving.popleft()
            files = (self.files.pop(host),) if host in self.files else ()
            self.end.tell(number, HOST.pack(host), files)
        return bool(self.leaving)

    def flush(self) -> None:
        """See `Sender.flush`: copies into slots are announced and need nothing of this host."""
        if self.leaving:
            self.leaving[-1].done.synchronize()
            self.progress()

    def close(self) -> None:
        """See `Sender.close`."""
        for slot in self.slots.values():
            self.cuda.close(slot.address)
        for pinned in self.pinned:
            self.cuda.unpin(pinned.address)
        for file in self.files.values():
            os.close(file)
        for left in (self.slots, self.pinned, self.files, self.flying):
            left.clear()


class CudaReceiver(Receiver):
    """Reads messages in its slots.

    The slots are freed as the process ends: the sender may have them mapped until then.
    """

    def __init__(self, end: End, cuda: Cuda | None = None) -> None:
        super().__init__(end)
        self.cuda = cuda or Cuda(end.device)
        self.layout = Layout(end.tensors)
        self.slots: list[Slot] = []
        self.fresh: set[int] = set()
        """Slots that the sender does not know yet."""
        self.free: deque[int] = deque()
        """Slots that no tensor of this host uses; its device may still, until `read`."""
        self.posted: dict[int, int] = {}
        """Message -> its slot, until it is taken."""
        self.coming: deque[Copying] = deque()
        self.pinned: dict[int, Pinned] = {}
        self.num_copied = 0
        self.grow()  # At the start of a run: an error of a step would come late.

    def reshape(self) -> None:
        """See `Sender.reshape`."""
        self.layout = self.layout.reshaped(self.end.tensors)

    def grow(self) -> None:
        """Add a slot."""
        slot = Slot(self.cuda.allocate(self.layout.num_bytes), self.cuda.shared_event())
        self.fresh.add(len(self.slots))
        self.free.append(len(self.slots))
        self.slots.append(slot)

    def post(self, number: int) -> tuple[bytes, Sequence[int]]:
        """See `Receiver.post`."""
        self.progress()
        if not self.free:
            self.grow()
        # The one that was given back first: its `read` is the likeliest to be done.
        index = self.posted[number] = self.free.popleft()
        credit = CREDIT.pack(index, self.num_copied % (1 << 32))
        if index in self.fresh:
            self.fresh.remove(index)
            credit += self.handles_of(self.slots[index])
        return credit, ()

    def handles_of(self, slot: Slot) -> bytes:
        """Handles by which the sender opens a slot; empty where CUDA has no IPC, as on WSL2."""
        try:
            return self.cuda.share(slot.address) + self.cuda.handle(slot.read)
        except RuntimeError:  # DriverFailed, or torch's own error: it takes host memory.
            return b""

    def announced(self, notice: Notice) -> None:
        """See `Receiver.announced`."""
        slot = self.slots[self.posted[notice.number]]
        if len(notice.payload) == HOST.size:
            self.fetch(notice, slot)
            return
        if notice.payload:
            slot.written = self.cuda.open_event(notice.payload)
        assert slot.written is not None
        self.coming.append(Copying(notice.number, slot.written))

    def fetch(self, notice: Notice, slot: Slot) -> None:
        """Enqueue the copy of a message from host memory into its slot."""
        (host,) = HOST.unpack(notice.payload)
        for file in notice.files:
            self.pinned[host] = Pinned.of(self.cuda, mapped(file, self.layout.num_bytes))
            os.close(file)
        done = self.cuda.event()
        self.cuda.wait(slot.read, self.cuda.side)
        self.cuda.copy(slot.address, self.pinned[host].address, self.layout.num_bytes)
        self.cuda.record(done, self.cuda.side)
        self.coming.append(Copying(notice.number, done, host=host))

    def progress(self) -> bool:
        """See `Receiver.progress`: see what the devices have copied."""
        while self.coming and self.cuda.is_done(self.coming[0].done):
            coming = self.coming.popleft()
            self.here.append(coming.number)
            self.num_copied += coming.host >= 0
        return bool(self.coming or self.here)

    def take(self, number: int) -> Stream:
        """See `Receiver.take`: views of the slot, which is given back when their storage dies."""
        index = self.posted.pop(number)
        loan = Loan()
        finalizer = weakref.finalize(loan, self.give_back, index, self.cuda.computing())
        finalizer.atexit = False
        address = self.slots[index].address
        pairs = zip(self.layout.tensors, self.layout.offsets, strict=True)
        return tuple(self.view(address + offset, like, loan) for like, offset in pairs)

    def view(self, address: int, like: Tensor, loan: Loan) -> Tensor:
        """The tensor at an address, with a storage of its own, which keeps the loan alive."""
        size = like.numel() * like.element_size()
        if not size:
            return torch.empty_like(like, device=self.end.device, requires_grad=False)
        memory = self.cuda.tensor(Region(address, size, loan))
        return memory.view(like.dtype).view(like.shape)

    def give_back(self, index: int, stream: torch.cuda.Stream) -> None:
        """Let the next message have a slot, after the work so far of the stream that used it."""
        self.cuda.record(self.slots[index].read, stream)
        self.free.append(index)

    def close(self) -> None:
        """See `Receiver.close`."""
        for pinned in self.pinned.values():
            self.cuda.unpin(pinned.address)
        self.pinned.clear()
