"""Local shards of DTensors: operators on them cost no dispatch by DTensor."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor


def shards_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards; plain tensors are their own.

    Take them anew for every use: FSDP2 may move an uneven shard in a forward, to pad it.
    """
    # `to_local` makes a view of every parameter: 2.6 us each, 0.8 ms for the 291 of XL.
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def sharded_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """Wrap a tensor of a parameter's local shape with the parameter's placements; no copy.

    A plain parameter has plain shards.
    """
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        # Shards may be uneven: the whole shape cannot be computed from one.
        shape=parameter.shape,
        stride=parameter.stride(),
    )
