"""Copies of a run's tensors in host memory, for asynchronous checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit.ranks.shards import as_shard, local

TensorTree: TypeAlias = Mapping[str, Any]
"""Nested dicts of tensors; a DTensor is saved and loaded by its local shards."""

ALIGNMENT = 512
"""The copies start at multiples of this many bytes, itself a multiple of every dtype's size."""
LARGEST_GAP = 1 / 64
"""Share of a chunk that may stay empty; in the last chunk, the same share of all shards' bytes."""


@dataclass(frozen=True)
class Chunk:
    """One allocation for several shards."""

    num_bytes: int
    """A power of two, or 0."""
    offsets: Mapping[int, int]
    """Number of a shard -> its first byte."""
    num_used: int
    """Bytes that the shards take."""


class Staging:
    """Host buffers, allocated by the first copy and reused by later ones."""

    def __init__(self) -> None:
        self.layout: list[tuple[torch.Size, torch.dtype]] = []
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def copy(self, tensors: TensorTree) -> TensorTree:
        """Copy this rank's shards synchronously; the result is valid until the next call."""
        originals = list(leaves(tensors))
        shards = [local(original) for original in originals]
        on_device = any(shard.is_cuda for shard in shards)
        layout = [(shard.shape, shard.dtype) for shard in shards]
        if layout != self.layout:
            # Pinned: device-to-host copies are asynchronous and run at full bus bandwidth.
            self.buffers = buffers_for(shards, pinned=on_device)
            self.layout = layout  # Last: after an out-of-memory error it is still the old one.
        torch._foreach_copy_(self.buffers, shards, non_blocking=True)
        if on_device:
            torch.cuda.current_stream().synchronize()
        return rebuilt(tensors, map(as_shard, self.buffers, originals))


def buffers_for(shards: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """A contiguous tensor like each shard, in a few large allocations."""
    buffers: dict[int, Tensor] = {}
    for chunk in packed([shard.nbytes for shard in shards]):
        memory = allocate(chunk.num_bytes, pinned=pinned).untyped_storage()
        for number, offset in chunk.offsets.items():
            buffers[number] = placed(memory, offset, shards[number])
    return [buffers[number] for number in range(len(shards))]


def placed(memory: torch.UntypedStorage, offset: int, shard: Tensor) -> Tensor:
    """A contiguous tensor like a shard, in memory that it keeps alive.

    It has a storage of its own, of exactly its size: torch writes whole storages, and its writer of
    checkpoints first copies a tensor that shares one.
    """
    own = memory[offset : offset + shard.nbytes]
    return torch.empty(0, dtype=shard.dtype).set_(own).view(shard.shape)


def allocate(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate host memory, page-locked if `pinned`."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def packed(sizes: Sequence[int]) -> list[Chunk]:
    """Chunks for all shards, given their bytes.

    torch rounds every pinned allocation up to a power of two. So each chunk is the largest power of
    two that some of the remaining shards can fill; small shards fill the gaps of large ones. The
    last chunk takes the rest. If the remaining shards can fill none, the fullest chunk is taken.
    """
    rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    left = sorted(range(len(rooms)), key=lambda number: -rooms[number])
    spare = LARGEST_GAP * sum(rooms)
    chunks: list[Chunk] = []
    while left:
        chunks.append(next_chunk(left, rooms, spare))
        left = [number for number in left if number not in chunks[-1].offsets]
    return chunks


def next_chunk(left: Sequence[int], rooms: Sequence[int], spare: float) -> Chunk:
    """The next chunk of `packed`, for some of the shards in `left` (sorted, largest first).

    `spare`: bytes that may stay empty if the chunk takes all of them.
    """
    num_bytes = power_of_two(sum(rooms[number] for number in left))
    choices = [filled(num_bytes, left, rooms)]
    if num_bytes - choices[0].num_used <= spare:
        return choices[0]
    while num_bytes > power_of_two(rooms[left[0]]):
        num_bytes //= 2
        choices.append(filled(num_bytes, left, rooms))
    # All full chunks compare equal: max returns the first, which is the largest.
    return max(choices, key=lambda chunk: min(chunk.num_used / chunk.num_bytes, 1 - LARGEST_GAP))


def filled(num_bytes: int, left: Sequence[int], rooms: Sequence[int]) -> Chunk:
    """A chunk of this size with each shard of `left`, in order, that still fits."""
    offsets, end = {}, 0
    for number in left:
        if end + rooms[number] <= num_bytes:
            offsets[number] = end
            end += rooms[number]
    return Chunk(num_bytes, offsets, end)


def power_of_two(num_bytes: int) -> int:
    """The smallest power of two >= num_bytes; 0 for 0."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def leaves(tensors: TensorTree) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, in order."""
    for value in tensors.values():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield value


def rebuilt(tensors: TensorTree, copies: Iterator[Tensor]) -> dict[str, Any]:
    """Nested dicts like `tensors`, with `copies` as leaves."""
    return {
        name: rebuilt(value, copies) if isinstance(value, Mapping) else next(copies)
        for name, value in tensors.items()
    }
