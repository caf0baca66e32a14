"""Whether a run can hold its state at all, in closed form: asked before anything is built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from titan_dit.config import JobConfig
from titan_dit.section import UserError

FP32 = 4
GIB = 2**30


def state_bytes(num_parameters: int, num_shards: int, num_averages: int) -> int:
    """Bytes that a rank keeps: weights, gradients, two moments of AdamW, averages, all in fp32.

    The mean over ranks, so the fullest rank holds no less: the ends of a pipeline have more, and
    tensor parallelism leaves what stands outside the blocks whole.
    """
    return num_parameters * FP32 * (1 + 1 + 2 + num_averages) // num_shards


def check_memory(
    config: JobConfig[Any, Any, Any], num_shards: int, device_bytes: int | None, where: str
) -> None:
    """Refuse a run whose state alone is more than a rank's memory (None: not known)."""
    with torch.device("meta"):
        channels = config.model.sample_shape[0]
        model = config.model.build(config.objective.output_channels(channels))
    count = sum(p.numel() for p in model.parameters())
    needed = state_bytes(count, num_shards, len(config.ema.decays))
    if device_bytes is not None and needed > device_bytes:
        raise UserError(
            f"[model] {count:,} parameters with gradients, AdamW's moments and "
            f"{len(config.ema.decays)} average(s), over {num_shards} shard(s), take "
            f"{needed / GIB:.1f} GiB per rank, but {where} has {device_bytes / GIB:.1f} GiB for "
            "each. Launch more ranks (dp_shard, tp, pp or cp shard the state), or see what a run "
            "would need, without any device: add --dry-run to the command, or --dry-run WORLD."
        )


def rank_memory() -> tuple[int | None, str]:
    """The memory that one rank can have here, and what that memory is; None if it is not known."""
    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return torch.cuda.get_device_properties(device).total_memory, "the GPU"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = host_memory()
    return (None if host is None else host // ranks), "this machine's free memory"


def host_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can be had without swapping; off Linux, all there are; None if neither is said."""
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
