"""The same initial weights on every layout."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_dit.models.initializers import Initializer


@torch.no_grad()
def initialize(
    model: nn.Module, table: Mapping[str, Initializer], seed: int, device: torch.device
) -> None:
    """Give a model on the meta device its memory and its weights.

    Each tensor has a generator of its own, seeded by (seed, name), is drawn whole on the device,
    and all but this rank's shard is freed: one tensor of extra memory at most.
    """
    model.to_empty(device=device)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        generator = torch.Generator(device).manual_seed(tensor_seed(seed, name))
        put(tensor, table[name](tensor.shape, generator))


def tensor_seed(seed: int, name: str) -> int:
    """A 63-bit seed for one tensor."""
    digest = hashlib.blake2b(f"{seed}/init/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def put(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    if isinstance(target, DTensor):
        # Every rank holds the same whole tensor, so nothing needs to be sent.
        full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(full)
