"""Checks against this machine: packages, ranks, kernels, memory, parts of torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor

from titan_dit.config.layout import PrecisionConfig
from titan_dit.config.operation import MetricsConfig, ProfileConfig
from titan_dit.config.section import UserError, show
from titan_dit.config.training import EMAConfig
from titan_dit.kernels import attention, short_attention
from titan_dit.kernels.attention_choice import AttentionShape
from titan_dit.models import lora, quantized
from titan_dit.optim.sections import OptimizerConfig
from titan_dit.parallel import compile
from titan_dit.parallel.fsdp import DTYPES
from titan_dit.parallel.transformer_engine import is_transformer_engine
from titan_dit.plan import RunPlan
from titan_dit.ranks.torch_range import pip_install, require
from titan_dit.system.launched_as import LaunchedAs

FP32, BF16_BYTES = 4, 2
GIB = 2**30
NEEDED = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "rowwise_with_gw_hp": (9, 0),
    "te_delayed": (8, 9),
    "te_current": (8, 9),
    "te_mxfp8": (10, 0),
}
"""Minimum CUDA compute capability of each float8 recipe."""
BF16 = 8, 0
"""Minimum CUDA compute capability of bf16."""


def check_writers(config: MetricsConfig) -> None:
    """Raise UserError for a metrics writer whose package is not installed."""
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "[metrics] wandb=true, but wandb is not installed. "
            f"Run {sys.executable} -m {pip_install('wandb')}, or set wandb = false."
        )


def check_profiled(config: ProfileConfig, plan: RunPlan) -> None:
    """Raise UserError for profiled ranks that do not exist.

    A run resumed on fewer ranks ignores them.
    """
    num_ranks = plan.world_size
    if plan.resuming or not config.enabled or max(config.ranks, default=0) < num_ranks:
        return
    started, valid = "1 rank was", "rank 0"
    if num_ranks > 1:
        started, valid = f"{num_ranks} ranks were", f"ranks from 0 to {num_ranks - 1}"
    raise UserError(f"[profile] ranks={list(config.ranks)}, but {started} started. Name {valid}.")


def check_matmuls(precision: PrecisionConfig, async_tp: bool, device: torch.device) -> None:
    """Raise UserError for float8 recipes and async_tp that this device does not support."""
    if async_tp and device.type != "cuda":
        raise UserError(
            f"[parallel] async_tp=true needs CUDA symmetric memory, but the device is a "
            f"{device.type}. Set async_tp = false."
        )
    if precision.float8 == "off" or precision.float8_emulate:
        return
    needed, float8 = NEEDED[precision.float8], show(precision.float8)
    wanted = ".".join(map(str, needed))
    if device.type != "cuda":
        emulate = "" if is_transformer_engine(precision.float8) else "float8_emulate = true (slow, "
        emulate += "for studying numerics) or " if emulate else ""
        raise UserError(
            f"[precision] float8={float8} needs a GPU of compute capability {wanted}, but the "
            f'device is a {device.type}. Set {emulate}float8 = "off".'
        )
    if (found := torch.cuda.get_device_capability(device)) < needed:
        able = [name for name, least in NEEDED.items() if least <= found]
        others = ", ".join(f'"{name}"' for name in ("off", *able))
        raise UserError(
            f"[precision] float8={float8} needs compute capability {wanted}, but "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}. "
            f"Set float8 to one of {others}."
        )


def check_base(plan: RunPlan, device: torch.device) -> None:
    """Raise UserError for a compiled float8 [lora] base on a GPU without Triton's e4m3."""
    needed = NEEDED["tensorwise"]
    if device.type != "cuda" or torch.version.hip or not plan.compile.enabled:
        return
    if plan.lora.base == "float8" and torch.cuda.get_device_capability(device) < needed:
        raise UserError(
            '[lora] base="float8" with [compile] needs compute capability '
            f"{'.'.join(map(str, needed))}, but {torch.cuda.get_device_name(device)} has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}. Set base = "
            '"int8", or [compile] enabled = false.'
        )


