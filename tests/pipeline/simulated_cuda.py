"""Two CUDA devices made of host memory, whose streams run only when a test says so."""

import ctypes
import itertools
import socket
from collections import deque

import numpy as np
import torch

from titan_dit.pipeline.schedules.schedule import Kind
from titan_dit.pipeline.transports.base import End, Lane, Transport
from titan_dit.pipeline.transports.cuda_driver import HANDLE_BYTES, DriverFailed
from titan_dit.pipeline.transports.meeting import Peer

F = Kind.FORWARD


class Event:
    """As torch.cuda.Event: done when the work before its last recording is."""

    def __init__(self, world):
        self.world, self.recorded, self.done = world, 0, 0

    def synchronize(self):
        self.world.run()
        assert self.done == self.recorded


class Stream:
    def __init__(self, world):
        self.work = deque()
        world.streams.append(self)

    def step(self):
        """Run until an event that is not done; True if something ran."""
        ran = False
        while self.work and self.work[0]() is not False:
            self.work.popleft()
            ran = True
        return ran


class World:
    """All streams, and what processes share by handles."""

    def __init__(self):
        self.streams, self.shared, self.numbers = [], {}, itertools.count(1)

    def run(self):
        """Have all devices do all of their work."""
        while any([stream.step() for stream in self.streams]):
            pass

    def handle(self, thing):
        handle = next(self.numbers).to_bytes(HANDLE_BYTES, "little")
        self.shared[handle] = thing
        return handle


class Bytes:
    def __init__(self, region):
        self.region = region  # It lives as long as the array.
        self.__array_interface__ = region.__cuda_array_interface__ | {"version": 3}


class Cuda:
    """See `cuda_driver.Cuda`."""

    def __init__(self, world, *, are_peers=True):
        self.world, self.are_peers = world, are_peers
        self.side, self.stream = Stream(world), Stream(world)
        self.memory, self.pinned = {}, set()

    def allocate(self, num_bytes):
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address):
        del self.memory[address]

    def share(self, address):
        return self.world.handle(address)

    def open(self, handle):
        if not self.are_peers:
            raise DriverFailed("no peers")
        return self.world.shared[handle]

    def close(self, address):
        pass

    def pin(self, address, num_bytes):
        self.pinned.add(address)

    def unpin(self, address):
        self.pinned.remove(address)

    def copy(self, target, source, num_bytes):
        self.side.work.append(lambda: ctypes.memmove(target, source, num_bytes))

    def tensor(self, region):
        return torch.from_numpy(np.asarray(Bytes(region)))

    def event(self):
        return Event(self.world)

    shared_event = event

    def open_event(self, handle):
        return self.world.shared[handle]

    def handle(self, event):
        return self.world.handle(event)

    def computing(self):
        return self.stream

    def record(self, event, stream):
        event.recorded += 1

        def reach(number=event.recorded):
            event.done = number

        stream.work.append(reach)
        return event

    def wait(self, event, stream):
        stream.work.append(lambda number=event.recorded: event.done >= number)

    def is_done(self, event):
        return event.done == event.recorded


def two_ends(sender, receiver, tensors):
    """The transports of both ends of lane 0F, in one process."""
    ends = [
        End(Lane(F, 0, 0, 1), 0, Peer(1 - rank, connection), None, tensors, torch.device("cpu"))
        for rank, connection in enumerate(socket.socketpair())
    ]
    source = Transport({1: ends[0].peer}, {0: sender(ends[0])}, {})
    target = Transport({0: ends[1].peer}, {}, {0: receiver(ends[1])})
    return source, target
