"""[offload] activations: what blocks save for backward waits in host memory.

The hooks of autograd's saved tensors see what a block saves: with recomputation its input alone.
A copy to the host starts as soon as a tensor is saved; the device's memory is free `ahead` blocks
later. In backward the first use of a block's tensors starts the copies of the blocks before it.
Copies have a stream of their own, and host buffers are pinned and used again.

Tensors that are not a block's own stay where they are: parameters, side inputs, and small ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from titan_dit.config.layout import OffloadConfig
from titan_dit.models.base import Model

LEAST_BYTES = 2**18
"""Smaller tensors stay on the device: a copy costs two launches."""


def apply(model: Model, config: OffloadConfig) -> None:
    """Set up the offload of a stage's activations; after blocks are compiled."""
    if not config.activations:
        return
    state: Any = Offload(config.ahead)
    holder: Any = model
    holder.offload = state
    for number, block in enumerate(model.blocks.values()):
        # Around the compiled block and FSDP's hooks: a graph cannot contain ours.
        inner = block._compiled_call_impl or block._call_impl
        block._compiled_call_impl = around(state, block, inner, is_first=number == 0)


def buffers_of(model: Model) -> list[Tensor]:
    """The host buffers of a stage's activations, uint8 [bytes]."""
    state: Offload | None = getattr(model, "offload", None)
    every = state.buffers.every if state else ()
    return [found for buffer in every if (found := buffer()) is not None]


def around(
    state: Offload, block: nn.Module, inner: Callable[..., Any], *, is_first: bool
) -> Callable[..., Any]:
    """A block's call that hands its saved tensors to `state`."""

    def call(stream: Any, side: Mapping[str, Tensor]) -> Any:
        if not torch.is_grad_enabled():
            return inner(stream, side)
        with state.forward(block, side, is_first=is_first):
            result = inner(stream, side)
        state.end_forward()
        return result

    return call


class Link:
    """Copies between a device and the host, one after another; on a CPU they are plain copies."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    def copy(self, target: Tensor, source: Tensor, device: torch.device) -> torch.cuda.Event | None:
        """Start a copy to a tensor of the same shape, after the current stream's work.

        The caller keeps both tensors until its own stream has waited for the event, which is None
        on a CPU.
        """
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self.stream.record_event()
        return event


def wait(event: torch.cuda.Event | None) -> None:
    """Let the current stream wait for a copy, without blocking the host."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class HostBuffers:
    """Host memory in powers of two, which are used again: up to half of it may be unused.

    torch rounds every pinned allocation up to one. Without pinning it is the same, so that the dry
    run counts what a GPU's run takes.
    """

    def __init__(self) -> None:
        self.free: dict[int, list[Tensor]] = {}
        self.every: list[weakref.ref[Tensor]] = []
        """All buffers, for the dry run's count."""

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """A free or new buffer of at least `num_bytes` bytes, uint8 [size]."""
        size = 1 << (num_bytes - 1).bit_length()
        if found := self.free.get(size):
            return found.pop()
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.every.append(weakref.ref(buffer))
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer, uint8 [size], for reuse.

        No wait: copies in and out run on one stream, in order.
        """
        self.free.setdefault(buffer.numel(), []).append(buffer)


class Storage:
    """A storage that a block saves: on the device, on the host, or both."""

    def __init__(self, state: Offload, tensor: Tensor) -> None:
        self.state, self.device = state, tensor.device
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.here: Tensor | None = tensor.as_strided((count,), (1,), 0).view(torch.uint8)
        """Its bytes on the device; None while they are on the host alone."""
        self.num_bytes = self.here.numel()
        self.host = state.buffers.take(self.num_bytes, pinned=self.device.type == "cuda")
        self.event = self.copy(self.host[: self.num_bytes], self.here)
        state.bytes_out += self.num_bytes

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Start a copy of bytes, uint8 [num_bytes], to or from the host."""
        return self.state.link.copy(target, source, self.device)

    def fetch(self) -> None:
        """Start the copy back to the device."""
        if self.here is None:
            # On the current stream, which is the one that frees it.
            self.here = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            self.event = self.copy(self.here, self.host[: self.num_bytes])
            self.state.bytes_back += self.num_bytes

    def read(self) -> Tensor:
        """The bytes on the device, uint8 [num_bytes], for work on the current stream."""
        self.fetch()
        wait(self.event)
        assert self.here is not None
        return self.here

    def leave(self) -> None:
        """Free the device's memory, behind the last copy."""
        if self.here is not None:
            wait(self.event)
            self.here = None

    def __del__(self) -> None:
        """Return the host buffer; on the device, memory is freed behind the last copy."""
        self.leave()
        self.state.buffers.give(self.host)


