"""The process group and the device of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from titan_dit.config.section import UserError
from titan_dit.launcher import groups, open_files
from titan_dit.launcher.ranks import Ranks
from titan_dit.system.launched_as import LaunchedAs

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This rank, the world size and the device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints, draws and commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """All-gather of a small object, in rank order."""
        return Ranks().gather(value)


def started_ranks() -> int:
    """World size set by torchrun; 1 without it."""
    return LaunchedAs.here().world_size


@contextmanager
def start(device_type: str | None = None) -> Iterator[World]:
    """Initialise the process group; one rank without torchrun's environment."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device_type)
    if device_type == "cuda":
        local, visible = LaunchedAs.here().local_rank, torch.cuda.device_count()
        if local >= visible:
            raise UserError(f"NGPU: local rank {local} has no GPU. Set NGPU = {visible}.")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    # gloo for CPU tensors: checkpoints and small objects.
    backend = "cuda:nccl,cpu:gloo" if device_type == "cuda" else "gloo"
    groups.connect_lazily()
    here = LaunchedAs.here()
    if here.is_rank:
        rank, size = here.rank, here.world_size
        need = open_files.needed(rank, size, device_type)
        open_files.raise_limit(need, f"rank {rank} of {size:,}")
        with groups.opening("the default process group"):
            groups.find_store(here.address)
            dist.init_process_group(backend, timeout=timedelta(seconds=groups.STARTING_S))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield World(dist.get_rank(), dist.get_world_size(), device)
    # Not in a `finally`: after an error it would deadlock with ranks that wait for this one.
    dist.destroy_process_group()


def set_deterministic() -> None:
    """Use deterministic kernels only; an operation without one raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
