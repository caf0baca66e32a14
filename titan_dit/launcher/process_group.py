"""The process group, the device, and what one rank knows of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_dit.config.section import UserError
from titan_dit.launcher.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the ranks that were started."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run: prints, draws, commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, on every rank, in the order of ranks. For small objects."""
        return Ranks().gather(value)


def started_ranks() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def start(device_type: str | None = None) -> Iterator[World]:
    """Join the other ranks. Without torchrun's environment: one rank, by itself."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device_type)
    if device_type == "cuda":
        local, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= visible:
            raise UserError(f"NGPU: rank {local} of this node has no GPU. Set NGPU = {visible}.")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    # gloo beside NCCL: checkpoints and small objects talk over the CPU.
    backend = "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield World(dist.get_rank(), dist.get_world_size(), device)
    # Not in a `finally`: after an error it would wait for ranks that wait for this one.
    dist.destroy_process_group()


def set_deterministic() -> None:
    """Only kernels that repeat their bits; an operation without one raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
