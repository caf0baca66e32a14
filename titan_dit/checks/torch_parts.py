"""Private parts of torch that a run needs long after its start: missing ones are refused at once.

Other missing parts show in the imports or in the first step. docs/torch-versions.md lists all.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from titan_dit.launcher.torch_range import require


def check(profiles_memory: bool) -> None:
    """Raise UserError if a checkpoint or a memory snapshot could not be written."""
    require("checkpoint/staging.py", DTensor, "_spec")
    require("checkpoint/torch_files.py", FileSystem, "create_stream", "rename", "init_path")
    if profiles_memory:
        memory = torch.cuda.memory
        require("observe/memory_snapshot.py", memory, "_record_memory_history", "_dump_snapshot")
