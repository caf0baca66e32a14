"""Async tensor parallelism: the compiler splits a matmul and its collective to overlap the parts.

Only this file sets torch's private switches for it. CUDA only: it needs symmetric memory.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh


def apply(mesh: DeviceMesh | None) -> None:
    """Enable async TP for compiled blocks over the 1D tp `mesh`; None disables async TP."""
    if mesh is None:
        if "torch._inductor.config" in sys.modules:
            sys.modules["torch._inductor.config"]._micro_pipeline_tp = False  # type: ignore[attr-defined]
        return
    import torch._inductor.config as inductor

    inductor._micro_pipeline_tp = True
    if not torch.cuda.is_available():
        return  # A dry run without devices.
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        # From 2.12 on groups register themselves; 2.11 needs the call.
        warnings.simplefilter("ignore")
        enable_symm_mem_for_group(mesh.get_group().group_name)
