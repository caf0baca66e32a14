"""CUDA memory snapshots with Python stacks. torch's functions for them are private."""

from __future__ import annotations

from pathlib import Path

import torch

MAX_EVENTS = 1_000_000
"""Allocations and frees kept; older ones are dropped."""


def start(device: torch.device) -> None:
    """Start to record the allocation history; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)


def write(path: Path, device: torch.device) -> str:
    """Write the history as a pickle, stop recording, and return a console line."""
    if device.type != "cuda":
        return "[profile] memory=true: a CPU's allocator records no history; no snapshot is written"
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)
    return f"memory snapshot in {path}"
