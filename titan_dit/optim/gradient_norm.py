"""The global gradient norm, over every rank's shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from titan_dit.optim.optimizer import shards_of


@torch.no_grad()
def clip_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    beside: Tensor | None = None,
    compiled: bool = False,
    loss_scale: Tensor | None = None,
) -> Tensor:
    """Clip gradients to a global L2 norm of `max_norm` (0: no clipping); return the norm before.

    A scalar tensor, equal on all ranks; NaN or infinite if any gradient element is. One all-reduce
    over all ranks, no device synchronisation. `beside`: an fp64 scalar that is summed over all
    ranks, in place, in the same all-reduce. `compiled`: the scalar operations are compiled to two
    kernels instead of nine. `loss_scale`: the gradients are divided by it in the same pass; the
    norm is that of the divided gradients.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = shards_of(gradients)
    # Replicated gradients count once; no two pipeline stages hold the same parameter.
    by_replicas: dict[int, list[Tensor]] = {}
    # The norm of bf16 gradients would be rounded to 8 bits.
    in_bf16 = any(gradient.dtype == torch.bfloat16 for gradient in local)
    norms_of_each = torch._foreach_norm(local, dtype=torch.float32 if in_bf16 else None)
    for gradient, norm in zip(gradients, norms_of_each, strict=True):
        by_replicas.setdefault(replicas(gradient), []).append(norm)
    add_up, factor_of = square_sum, clip_factor
    if compiled:
        add_up, factor_of = compile_scalars(add_up), compile_scalars(factor_of)
    sums = [add_up(torch.stack(norms), n) for n, norms in by_replicas.items()]
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    if beside is not None:  # Gradients may be in host memory, which NCCL cannot sum.
        total = total.to(beside.device)
    if dist.is_initialized():
        total = sum_over_ranks(total, beside)
    norm, factor = factor_of(total, max_norm, loss_scale)
    if max_norm > 0 or loss_scale is not None:
        torch._foreach_mul_(local, factor.to(local[0].device))
    return norm


def square_sum(norms: Tensor, replicas: int) -> Tensor:
    """The sum of the squares of norms [n] in fp64, over the number of ranks that add it."""
    total = norms.double().square().sum()
    return total if replicas == 1 else total / replicas


def clip_factor(
    total: Tensor, max_norm: float, loss_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm in fp32 from a sum of squares, factor of the gradients).

    With a loss scale the norm is that of the unscaled gradients.
    """
    norm = total.sqrt().float()
    if loss_scale is None:
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else norm
    norm, factor = norm / loss_scale, 1 / loss_scale
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0) * factor if max_norm > 0 else factor


@functools.cache
def compile_scalars(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of scalars to one kernel: on a GPU a launch costs more than a scalar."""
    return torch.compile(function)


def sum_over_ranks(total: Tensor, beside: Tensor | None) -> Tensor:
    """Sum `total` over all ranks, and `beside`, if given, in place."""
    if beside is None:
        dist.all_reduce(total)
        return total
    both = torch.stack([total, beside])
    dist.all_reduce(both)
    beside.copy_(both[1])
    return both[0]


def replicas(gradient: Tensor) -> int:
    """Number of ranks that hold the same shard of a gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    return copies(tuple(gradient.device_mesh.shape), gradient.placements)


@functools.lru_cache(maxsize=64)
def copies(sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> int:
    """`replicas` of a placement. Cached: a model's few placements occur in every step."""
    assert not any(placement.is_partial() for placement in placements)
    placed = zip(sizes, placements, strict=True)
    return math.prod(size for size, placement in placed if isinstance(placement, Replicate))