class Saved:
    """The tensors that one call of a block saves. Autograd's handles keep it alive."""

    def __init__(self, state: Offload, before: Saved | None, stays: set[int]) -> None:
        """`before`: saved tensors of the block before it.

        `stays`: storages to leave alone, by address.
        """
        self.state, self.stays = state, stays
        self.before = None if before is None else weakref.ref(before)
        # Weak: a handle's end frees its storage, while the block's backward goes on.
        self.storages = weakref.WeakValueDictionary[int, Storage]()

    def pack(self, tensor: Tensor) -> Any:
        """Hand over a tensor of any shape, or a wrapper of several; return `unpack`'s argument."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(tensor, name) for name in names}
            packed = {n: self.pack(p) if isinstance(p, Tensor) else p for n, p in parts.items()}
            return type(tensor), packed, context, tensor.shape, tensor.stride()
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or storage._cdata in self.stays:
            return tensor
        held = self.storages.get(storage._cdata)
        if held is None:
            with torch.no_grad():
                held = self.storages[storage._cdata] = Storage(self.state, tensor.detach())
        return self, held, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def leave(self) -> None:
        """Free the device's memory."""
        for storage in self.storages.values():
            storage.leave()


def unpack(packed: Any) -> Tensor:
    """The tensor, in its shape, from the result of `Saved.pack`."""
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed[0], Saved):
        saved, storage, (dtype, shape, stride, offset) = packed
        saved.state.use(saved)
        found: Tensor = storage.read().view(dtype).as_strided(shape, stride, offset)
        return found
    kind, parts, context, shape, stride = packed
    inner = {
        name: unpack(part) if isinstance(part, Tensor | tuple) else part
        for name, part in parts.items()
    }
    whole: Tensor = kind.__tensor_unflatten__(inner, context, shape, stride)
    return whole


class Offload:
    """The activations of a stage's blocks."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.link, self.buffers = Link(), HostBuffers()
        self.running: Saved | None = None
        """Saved tensors of the block whose forward runs."""
        self.last: weakref.ref[Saved] | None = None
        """Saved tensors of the last block that began its forward."""
        self.leaving: list[weakref.ref[Saved]] = []
        """Blocks whose copies to the host may be under way."""
        self.arriving: list[weakref.ref[Saved]] = []
        """Blocks of a backward whose tensors are on the device, or on their way to it."""
        self.bytes_out = self.bytes_back = 0
        """Bytes copied to the host and back."""

    def forward(
        self, block: nn.Module, side: Mapping[str, Tensor], *, is_first: bool
    ) -> AbstractContextManager[Any]:
        """A context in which a block saves."""
        before = None if is_first or self.last is None else self.last()
        saved = self.running = Saved(self, before, set())
        self.last = weakref.ref(saved)
        # Read when the block first saves: FSDP gathers its parameters just before.
        is_known = False

        def pack(tensor: Tensor) -> Any:
            nonlocal is_known
            if not is_known:
                saved.stays.update(addresses([*block.parameters(), *block.buffers()]))
                saved.stays.update(addresses(side.values()))
                is_known = True
            return saved.pack(tensor)

        return saved_tensors_hooks(pack, unpack)

    def end_forward(self) -> None:
        """End the running block; free the saved tensors of the blocks `ahead` or more before it."""
        saved, self.running = self.running, None
        assert saved is not None
        if saved.storages:
            self.leaving.append(weakref.ref(saved))
        gone, self.leaving = self.leaving[: -self.ahead], self.leaving[-self.ahead :]
        for one in alive(gone):
            one.leave()

    def use(self, saved: Saved) -> None:
        """Fetch a block's tensors and those of the `ahead` blocks before it.

        Called in its backward.
        """
        if self.arriving and self.arriving[0]() is saved:
            return
        wanted = [saved]
        while len(wanted) <= self.ahead:
            before = wanted[-1].before and wanted[-1].before()
            if not before:
                break
            wanted.append(before)
        for done in alive(self.arriving):
            if done not in wanted:
                done.leave()
        self.arriving = [weakref.ref(one) for one in wanted]
        # Some may not have left yet.
        self.leaving = [weakref.ref(one) for one in alive(self.leaving) if one not in wanted]
        for one in wanted:
            for storage in one.storages.values():
                storage.fetch()


def alive(references: Iterable[weakref.ref[Saved]]) -> list[Saved]:
    """The referenced objects that still exist."""
    return [found for reference in references if (found := reference()) is not None]


def addresses(tensors: Any) -> Iterator[int]:
    """The storages of tensors, and of those that wrappers hold."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            yield from addresses(getattr(tensor, name) for name in names)
        else:
            yield tensor.untyped_storage()._cdata
