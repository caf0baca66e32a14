"""[lora] base: frozen linear layers whose weights are bytes of `models.quantized`.

The bytes are a parameter without gradients in the place of the weight, so FSDP2 shards their rows,
and they are cut over tp as the weight was. A layer decodes them before its product, and again in
backward: no decoded weight is kept. torch 2.11 gathers integers in the compute dtype, which holds
0 to 255 exactly; later ones gather the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from titan_dit.config.section import UserError
from titan_dit.config.training import LoRAConfig
from titan_dit.models import quantized
from titan_dit.models.base import Model
from titan_dit.models.quantized import WeightCodes
from titan_dit.parallel.lora import on_shards


def apply(model: Model, config: LoRAConfig, device: torch.device) -> None:
    """Quantise a model on the meta device, after `lora.apply`, for training on `device`.

    Raises UserError if a tp rank's columns are no whole blocks.
    """
    codes = quantized.weight_codes(config.base, device)
    assert codes is not None
    product = product_of(codes)
    for name, layer in quantized.layers(model, config).items():
        layer.weight = nn.Parameter(bytes_like(name, layer.weight, codes), requires_grad=False)
        layer.product = product


def bytes_like(name: str, weight: Tensor, codes: WeightCodes) -> Tensor:
    """The bytes of a layer's weight on the meta device, cut as the weight is.

    Raises UserError if blocks do not divide the columns on a rank.
    """
    shape = codes.shape(weight.shape)
    held = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    if not isinstance(weight, DTensor):
        return held
    mesh = weight.device_mesh
    if Shard(1) in weight.placements and shape[1] % mesh.size():
        raise UserError(
            f'[lora] base="{codes.name}" holds {name} in blocks of {codes.block(weight.shape[1])} '
            f"columns, which do not divide the {weight.shape[1] // mesh.size()} of a rank with "
            f'[parallel] tp={mesh.size()}. Set tp to at most 8, or base = "full".'
        )
    return distribute_tensor(held, mesh, weight.placements, src_data_rank=None)


@functools.cache
def product_of(codes: WeightCodes) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`TokenLinear.product` of layers with these codes: x @ decode(held).T + bias."""
    linear = linear_of(codes)

    def product(x: Tensor, held: Tensor, bias: Tensor | None) -> Tensor:
        if not isinstance(held, DTensor):
            return linear(x, held, bias)
        mesh, placement = held.device_mesh, held.placements[0]
        own, own_bias = held.to_local(), part_of_bias(bias, placement, mesh.size())
        return on_shards(
            x, mesh, placement, held.shape[0], lambda part: linear(part, own, own_bias)
        )

    return product


def part_of_bias(bias: Tensor | None, placement: Placement, ranks: int) -> Tensor | None:
    """The bias in a tp rank's product: its outputs' part, or its share of a sum over ranks."""
    if not isinstance(bias, DTensor):
        return bias
    if placement == Shard(1):
        return bias.to_local(grad_placements=[Partial()]) / ranks
    return bias.to_local(grad_placements=[Shard(0) if placement == Shard(0) else Replicate()])


def linear_of(codes: WeightCodes) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The product x @ decode(held).T + bias on plain tensors, which saves no decoded weight."""

    class Linear(torch.autograd.Function):
        """The product and its gradients; the weight has none."""

        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor, held: Tensor, bias: Tensor | None) -> Tensor:
            ctx.save_for_backward(held)
            return F.linear(x, codes.decode(held).to(x.dtype), bias)

        @staticmethod
        def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
            (held,) = ctx.saved_tensors  # type: ignore[attr-defined]
            needed = ctx.needs_input_grad  # type: ignore[attr-defined]
            grad_x = None
            if needed[0]:
                grad_x = grad @ codes.decode(behind(held, grad)).to(grad.dtype)
            return grad_x, None, grad.flatten(0, -2).sum(0) if needed[2] else None

    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = Linear.apply
    return apply


def behind(held: Tensor, grad: Tensor) -> Tensor:
    """Bytes of a weight that a compiled graph cannot have before the gradient.

    It would decode them once, in forward, and keep the weight.
    """
    if not torch.compiler.is_compiling():
        return held
    return held + (grad.flatten()[:1].isnan().to(torch.uint8) & 0)
