"""torch's record of the last collectives: what each rank was waiting for when all stood still."""

from __future__ import annotations

import os
import pickle
from typing import Any

RECORDERS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
"""What torch calls them; private, and not in every build."""


def switch_on(entries: int = 2000) -> None:
    """Keep the last `entries` collectives; before the ranks meet."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))


def records() -> dict[str, bytes]:
    """By backend, the pickled records that this build of torch has; may be none."""
    import torch._C

    functions = getattr(torch._C, "_distributed_c10d", None)
    found = {name: getattr(functions, function, None) for name, function in RECORDERS.items()}
    return {name: bytes(dump()) for name, dump in found.items() if dump}


def summary(record: bytes, last: int = 10) -> list[str]:
    """The newest collectives in words, oldest first."""
    entries: list[dict[str, Any]] = pickle.loads(record).get("entries", [])
    return [
        f"#{entry['collective_seq_id']} {entry['profiling_name']} of {entry['input_sizes']} "
        f"in group {entry['process_group'][0]}: {'done' if entry['retired'] else entry['state']}"
        for entry in entries[-last:]
    ]
