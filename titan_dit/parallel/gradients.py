"""The global gradient norm, over every rank's shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a global L2 norm of at most `max_norm` (0: leave them) and return it.

    The norm before clipping, a plain fp32 scalar equal on all ranks: NaN or infinite as soon as
    one element of one gradient is. Nothing waits for the device.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm
