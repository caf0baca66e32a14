"""Initial weights: a function of (seed, parameter name), equal on every layout.

With initial_weights = "counter" also on every device, except initializers that draw on the CPU (see
`initialize`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_dit.models.base import Model
from titan_dit.models.initializers import Independent, Initializer
from titan_dit.ranks.shards import local, own_indices

CPU = torch.device("cpu")


@torch.no_grad()
def initialize(
    model: nn.Module,
    table: Mapping[str, Initializer],
    seed: int,
    device: torch.device,
    drawn_by: str = "counter",
    *,
    on_host: bool = False,
) -> None:
    """Allocate a model that is on the meta device, and initialise its weights.

    Each tensor has a key of its own, from (seed, name). `drawn_by` is [job] initial_weights:
    "counter" draws the elements of this rank's shard, in chunks. An initializer that is not
    `Independent` draws the whole tensor on the CPU, which every machine has; its rounding may
    differ between CPUs. "generator" draws the whole tensor on the device. `on_host`: parameters are
    allocated in host memory, buffers on the device.
    """
    allocate(model, device, on_host=on_host)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype == torch.uint8:
            tensor.zero_()  # The codes of a quantised weight, which is loaded.
            continue
        initializer, key = table[name], tensor_seed(seed, name)
        if drawn_by == "counter" and isinstance(initializer, Independent):
            draw(tensor, initializer, key)
        else:
            generator = torch.Generator(CPU if drawn_by == "counter" else device)
            put(tensor, initializer(tensor.shape, generator.manual_seed(key)))


def allocate(model: nn.Module, device: torch.device, *, on_host: bool = False) -> None:
    """Allocate a model that is on the meta device; its values are undefined.

    `on_host`: its parameters in host memory, as FSDP2's offload wants them.
    """
    model.to_empty(device=CPU if on_host else device)
    if on_host:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, buffer.to(device), persistent=name in module.state_dict(keep_vars=True)
                )
    if isinstance(model, Model):
        model.tie()


def tensor_seed(seed: int, name: str) -> int:
    """A 63-bit seed for one tensor."""
    digest = hashlib.blake2b(f"{seed}/init/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def put(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    if isinstance(target, DTensor):
        # Every rank holds the same whole tensor: no communication.
        full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        # Local copies: a copy of DTensors derives placements, milliseconds for every new shape.
        target, full = target.to_local(), full.to_local()
    target.copy_(full)


def draw(target: Tensor, initializer: Independent, key: int) -> None:
    """Draw the elements that this rank holds."""
    own = local(target)
    if initializer.distribution == "one":
        own.fill_(initializer.scale(target.shape))
        return
    if not own.numel():
        return
    if not target.ndim:
        draw(target.view(1), initializer, key)
        return
    rows, *columns = (own_indices(target, dim) for dim in range(target.ndim))
    inner = sum(columns, start=torch.zeros_like(rows[:1]))
    num_rows = max(1, chunk_size(own.device) // inner.numel())
    for part, first in zip(torch.split(own, num_rows), torch.split(rows, num_rows), strict=True):
        drawn = initializer.values(target.shape, key, (first + inner).flatten())
        part.copy_(drawn.view_as(part))


def chunk_size(device: torch.device) -> int:
    """Elements to draw at a time: what a CPU's caches hold, or enough to keep a GPU busy.

    Up to 2**15 torch uses one thread. Threads that meet after every operation are slower, many
    times so if other processes take their cores.
    """
    return 2**15 if device.type == "cpu" else 2**22
