"""Applies kernels and parallelism to a model on the meta device, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from titan_dit.config.layout import (
    ActivationCheckpointConfig,
    CompileConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
)
from titan_dit.config.training import LoRAConfig
from titan_dit.kernels import attention, cross_entropy, linear, short_attention
from titan_dit.models.base import Model
from titan_dit.parallel import (
    async_tp,
    compute_copies,
    context,
    fsdp,
    remat,
    side_losses,
    tensor,
)
from titan_dit.parallel.compile import compile_blocks
from titan_dit.parallel.mesh import Mesh
from titan_dit.parallel.tensor import TensorPlan

NONE = LoRAConfig()
ON_DEVICE = OffloadConfig()


def parallelize(
    model: Model,
    mesh: Mesh,
    tensor_plan: TensorPlan,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
    tokens: int = 0,
    adapters: LoRAConfig = NONE,
    streams: Iterable[str] = (),
    device: str = "",
    offload: OffloadConfig = ON_DEVICE,
) -> None:
    """Apply float8, TP, LoRA and its base, attention, CP, remat, compile, offload, FSDP2.

    `tokens`, `device`: see `float8.apply`. `streams`: names of `ModelSpec.stream`, for adapters.

    One rank has copies in the compute dtype instead of FSDP2, except for some kinds of float8, for
    weights in bf16, whose gradients FSDP2 adds up in fp32, and for those on the host.
    """
    device_type = mesh.whole.device_type
    if device_type == "cpu":
        linear.apply(model)
    cross_entropy.apply(model)
    # Lazy imports: a plain run needs neither float8 nor lora.
    if precision.float8 != "off":
        from titan_dit.parallel import float8

        tensor_plan = float8.apply(
            model, tensor_plan, precision, mesh.sizes, tokens, device_type, device
        )
    if mesh.sizes.tp > 1:
        tensor.apply(model, mesh.axis("tp"), tensor_plan)
        tensor.shard_logits(model, mesh.axis("tp"))
    if adapters.rank:
        sp = tensor.sequence_shards(mesh.sizes.tp, tensor_plan)
        add_adapters(model, adapters, next(iter(streams), ""), sp, torch.device(device_type))
    side_losses.apply(model, mesh, tensor_plan)
    is_async = parallel.async_tp and mesh.sizes.tp > 1
    async_tp.apply(model, tensor_plan, mesh.axis("tp") if is_async else None)
    if short_attention.suits(device_type, precision, checkpointing, compilation):
        attention.apply(model, short_attention.attend)
    else:
        attention.apply(model, attention.attend_by(precision.attention, device_type))
    if mesh.sizes.cp > 1:
        context.apply(
            model,
            mesh.axis("cp"),
            parallel.cp_method,
            attention=precision.attention,
            compiled=compilation.enabled,
        )
    remat.apply(model, checkpointing)
    compile_blocks(model, compilation, mesh.sizes.tp)
    if offload.activations:
        from titan_dit.parallel import offload as activations

        activations.apply(model, offload)
    if compute_copies.suits(mesh.whole.size(), precision) and not offload.parameters:
        keep = compilation.cuda_graphs
        compute_copies.apply(model, fsdp.DTYPES[precision.dtype], keep)
        return
    fsdp.shard(model, mesh.fsdp, parallel, precision, on_host=offload.parameters)
    if precision.float8 == "tensorwise":
        float8.scale_before_gathers(model, pipelined=parallel.pp > 1)


def add_adapters(
    model: Model, adapters: LoRAConfig, stream: str, sp: int, device: torch.device
) -> None:
    """Add LoRA, see `lora.apply`; quantise the layers that it leaves frozen if asked to."""
    from titan_dit.parallel import lora

    lora.apply(model, adapters, stream, sp)
    if adapters.base != "full":
        from titan_dit.parallel import quantized

        quantized.apply(model, adapters, device)
