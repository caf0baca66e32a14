"""Initial weights, equal on every layout."""

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
    model: nn.Module,
    table: Mapping[str, Initializer],
    seed: int,
    device: torch.device,
    drawn_by: str = "generator",
) -> None:
    """Allocate a model that is on the meta device, and initialise its weights.

    Each tensor has its own generator, seeded by (seed, name). The whole tensor is drawn on the
    device, then reduced to this rank's shard: the extra memory is at most one whole tensor.
    `drawn_by` is [job] initial_weights.
    """
    if drawn_by != "generator":
        raise NotImplementedError(f"[job] initial_weights={drawn_by!r}")
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
        # Every rank holds the same whole tensor: no communication.
        full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(full)
