"""Which elements of a sharded tensor a rank holds."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def own_indices(target: Tensor, dim: int) -> Tensor:
    """This rank's indices along a dim times the dim's stride, to add to those of other dims."""
    shape = [1] * target.ndim
    shape[dim] = -1
    stride = math.prod(target.shape[dim + 1 :])
    device = target.to_local().device if isinstance(target, DTensor) else target.device
    whole = (torch.arange(target.shape[dim], device=device) * stride).view(shape)
    if not isinstance(target, DTensor):
        return whole
    placements = [
        placement if getattr(placement, "dim", None) == dim else Replicate()
        for placement in target.placements
    ]
    own = distribute_tensor(whole, target.device_mesh, placements, src_data_rank=None)
    assert isinstance(own, DTensor)
    return own.to_local()
