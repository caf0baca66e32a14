"""Streams through memory that two ranks of one host share: one copy, read in place.

The receiver owns the memory of a lane, in slots of one message each. A credit names the slot that
its message fills; it passes the slot's file when it is used first. So a lane has as many slots as
messages were posted or in use at once: what the receiver may hold, and no more.

A slot is a file without a name (memfd): its memory ends with the processes that map it, however
they end, and nothing is in /dev/shm.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from titan_dit.config.section import UserError
from titan_dit.models.base import Stream
from titan_dit.pipeline.transports.base import End, Receiver, Sender
from titan_dit.pipeline.transports.meeting import Notice

SLOT = struct.Struct("<I")
"""Payload of a credit: the slot."""
ALIGNMENT = 512
"""Bytes; of every tensor in a slot, as torch's CUDA allocator has it (on a CPU 64). Another
alignment could choose other kernels, with other bits."""
MADV_POPULATE_WRITE = 23
"""Linux 5.14: map all pages now; an error if there is no memory, not a signal later."""
NO_MEMORY = (errno.ENOMEM, errno.ENOSPC, errno.EFAULT, errno.EFBIG)


class Layout:
    """Offsets of a message's tensors in a slot."""

    def __init__(self, tensors: Stream, least: int = ALIGNMENT) -> None:
        """`least`: bytes of a slot, at least."""
        self.tensors, self.offsets, end = tensors, list[int](), 0
        for tensor in tensors:
            self.offsets.append(end)
            end += math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT) * ALIGNMENT
        self.num_bytes = max(end, least)

    def reshaped(self, tensors: Stream) -> Layout:
        """The layout of other tensors in the same slots."""
        found = Layout(tensors, self.num_bytes)
        assert found.num_bytes == self.num_bytes, "the first messages must be the largest"
        return found

    def views(self, memory: object) -> Stream:
        """The tensors in a slot's memory; each keeps `memory` alive as long as its storage."""
        pairs = zip(self.tensors, self.offsets, strict=True)
        return tuple(
            torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset).view(
                like.shape
            )
            if like.numel()  # frombuffer takes no empty tensor.
            else torch.empty(like.shape, dtype=like.dtype)
            for like, offset in pairs
        )


def mapped(file: int, num_bytes: int) -> mmap.mmap:
    """Map a slot's file, with all its pages."""
    mapping = mmap.mmap(file, num_bytes)
    with suppress(OSError):  # A kernel without huge pages.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno in NO_MEMORY:
            raise
        os.posix_fallocate(file, 0, num_bytes)
    return mapping


def new_slot(num_bytes: int, what: str) -> tuple[int, mmap.mmap]:
    """File and mapping of a new slot.

    Raises:
        UserError: there is no memory for it.
    """
    file = os.memfd_create("titan_dit-slot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
        return file, mapped(file, num_bytes)
    except OSError as error:
        os.close(file)
        if error.errno not in NO_MEMORY:
            raise
        raise UserError(
            f'[pipeline] transport="shared_memory": no memory for {num_bytes:,} bytes of {what} '
            f"({os.strerror(error.errno or 0)}). Give the host or its container more memory, "
            'reduce [pipeline] memory or microbatch_size, or set transport = "process_group".'
        ) from None


class SharedSender(Sender):
    """Copies messages into the receiver's slots."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.layout = Layout(end.tensors)
        self.slots: dict[int, mmap.mmap] = {}

    def reshape(self) -> None:
        """See `Sender.reshape`."""
        self.layout = self.layout.reshaped(self.end.tensors)

    def send(self, number: int, tensors: Stream, credit: Notice) -> None:
        """See `Sender.send`."""
        (slot,) = SLOT.unpack(credit.payload)
        for file in credit.files:
            self.slots[slot] = mapped(file, self.layout.num_bytes)
            os.close(file)
        for room, tensor in zip(self.layout.views(self.slots[slot]), tensors, strict=True):
            room.copy_(tensor)
        self.end.tell(number)

    def close(self) -> None:
        """See `Sender.close`."""
        self.slots.clear()


class SharedReceiver(Receiver):
    """Reads messages where the sender has put them."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.layout = Layout(end.tensors)
        self.slots: list[mmap.mmap] = []
        self.free: list[int] = []
        """Slots that no message and no view of one uses; the last one used is the warmest."""
        self.files: dict[int, int] = {}
        """Files of slots that the sender does not know yet."""
        self.posted: dict[int, int] = {}
        """Message -> its slot, until it is taken."""
        self.bytes_of_slot = ctypes.c_char * self.layout.num_bytes
        self.grow()  # At the start of a run: an error of a step would come late.

    def reshape(self) -> None:
        """See `Sender.reshape`."""
        self.layout = self.layout.reshaped(self.end.tensors)

    def grow(self) -> None:
        """Add a slot."""
        slot, lane = len(self.slots), self.end.lane
        what = f"messages {lane} to pipeline rank {lane.target}"
        file, mapping = new_slot(self.layout.num_bytes, what)
        self.slots.append(mapping)
        self.files[slot] = file
        self.free.append(slot)

    def post(self, number: int) -> tuple[bytes, Sequence[int]]:
        """See `Receiver.post`."""
        if not self.free:
            self.grow()
        slot = self.posted[number] = self.free.pop()
        files = (self.files.pop(slot),) if slot in self.files else ()
        return SLOT.pack(slot), files

    def take(self, number: int) -> Stream:
        """See `Receiver.take`: views of the slot, which is free when the last storage dies."""
        slot = self.posted.pop(number)
        loan = self.bytes_of_slot.from_buffer(self.slots[slot])
        weakref.finalize(loan, self.free.append, slot).atexit = False
        return self.layout.views(loan)

    def close(self) -> None:
        """See `Receiver.close`: a mapping ends with the last view of it."""
        for file in self.files.values():
            os.close(file)
        self.files.clear()
        self.slots.clear()
