"""Sockets of a rank after each part of a run, counted in small worlds on this machine (gloo)."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.ranks import process_group
from titan_dit.ranks.process_group import World
from titan_dit.ranks.stop_request import StopRequest

FILES = Path("/proc/self/fd")
Counts = dict[str, int]
"""Part -> sockets that are open after it."""


def num_sockets() -> int:
    """Open sockets of this process."""
    links = (str(file.readlink()) for file in FILES.iterdir() if file.is_symlink())
    return sum(link.startswith("socket:") for link in links)


def parts_of_a_run(world: World, folder: Path) -> Counts:
    """The sockets that every rank of a run opens, in a run's order."""
    start = num_sockets()
    mesh = Mesh(AxisSizes(dp_replicate=2, dp_shard=world.size // 2), "cpu")
    model = nn.Linear(world.size, world.size)
    fully_shard(model, mesh=mesh.fsdp)
    model(torch.ones(1, world.size)).sum().backward()
    with StopRequest(world.size, world.device) as stop:
        clip_norm(model.parameters(), 1.0, stop.flag())
        stop.agreed()
    world.gather(None)
    mesh.sum_loss(torch.zeros(2))
    step = num_sockets()
    checkpoints = Checkpoints(folder)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    checkpoints.save(1, {"model": tensors}, {"step": 1})
    checkpoints.wait()
    return {"start": start, "first step": step, "first checkpoint": num_sockets()}


def rank_main(rank: int, size: int, variables: dict[str, str], folder: str) -> None:
    """Count on one rank; rank 0 writes the counts of all."""
    os.environ |= variables | {"RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    with process_group.start("cpu") as world:
        counts = world.gather(parts_of_a_run(world, Path(folder) / "checkpoints"))
        if world.is_first:
            (Path(folder) / "counts.json").write_text(json.dumps(counts))
        world.gather(None)
        os._exit(0)


def count(size: int, *, lazy: bool = True) -> tuple[Counts, Counts]:
    """Counts of rank 0, and the largest of the other ranks, in a world of `size` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"TORCH_GLOO_LAZY_INIT": str(int(lazy))}
    # The server imports this module once for all ranks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sockets"])
    with tempfile.TemporaryDirectory() as folder:
        given = size, variables, folder
        ranks = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            if process.exitcode:
                raise SystemExit(f"A rank of {size} ended with exit code {process.exitcode}.")
        found: list[Counts] = json.loads((Path(folder) / "counts.json").read_text())
    first, *others = found
    return first, {part: max(counts[part] for counts in others) for part in first}


def law(small: tuple[int, int], large: tuple[int, int]) -> Any:
    """The count at N ranks as a function, from (N, count) at two small N.

    Counts grow by a socket per rank or stay; the rest is a binomial tree: one per doubling.
    """
    (n0, c0), (n1, c1) = small, large
    per_rank = round((c1 - c0) / (n1 - n0))
    doublings = math.log2(n1 / n0)
    per_doubling = (c1 - c0 - per_rank * (n1 - n0)) / doublings
    return lambda n: round(c1 + per_rank * (n - n1) + per_doubling * math.log2(n / n1))
