"""Adapters of LoRA on a built model's linear layers (`models.lora`); its own weights are frozen.

Activations are multiplied by A and B, so no gradient of a frozen weight is computed. The adapters
of a layer that is split over tp are split like its weight: B of a column-parallel one, A of a
row-parallel one. The other matrix is whole on every rank, and its gradients are partial sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from titan_dit.config.parameter_groups import matches
from titan_dit.config.training import LoRAConfig
from titan_dit.models import lora
from titan_dit.models.base import Model


def apply(model: Model, config: LoRAConfig) -> None:
    """Freeze a model on the meta device, after tensor parallelism, and add the adapters."""
    for name, parameter in model.named_parameters():
        # A copy of a tied weight on another stage is trained as its owner is.
        parameter.requires_grad_(matches(model.tied.get(name, name), config.trained))
    for layer in lora.adapted_layers(model, config.targets).values():
        add(layer, config.rank, config.scale)


def add(layer: nn.Linear, rank: int, scale: float) -> None:
    """Give a layer its adapter, by a subclass: hooks and compiled graphs stay as they are."""
    weight = layer.weight
    outputs, inputs = weight.shape
    for name, shape, dim in ((lora.A, (rank, inputs), 1), (lora.B, (outputs, rank), 0)):
        tensor = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        if isinstance(weight, DTensor):
            places = [p if p == Shard(dim) else Replicate() for p in weight.placements]
            tensor = distribute_tensor(tensor, weight.device_mesh, places, src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(tensor))
    layer.lora_scale = scale  # type: ignore[assignment]
    kind: Any = type(layer)
    layer.__class__ = adapted(kind)


@functools.cache
def adapted(kind: Any) -> Any:
    """A subclass of a linear layer's class `kind`, with an adapter."""

    class Adapted(kind):  # type: ignore[misc]
        """A linear layer, plus scale * B A x."""

        lora_A: nn.Parameter
        lora_B: nn.Parameter
        lora_scale: float

        def forward(self, input: Tensor) -> Any:
            """Return x @ (weight + scale * B @ A).T + bias."""
            return super().forward(input) + update(input, self.lora_A, self.lora_B, self.lora_scale)

    Adapted.__name__ = Adapted.__qualname__ = f"Adapted{kind.__name__}"
    return Adapted


def update(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return scale * (x A.T) B.T, for whole tensors or for a tp rank's shards."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return sharded(x, a, b, scale)
    return plain(x, a, b, scale)


def plain(
    x: Float[Tensor, "*n i"], a: Float[Tensor, "r i"], b: Float[Tensor, "o r"], scale: float
) -> Float[Tensor, "*n o"]:
    """Return scale * (x A.T) B.T."""
    return F.linear(F.linear(x, a) * scale, b)


def sharded(x: Tensor, a: DTensor, b: DTensor, scale: float) -> DTensor:
    """`plain` on a tp rank's parts. `x` and the result are DTensors, placed as the layer's."""
    grads: dict[str, Any] = {"a": [Replicate()], "b": [Replicate()]}
    placement: Placement = Replicate()
    if b.placements[0] == Shard(0):
        placement, grads = Shard(0), {"a": [Partial()], "b": [Shard(0)]}
    elif a.placements[0] == Shard(1):
        placement, grads = Shard(1), {"a": [Shard(1)], "b": [Partial()]}
    own_a = a.to_local(grad_placements=grads["a"])
    own_b = b.to_local(grad_placements=grads["b"])
    return on_shards(
        x, a.device_mesh, placement, b.shape[0], lambda own: plain(own, own_a, own_b, scale)
    )


def on_shards(
    x: Tensor,
    mesh: DeviceMesh,
    placement: Placement,
    outputs: int,
    product: Callable[[Tensor], Tensor],
) -> DTensor:
    """A linear layer's `product` of a tp rank's part of `x`, as a DTensor.

    `placement`: that of the weight [outputs, inputs]. Shard(0), column-parallel: a rank has some of
    the outputs. Shard(1), row-parallel: some of the inputs, and the result is a partial sum.
    """
    last = x.ndim - 1
    given: list[Placement] = [Shard(last) if placement == Shard(1) else Replicate()]
    found: list[Placement] = [Replicate()]
    grad = given
    if placement == Shard(0):
        found, grad = [Shard(last)], [Partial()]
    elif placement == Shard(1):
        found = [Partial()]
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, given, run_check=False)
    out = product(x.redistribute(placements=given).to_local(grad_placements=grad))
    if found == [Shard(last)] and outputs % mesh.size():
        # Ranks have shards of different sizes: torch would assume this rank's size for all.
        shape = torch.Size((*out.shape[:-1], outputs))
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(out.ndim))
        return DTensor.from_local(out, mesh, found, run_check=False, shape=shape, stride=stride)
    return DTensor.from_local(out, mesh, found, run_check=False)
