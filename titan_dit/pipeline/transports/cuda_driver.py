"""CUDA for slots in device memory: shared memory, plain copies, events of two processes.

Events and streams are torch's. The driver is called for what torch has no public name for: memory
that another process opens. Torch's own sharing would pass on the whole segment around a tensor,
keep counters in /dev/shm and, with expandable segments, need another kind of handle. Sources: CUDA
Driver API 13, "Memory Management" and "Unified Addressing".
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE, of memory and of events."""
LAZY_PEER_ACCESS = ctypes.c_uint(1)
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
BLOCK_BYTES = 1 << 21
"""The driver may cut smaller allocations from one block, which it would then share as a whole."""
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of this process."""


class DriverFailed(RuntimeError):
    """The driver refused a call; the message has its name and the driver's reason."""


class Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Region:
    """A piece of device memory; a tensor over it keeps this object and `loan` alive."""

    def __init__(self, address: int, num_bytes: int, loan: object) -> None:
        self.address, self.num_bytes, self.loan = address, num_bytes, loan
        # Version 2: without a stream that torch would have to wait for.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class Cuda:
    """One device, seen from one end of a lane, with a stream of its own for copies.

    Used by the thread that made it, but for `record`. No call waits for the device, but for
    `allocate`, `free`, `open`, `close`, `pin` and `unpin`, which a slot needs once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.library = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(device):
            # The driver acts on the current context of the thread: make it torch's.
            torch.cuda.current_stream().synchronize()
            self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; DriverFailed unless it succeeds."""
        with torch.cuda.device(self.device):
            code = getattr(self.library, name)(*arguments)
        if code:
            reason = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(reason))
            words = (reason.value or b"unknown error").decode()
            raise DriverFailed(f"{name} on {self.device}: {words} (error {code})")

    def allocate(self, num_bytes: int) -> int:
        """The address of a new allocation of its own, as another process can open it."""
        address = ctypes.c_uint64()
        whole = math.ceil(num_bytes / BLOCK_BYTES) * BLOCK_BYTES
        arguments = ctypes.byref(address), ctypes.c_size_t(whole)
        try:
            self.call("cuMemAlloc_v2", *arguments)
        except DriverFailed:
            torch.cuda.empty_cache()  # Torch may keep what is free.
            self.call("cuMemAlloc_v2", *arguments)
        return address.value

    def free(self, address: int) -> None:
        """Free an allocation that no process has mapped; waits for the device."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def share(self, address: int) -> bytes:
        """The handle by which another process of this host opens an allocation."""
        handle = Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation, on this device or a peer of it.

        Raises:
            DriverFailed: the devices are no peers, or the processes share no driver.
        """
        address = ctypes.c_uint64()
        taken = Handle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), taken, LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Unmap what `open` returned; waits for the copies into it."""
        self.side.synchronize()
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin mapped host memory, so that copies to and from it need not wait.

        Raises DriverFailed.
        """
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, num_bytes, PORTABLE))
        if code:
            raise DriverFailed(f"cudaHostRegister of {num_bytes:,} bytes: error {code}")

    def unpin(self, address: int) -> None:
        """Undo `pin`; waits for the copies."""
        self.side.synchronize()
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy on the side stream, between addresses of devices or of pinned host memory."""
        self.call(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(self.side.cuda_stream),
        )

    def tensor(self, region: Region) -> Tensor:
        """The bytes of a region, without a copy."""
        return torch.as_tensor(region, device=self.device)

    def event(self) -> torch.cuda.Event:
        """A new event of this process."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def shared_event(self) -> torch.cuda.Event:
        """A new event that another process can open."""
        return torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]

    def open_event(self, handle: bytes) -> torch.cuda.Event:
        """The event of another process; this one can wait for it, not record it."""
        from_handle = torch.cuda.Event.from_ipc_handle
        event: torch.cuda.Event = from_handle(self.device, handle)  # type: ignore[no-untyped-call]
        return event

    def handle(self, event: torch.cuda.Event) -> bytes:
        """The handle by which another process opens a shared event."""
        with torch.cuda.device(self.device):
            handle: bytes = event.ipc_handle()  # type: ignore[no-untyped-call]
        return handle

    def computing(self) -> torch.cuda.Stream:
        """The stream on which this thread computes."""
        return torch.cuda.current_stream(self.device)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event after the work that a stream has been given so far; any thread."""
        event.record(stream)
        return event

    def wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for an event as it was recorded last, without blocking the host."""
        stream.wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        """True if the device has done all work before an event, which may be another process's."""
        done: bool = event.query()  # type: ignore[no-untyped-call]
        return done
