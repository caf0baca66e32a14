"""A copy of a run's tensors in host memory, to be written while training changes the originals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Tensors: TypeAlias = Mapping[str, Any]
"""Nested dicts of tensors; DTensors are saved and loaded as the shards they are."""


class Staging:
    """Buffers in host memory, made by the first copy and used again by all that follow."""

    def __init__(self) -> None:
        self.layout: list[tuple[torch.Size, torch.dtype]] = []
        self.buffers: list[Tensor] = []
        self.tree: Tensors = {}

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> Tensors:
        """This rank's shards, copied; complete when it returns, and valid until the next copy."""
        originals = list(leaves(tensors))
        shards = [t.to_local() if isinstance(t, DTensor) else t for t in originals]
        layout = [(shard.shape, shard.dtype) for shard in shards]
        if layout != self.layout:
            # Pinned: the device then copies by itself, at the full speed of the bus.
            self.buffers = [
                torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
                for shard in shards
            ]
            self.tree = rebuilt(tensors, map(like, originals, self.buffers))
            self.layout = layout  # Last: where memory ran out, the next copy begins anew.
        torch._foreach_copy_(self.buffers, shards, non_blocking=True)
        if any(shard.is_cuda for shard in shards):
            torch.cuda.current_stream().synchronize()
        return self.tree


def like(original: Tensor, copy: Tensor) -> Tensor:
    """A copied shard as a part of the whole that the original is a part of.

    Not by from_local, which would send a copy in host memory back to the mesh's device.
    """
    if not isinstance(original, DTensor):
        return copy
    return DTensor(copy, original._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def leaves(tensors: Tensors) -> Iterator[Tensor]:
    """The tensors of nested dicts, in their order."""
    for value in tensors.values():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield value


def rebuilt(tensors: Tensors, copies: Iterator[Tensor]) -> dict[str, Any]:
    """The same nested dicts around other tensors."""
    return {
        name: rebuilt(value, copies) if isinstance(value, Mapping) else next(copies)
        for name, value in tensors.items()
    }
