"""Which rank this process was launched as: torchrun's environment variables, read here alone."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchedAs:
    """A process's place among the ranks; without torchrun one rank of one."""

    is_rank: bool
    """True if torchrun, or a launcher like it, started this process as a rank."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    """Host of rank 0, where all ranks meet."""
    port: str

    @classmethod
    def here(cls) -> LaunchedAs:
        """This process. Not cached: a forked rank gets its variables after its start."""
        return cls(
            is_rank=bool(os.environ.get("RANK")),
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            address=os.environ.get("MASTER_ADDR", "localhost"),
            port=os.environ.get("MASTER_PORT", "?"),
        )

    @property
    def is_first(self) -> bool:
        """True for rank 0, which prints and writes for all, and for a process that is no rank."""
        return self.rank == 0


def number(name: str, default: int) -> int:
    """A variable's whole number; unset and empty are `default`. Ends the process if it is none."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        sys.exit(f"error: {name}={text} is no rank or number of ranks. Unset it: torchrun sets it.")
    return int(text)
