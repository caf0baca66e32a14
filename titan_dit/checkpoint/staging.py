"""Copies of a run's tensors in host memory, for asynchronous checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TensorTree: TypeAlias = Mapping[str, Any]
"""Nested dicts of tensors; a DTensor is saved and loaded by its local shards."""


class Staging:
    """Host buffers, allocated by the first copy and reused by later ones."""

    def __init__(self) -> None:
        self.layout: list[tuple[torch.Size, torch.dtype]] = []
        self.buffers: list[Tensor] = []
        self.tree: TensorTree = {}

    @torch.no_grad()
    def copy(self, tensors: TensorTree) -> TensorTree:
        """Copy this rank's shards synchronously; the result is valid until the next call."""
        originals = list(leaves(tensors))
        shards = [t.to_local() if isinstance(t, DTensor) else t for t in originals]
        layout = [(shard.shape, shard.dtype) for shard in shards]
        if layout != self.layout:
            # Pinned: device-to-host copies are asynchronous and run at full bus bandwidth.
            self.buffers = [
                torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
                for shard in shards
            ]
            self.tree = rebuilt(tensors, map(like, originals, self.buffers))
            self.layout = layout  # Last: after an out-of-memory error it is still the old one.
        torch._foreach_copy_(self.buffers, shards, non_blocking=True)
        if any(shard.is_cuda for shard in shards):
            torch.cuda.current_stream().synchronize()
        return self.tree


def like(original: Tensor, copy: Tensor) -> Tensor:
    """Wrap a copied shard as a DTensor with the original's placements.

    DTensor.from_local would move the host copy back to the mesh's device.
    """
    if not isinstance(original, DTensor):
        return copy
    return DTensor(copy, original._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def leaves(tensors: TensorTree) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, in order."""
    for value in tensors.values():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield value


def rebuilt(tensors: TensorTree, copies: Iterator[Tensor]) -> dict[str, Any]:
    """The same nested dicts with `copies` as leaves."""
    return {
        name: rebuilt(value, copies) if isinstance(value, Mapping) else next(copies)
        for name, value in tensors.items()
    }
