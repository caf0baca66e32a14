"""The trainers and machines of benchmarks/facts: what they overlap, fuse and keep.

One `Runtime` for each software and variant, from its code or paper; nothing here is per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from titan_dit.planner.hardware import Device, device_of
from titan_dit.planner.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a trainer runs, and the keys of this project's config that describe the same."""

    runtime: Runtime
    kernels: Literal["ours", "checkpoints", "megatron"] = "ours"
    """See `facts_kernels`: this project's; with checkpoints that repeat all of a block; Megatron's."""
    remat: Mapping[str, str] = field(default_factory=dict)
    """[remat] mode of its `recompute`, where the names differ."""
    reshard: str = "auto"
    """[parallel] reshard_after_forward."""
    is_compiled: bool = False


# Per parameter: fp16 gradients to fp32 (2 + 4), unscaled (4 + 4), their norm (4), clipped (4 + 4),
# Adam (16 read, 12 written), weights to fp16 (4 + 2).
MEGATRON_UPDATE = 60.0
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
SCATTERED = replace(MEGATRON, scattered_messages=True)
"""arXiv:2104.04473 sec. 4.1."""
# Composer: bf16 parameters are gathered; DEFAULT reduces in fp32, PURE in bf16 (get_mixed_precision).
FOUNDRY = Runtime(is_fused=False, gather_bytes=2, gradient_bytes=4)
ATTENTION = {"selective": "attention"}
"""arXiv:2205.05198 sec. 5 recomputes attention alone under this name."""

SOFTWARE = {
    "megatron-lm 8aa4619f": {
        # allreduce_params after the last backward; unfused attention; send and receive block.
        "local ddp": Software(runtime=MEGATRON, kernels="megatron"),
    },
    "oneflow 75f11b8": {
        # A static graph: gradients are reduced while backward runs, and stages exchange messages
        # while they compute.
        "": Software(
            runtime=replace(MEGATRON, overlaps_data=True, blocking_messages=False),
            kernels="megatron",
        ),
    },
    "megatron-lm sc21": {
        "local ddp": Software(runtime=SCATTERED, kernels="megatron"),
        # torch's DistributedDataParallel reduces buckets while backward runs.
        "torch ddp": Software(runtime=replace(SCATTERED, overlaps_data=True), kernels="megatron"),
    },
    "megatron-lm 2022": {
        "local ddp": Software(runtime=SCATTERED, kernels="megatron", remat=ATTENTION),
    },
    "llm-foundry": {
        "DEFAULT FULL_SHARD": Software(runtime=FOUNDRY, kernels="checkpoints", reshard="always"),
        "DEFAULT SHARD_GRAD_OP": Software(
            runtime=replace(FOUNDRY, sharding="gradients"),
            kernels="checkpoints",
            reshard="never"
        ),
        "PURE FULL_SHARD": Software(runtime=replace(FOUNDRY, gradient_bytes=2), kernels="checkpoints", reshard="always"),
    },
    "torchtitan": {
        "eager": Software(runtime=Runtime()),
        "compiled": Software(runtime=Runtime(), is_compiled=True),
        "compiled async_tp": Software(runtime=Runtime(), is_compiled=True),
    },
}


def device_named(name: str, software: str) -> Device:
    """The device of a row, with its machines' network. Raises UserError."""
    if name == "h100_96":
        # HBM2e of 2.4 TB/s, 500 W (the source's words); torch reports 95.1 GiB of an H20's 96 GB.
        return replace(device_of("h100"), name=name, copy_gb_per_s=2400.0, memory_gib=95.0)
    device = device_of(name)
    if software == "llm-foundry" and name.startswith("a100"):
        return replace(device, nics_per_node=8, nic_gb_per_s=25.0)  # 1,600 Gb/s a node.
    return device
