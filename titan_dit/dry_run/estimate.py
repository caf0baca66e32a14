"""Memory available to a rank on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def rank_memory() -> tuple[int | None, str]:
    """Bytes available to one rank, and the name of that memory; None if unknown."""
    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return torch.cuda.get_device_properties(device).total_memory, "the GPU"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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
