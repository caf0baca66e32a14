"""torch's flight recorder: the last collectives of each rank, for debugging hangs."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from typing import Any

RECORDERS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
"""Backend -> private function of torch; not in every build."""


def switch_on(entries: int = 2000) -> None:
    """Record the last `entries` collectives. Call before init_process_group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))


def records() -> dict[str, bytes]:
    """Map backend to its pickled record; empty if this build of torch has none."""
    import torch._C

    functions = getattr(torch._C, "_distributed_c10d", None)
    found = {name: getattr(functions, function, None) for name, function in RECORDERS.items()}
    return {name: bytes(dump()) for name, dump in found.items() if dump}


def summary(record: bytes, last: int = 10) -> list[str]:
    """One line for each of the `last` collectives of every group, oldest first.

    Of every group, so that a save in the background does not hide the collectives of the step.
    """
    entries: list[dict[str, Any]] = pickle.loads(record).get("entries", [])
    in_group: Counter[str] = Counter()
    lines = []
    for entry in reversed(entries):
        group = entry["process_group"][0]
        in_group[group] += 1
        if in_group[group] <= last:
            state = "done" if entry["retired"] else entry["state"]
            what = f"{entry['profiling_name']} of {entry['input_sizes']}"
            lines.append(f"#{entry['collective_seq_id']} {what} in group {group}: {state}")
    return lines[::-1]