def state_bytes(
    shapes: Mapping[str, torch.Size],
    trained: Collection[str],
    optimizer: OptimizerConfig,
    num_shards: int,
    num_averages: int,
    width: int = FP32,
) -> int:
    """Bytes of training state per rank: weights, gradients, the optimizer's moments, EMAs.

    `width`: bytes of an element of a weight or gradient; moments and averages are fp32. With bf16
    a lower bound: modules of `Model.exact` keep fp32.

    Parameters not in `trained` count their weights only.
    The mean over ranks, so a lower bound for the largest one: pipeline ends hold more, and tensor
    parallelism shards only the blocks.
    """
    total = 0.0
    for name, shape in shapes.items():
        learning = width + FP32 * (optimizer.num_moments(name, shape) + num_averages)
        total += shape.numel() * (width + learning * (name in trained))
    return int(total / num_shards)


def rank_memory(*, on_host: bool = False) -> tuple[int | None, str]:
    """Bytes available to one rank, and the name of that memory; None if unknown.

    `on_host`: of the host, also if there is a GPU.
    """
    if torch.cuda.is_available() and not on_host:
        device = LaunchedAs.here().local_rank % torch.cuda.device_count()
        return torch.cuda.get_device_properties(device).total_memory, "the GPU"
    ranks = LaunchedAs.here().local_world_size
    host = host_memory()
    return (None if host is None else host // ranks), "this machine's free memory"


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes available without swapping (Linux), else the physical memory; None if unknown."""
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def check_memory(
    plan: RunPlan,
    optimizer: OptimizerConfig,
    ema: EMAConfig,
    device_bytes: int | None,
    where: str,
) -> None:
    """Raise UserError for a run whose state alone exceeds `device_bytes` per rank.

    None (unknown) passes. With [offload] parameters these are bytes of the host, which holds no
    frozen modules.
    """
    with torch.device("meta"):
        model = plan.spec.build()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    shapes |= lora.shapes(model, plan.lora)
    count = sum(shape.numel() for shape in shapes.values())
    shards, averages = plan.sizes.shards, len(ema.names)
    trained = plan.trained(shapes, optimizer.groups)
    width = BF16_BYTES if plan.precision.weights == "bf16" else FP32
    needed = state_bytes(shapes, trained, optimizer, shards, averages, width)
    held = quantized.held_bytes(model, plan.lora)
    needed -= sum(shapes[name].numel() * width - size for name, size in held.items()) // shards
    if not plan.offload.parameters:
        needed += round(plan.frozen.bytes_on(plan.sizes.data))
    if device_bytes is not None and needed > device_bytes:
        raise UserError(
            f"[model] {count:,} parameters with gradients, moments and "
            f"{averages} EMA(s), over {shards} shard(s), need {needed / GIB:.1f} GiB per rank, but "
            f"{where} has {device_bytes / GIB:.1f} GiB per rank. Launch more ranks (dp_shard, tp, "
            "pp or cp shard the state), or estimate the memory of a layout without a device: add "
            "--dry-run or --dry-run WORLD to the command."
        )


def check_kernels(plan: RunPlan, device: torch.device) -> None:
    """Run the attention kernel and the compiler on a sample, as the first step would."""
    attention.check_runs(plan.precision.attention, attention_shape(plan, device))
    compile.check(plan.compile, device)


def with_kernel(plan: RunPlan, device: torch.device) -> RunPlan:
    """The plan, with attention="auto" replaced by the kernel of ring attention on this device."""
    key = attention.settled(plan.precision.attention, attention_shape(plan, device))
    precision = replace(plan.precision, attention=key)  # type: ignore[arg-type]
    return replace(plan, precision=precision)


def attention_kernel(plan: RunPlan, device: torch.device) -> str:
    """The kernel that attention runs, as a key or, on a CPU, as "matmuls"."""
    if short_attention.suits(device.type, plan.precision, plan.activation_checkpoint, plan.compile):
        few = (
            plan.spec.mask != "lengths"
            and plan.spec.num_attended_tokens <= short_attention.MAX_TOKENS
        )
        return "matmuls" if few else "flash"
    return attention.kernel_of(plan.precision.attention, attention_shape(plan, device))


def attention_shape(plan: RunPlan, device: torch.device) -> AttentionShape:
    """Attention shape of one sample on one rank."""
    model_spec, sizes = plan.spec, plan.sizes
    ring = sizes.cp > 1 and plan.parallel.cp_method == "ring"
    exchanged = 1 if ring else sizes.cp
    return AttentionShape(
        heads=model_spec.num_heads // sizes.tp // exchanged,
        tokens=plan.attended_per_rank if ring else model_spec.num_attended_tokens,
        head_dim=model_spec.head_dim,
        dtype=plan.dtype,
        device=device,
        ring=ring,
        mask=model_spec.mask,
    )


def attention_hint(
    plan: RunPlan, device: torch.device, flops_per_sample: int, kernel: str | None = None
) -> str | None:
    """Console line on the cost of padding the head dim; None on a CPU or without padding.

    `kernel`: the kernel that runs; default: `attention_kernel`.

    Attention takes 12 n^2 h FLOPs per layer for n tokens and hidden h: two products forward (q k^T,
    and probabilities times v), four backward. Causal, it takes half of that.
    """
    model_spec = plan.spec
    if device.type != "cuda":
        return None
    tokens, heads = model_spec.num_attended_tokens, model_spec.num_heads
    head_dim = model_spec.head_dim
    own = 12 * tokens**2 * heads * head_dim * model_spec.num_layers
    own //= 2 if model_spec.mask == "causal" else 1
    kernel = kernel or attention_kernel(plan, device)
    line = attention.padding(kernel, head_dim, tokens, own / flops_per_sample)
    return line and (
        f"{line}. python -m titan_dit bench attention --heads {heads} --head-dim "
        f"{head_dim} --tokens {tokens} measures it"
    )


def format_hint(precision: PrecisionConfig, device: torch.device) -> str | None:
    """Console line if the run uses bf16 but the device has no bf16 arithmetic; else None."""
    if device.type != "cuda" or precision.dtype != "bf16" or torch.version.hip:
        return None
    if (found := torch.cuda.get_device_capability(device)) >= BF16:
        return None
    return (
        f'[precision] dtype="bf16": {torch.cuda.get_device_name(device)} (compute capability '
        f"{'.'.join(map(str, found))}) has no bf16 units and emulates it, slowly. "
        'Set dtype = "fp16" (docs/fp16.md)'
    )


def replayable_precision(precision: PrecisionConfig, device: torch.device) -> PrecisionConfig:
    """The run's `precision`, or the closest one that `device` supports, for a replay.

    float8 covers all layers that fit. It falls back to emulation, or to "off" for recipes without
    emulation. A missing attention kernel falls back to "auto".
    """
    every = replace(precision, float8_layers="all")
    probe = AttentionShape(1, 128, 64, DTYPES[precision.dtype], device)
    if precision.attention != "auto" and attention.refusal(precision.attention, probe):
        attention.use_implementation("auto")
        every = replace(every, attention="auto")
    try:
        check_matmuls(every, False, device)
    except UserError:
        lost = is_transformer_engine(precision.float8)
        return replace(every, float8="off") if lost else replace(every, float8_emulate=True)
    return every


RING_KERNELS = [
    f"_scaled_dot_product_{kernel}{way}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
    for way in ("", "_backward")
]


def check_torch_parts(*, profiles_memory: bool, rings: bool) -> None:
    """Raise UserError if a checkpoint, a memory snapshot or ring attention would fail."""
    require("ranks/shards.py", DTensor, "_spec")
    require("checkpoint/staging.py", torch, "_foreach_copy_")
    require("checkpoint/torch_files.py", filesystem.FileSystem, "create_stream", "init_path")
    require(
        "checkpoint/torch_files.py",
        filesystem.FileSystemWriter,
        "set_up_storage_writer",
        "prepare_local_plan",
    )
    require("checkpoint/torch_files.py", filesystem, "_StorageInfo")
    if profiles_memory:
        memory = torch.cuda.memory
        require("observe/profile.py", memory, "_record_memory_history", "_dump_snapshot")
    if rings:
        require("kernels/attention_kernels.py", torch.ops.aten, *RING_KERNELS)
