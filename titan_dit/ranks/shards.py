"""Shards of a tensor: which elements a rank holds, and DTensors over them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_indices(target: Tensor, dim: int) -> Tensor:
    """This rank's indices along a dim times the dim's stride, to add to those of other dims.

    They are on the shard's device: with [offload] parameters on the host, not on the mesh's device.
    """
    shape = [1] * target.ndim
    shape[dim] = -1
    stride = math.prod(target.shape[dim + 1 :])
    # distribute_tensor would move them to the mesh's device.
    device = target.device_mesh.device_type if isinstance(target, DTensor) else target.device
    whole = (torch.arange(target.shape[dim], device=device) * stride).view(shape)
    if not isinstance(target, DTensor):
        return whole
    placements = [
        placement if getattr(placement, "dim", None) == dim else Replicate()
        for placement in target.placements
    ]
    own = distribute_tensor(whole, target.device_mesh, placements, src_data_rank=None)
    assert isinstance(own, DTensor)
    return own.to_local().to(target.to_local().device)


def as_shard(shard: Tensor, other: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Wrap a rank's shard with the mesh and placements of another DTensor; no copy.

    It stays on its device: DTensor.from_local would copy it to the mesh's.

    Args:
        shard: this rank's part, of any dtype.
        other: if it is a plain tensor, the shard is returned as it is.
        shape: that of the whole tensor, row-major; default: `other`'s, with its strides.
    """
    if not isinstance(other, DTensor):
        return shard
    spec = other._spec
    assert spec.tensor_meta is not None
    meta = spec.tensor_meta._replace(dtype=shard.dtype)
    if shape is not None:
        stride = torch.empty(tuple(shape), device="meta").stride()
        meta = meta._replace(shape=torch.Size(shape), stride=stride)
    own = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(shard, own, requires_grad=False)  # type: ignore[no-untyped-call]
