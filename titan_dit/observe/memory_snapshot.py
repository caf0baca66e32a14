"""Every allocation of a GPU, with its Python stack: a private part of torch, touched here only."""

from __future__ import annotations

from pathlib import Path

import torch

MAX_EVENTS = 1_000_000
"""Allocations and frees that are kept, the newest."""


def start(device: torch.device) -> None:
    """Begin to keep the history. A CPU's allocator has none."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)


def write(path: Path, device: torch.device) -> str:
    """Write the history as a pickle, keep no more of it, and say where it is."""
    if device.type != "cuda":
        return "[profile] memory=true: a CPU's allocator keeps no history; no snapshot is written"
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)
    return f"memory snapshot in {path}"
