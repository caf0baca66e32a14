"""The trainers and machines of benchmarks/facts: what they overlap, fuse and keep.

One `Runtime` for each software and variant, from its code or paper; nothing here is per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from facts_kernels import ONE_KERNEL, Held, Unfused

from titan_dit.planner.hardware import Device, device_of
from titan_dit.planner.rates import Runtime


@dataclass(frozen=True, kw_only=True)
class Software:
    """Settings of a published trainer, and this project's config keys for the same."""

    runtime: Runtime
    kernels: Literal["ours", "foundry"] | Unfused = "ours"
    """See `facts_kernels`."""
    remat: Mapping[str, str] = field(default_factory=dict)
    """[activation_checkpoint] mode of its `recompute`, where the names differ."""
    reshard: str = "auto"
    """[parallel] reshard_after_forward."""
    is_compiled: bool = False
    is_async: bool = False
    """Products hide tp's messages part by part (async TP)."""
    held: Held | None = None
    """Bytes held by a trainer whose memory is compared."""


# Per parameter: fp16 gradients to fp32 (2 + 4), unscaled (4 + 4), their norm (4), clipped (4 + 4),
# Adam (16 read, 12 written), weights to fp16 (4 + 2).
MEGATRON_UPDATE = 60.0
# One kernel: reads fp16 gradients (2), reads and writes weights and moments (24), writes fp16
# weights (2); the norm reads the gradients before (2).
ONEFLOW_UPDATE = 30.0
# fp16 weights and gradients, fp32 weights, gradients and two moments.
MEGATRON_STATE = 20.0
MEGATRON = Runtime(
    is_fused=True,
    sharding="replicas",
    overlaps_data=False,
    gather_bytes=2,
    gradient_bytes=2,
    update_bytes=MEGATRON_UPDATE,
    state_bytes=MEGATRON_STATE,
    blocking_messages=True,
)
# fp32 weights and two moments, fp16 weights and gradients.
ONEFLOW_STATE = 16.0
ONEFLOW = replace(
    MEGATRON,
    blocking_messages=False,
    update_bytes=ONEFLOW_UPDATE,
    state_bytes=ONEFLOW_STATE,
)
# One kernel for scale, mask, softmax and dropout, which writes probabilities twice and a mask; one
# for its backward. One for the cross entropy.
ONEFLOW_KERNELS = Unfused(scores=(2 + 2 + 2 + 1, 2 + 1 + 2 + 2), logits=ONE_KERNEL)
# Its pipeline buffers have two places per stage; memory is planned before the run.
ONEFLOW_HELD = Held(logits=(4, 2), buffers=2, queue=0)
SCATTERED = replace(MEGATRON, scattered_messages=True)
"""arXiv:2104.04473 sec. 4.1."""
# Composer's get_mixed_precision: parameters are gathered in bf16; DEFAULT reduces in fp32, PURE in
# bf16.
# FSDP reduces in every microbatch: Composer does not use its no_sync.
FOUNDRY = Runtime(is_fused=False, gather_bytes=2, gradient_bytes=4, reduces_each_microbatch=True)
ATTENTION = {"selective": "attention"}
"""arXiv:2205.05198 sec. 5 recomputes attention alone under this name."""

SOFTWARE = {
    "megatron-lm 8aa4619f": {
        # allreduce_params after the last backward; unfused attention; send and receive block.
        "local ddp": Software(runtime=MEGATRON, kernels=Unfused(), held=Held()),
    },
    "oneflow 75f11b8": {
        # A static graph: stages exchange messages while they compute.
        "1d": Software(
            runtime=replace(ONEFLOW, overlaps_data=True), kernels=ONEFLOW_KERNELS, held=ONEFLOW_HELD
        ),
        # With tp all collectives are on the stream of the kernels (nccl_use_compute_stream).
        "2d": Software(runtime=ONEFLOW, kernels=ONEFLOW_KERNELS, held=ONEFLOW_HELD),
    },
    "megatron-lm sc21": {
        "local ddp": Software(runtime=SCATTERED, kernels=Unfused()),
        # torch's DistributedDataParallel reduces buckets while backward runs.
        "torch ddp": Software(runtime=replace(SCATTERED, overlaps_data=True), kernels=Unfused()),
    },
    "megatron-lm 2022": {
        # Products add to fp32 gradients, which the optimizer then need not copy (2 + 4).
        "local ddp": Software(
            runtime=replace(SCATTERED, update_bytes=MEGATRON_UPDATE - 6),
            kernels=Unfused(add_bytes=0, hides_tp=True),
            remat=ATTENTION,
        ),
    },
    "llm-foundry": {
        "DEFAULT FULL_SHARD": Software(runtime=FOUNDRY, kernels="foundry", reshard="always"),
        "DEFAULT SHARD_GRAD_OP": Software(
            runtime=replace(FOUNDRY, sharding="gradients"), kernels="foundry", reshard="never"
        ),
        "PURE FULL_SHARD": Software(
            runtime=replace(FOUNDRY, gradient_bytes=2), kernels="foundry", reshard="always"
        ),
    },
    "torchtitan": {
        "eager": Software(runtime=Runtime()),
        "compiled": Software(runtime=Runtime(), is_compiled=True),
        "compiled async_tp": Software(runtime=Runtime(), is_compiled=True, is_async=True),
    },
}


def device_named(name: str, software: str) -> Device:
    """The device of a row, with its machines' network. Raises UserError."""
    if name == "h100_96":
        # HBM2e of 2.4 TB/s, 500 W (the source's words); torch reports 95.1 GiB of an H20's 96 GB.
        return replace(device_of("h100"), name=name, copy_gb_per_s=2400.0, memory_gib=95.0)
    # llm-foundry attends with FlashAttention on every device, not with cuDNN.
    device = replace(device_of(name), head_step=32)
    if software == "llm-foundry" and name.startswith("a100"):
        return replace(device, nics_per_node=8, nic_gb_per_s=25.0)  # 1,600 Gb/s a node.
    return device
