"""torch's CUDA allocator: segments that grow, unless the user or the run asks for something else.

Ordinary segments are as large as their first request. Where sizes change (other samples, a partial
batch, drawing), the gaps between them cannot be joined: memory is reserved that no request fits
(docs.pytorch.org/docs/stable/notes/cuda.html, "Optimizing memory usage").

torch 2.11 to 2.15 read these variables when CUDA first allocates, not on import.
"""

from __future__ import annotations

from collections.abc import MutableMapping

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both names are read by every supported torch; the second one is the older."""
REGISTRATION = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""Buffers registered with NCCL: torch switches it off if segments can grow."""
EXPANDABLE = "expandable_segments:True"


def expand_segments(environment: MutableMapping[str, str], *, cuda_graphs: bool) -> None:
    """Set expandable segments in `environment`; call before CUDA is used.

    Not if the user has set the allocator or NCCL's registration, and not with CUDA graphs: torch
    has excluded and readmitted graphs' private pools, and a capture beside collectives has hung
    with expandable segments (pytorch/torchtitan#3306).
    """
    registers = environment.get(REGISTRATION, "").lower() in ("1", "y", "yes", "t", "true")
    if cuda_graphs or registers or any(environment.get(name) for name in SETTINGS):
        return
    environment[SETTINGS[0]] = EXPANDABLE
