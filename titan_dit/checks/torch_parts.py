"""Private parts of torch that a run needs long after its start: missing ones are refused at once.

Other missing parts fail at import or in the first step. docs/torch-versions.md lists all.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor

from titan_dit.launcher.torch_range import require

RING_KERNELS = [
    f"_scaled_dot_product_{kernel}{way}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
    for way in ("", "_backward")
]


def check(*, profiles_memory: bool, rings: bool) -> None:
    """Raise UserError if a checkpoint, a memory snapshot or ring attention would fail."""
    require("checkpoint/staging.py", DTensor, "_spec")
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
        require("observe/memory_snapshot.py", memory, "_record_memory_history", "_dump_snapshot")
    if rings:
        require("kernels/attention_kernels.py", torch.ops.aten, *RING_KERNELS)
