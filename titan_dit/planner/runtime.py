"""How a trainer runs a layout: what it overlaps, and in which formats it sums and updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The defaults are this project's; others describe the trainers of public tables."""

    is_fused: bool | None = None
    """Elementwise operators are fused; None: with [compile]."""
    sharding: Literal["fsdp", "gradients", "replicas"] = "fsdp"
    """Of dp_shard: FSDP; FSDP that keeps parameters gathered (SHARD_GRAD_OP); plain replicas,
    whose gradients are all-reduced."""
    overlaps_data: bool = True
    """Gathers and reductions over data-parallel ranks hide behind computing."""
    reduces_each_microbatch: bool = False
    """Gradients are reduced over data-parallel ranks in every microbatch, not in the last one."""
    gather_bytes: int | None = None
    """Per parameter of an all-gather; None: [precision] dtype."""
    gradient_bytes: int = 4
    """Per gradient of a reduction over data-parallel ranks."""
    update_bytes: float | None = None
    """Read and written per parameter by clipping, optimizer and casts; None: as counted."""
    state_bytes: float | None = None
    """Held per parameter: weights, gradients, optimizer; None: as counted."""
    blocking_messages: bool = False
    """A pipeline rank computes nothing while it sends. What it receives meanwhile costs no more."""
    scattered_messages: bool = False
    """Stage messages are cut over the tp ranks and gathered inside the node."""
    attention_dropout: bool = False
    """Dropout of unfused attention's probabilities: one more mask read and written."""


OURS = Runtime()
