"""Ping-pong between two ranks of a host, by each transport: `python benchmarks/transports.py`.

A message goes to the other rank and another one comes back, as streams and gradients do: posted,
sent, waited for, taken. Contenders take turns within a run. "gloo" is isend and irecv alone,
without credits. CPU is that of all threads of both ranks. `--read` also reads each message once.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import finish

from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.pipeline.schedules.schedule import Action, Kind
from titan_dit.pipeline.transports.base import Transport
from titan_dit.pipeline.transports.choice import open_transport

SIZES = (1 << 16, 1 << 20, 1 << 23)
"""Bytes of a message."""
TRIPS_BYTES = 1 << 26
"""A round sends about as many bytes, and at least 8 round trips."""
CONTENDERS = ("gloo", "process_group", "shared_memory", *(["nixl"] if find_spec("nixl") else []))
STAGE_RANKS = (0, 1)
Trip = Callable[..., None]


def cpu_s() -> float:
    """CPU seconds of this process, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def by_transport(transport: Transport, rank: int, given: torch.Tensor, reads: bool) -> Trip:
    """A round trip: rank 0 sends a stream, rank 1 answers with a gradient.

    As in a pipeline, a rank posts its next message when it has sent its last one.
    """
    kind, stage = (Kind.FORWARD, 0) if rank else (Kind.BACKWARD_INPUT, 1)
    numbers = count()

    def posted() -> Action:
        message = Action(kind, stage, next(numbers))
        transport.post(message)
        return message

    coming: deque[Action] = deque()

    def receive() -> int:
        message = coming.popleft()
        while message not in transport.arrived():
            transport.wait()
        (tensor,) = transport.take(message)
        look(tensor, reads)
        return message.microbatch

    def trip(*, is_last: bool) -> None:
        if not coming:
            coming.append(posted())
        if rank:
            transport.send(Action(Kind.BACKWARD_INPUT, 1, receive()), (given,))
        else:
            transport.send(Action(Kind.FORWARD, 0, coming[0].microbatch), (given,))
        if not is_last:
            coming.append(posted())
        if not rank:
            receive()

    return trip


def by_gloo(rank: int, given: torch.Tensor, reads: bool) -> Trip:
    """A round trip without a transport, in buffers that are allocated once."""
    buffer = torch.empty_like(given)

    def trip(*, is_last: bool) -> None:
        if rank == 0:
            receiving = dist.irecv(buffer, 1)
            sending = dist.isend(given, 1)
        else:
            dist.recv(buffer, 0)
            look(buffer, reads)
            sending = dist.isend(given, 0)
        if rank == 0:
            receiving.wait()
            look(buffer, reads)
        sending.wait()

    return trip


def look(tensor: torch.Tensor, whole: bool) -> None:
    """Read one element, or all."""
    (tensor.sum() if whole else tensor[-1]).item()


def round_of(trip: Trip, trips: int) -> tuple[float, float]:
    """Seconds and CPU seconds of this rank, per message."""
    dist.barrier()
    start, cpu = time.perf_counter(), cpu_s()
    for number in range(trips):
        trip(is_last=number == trips - 1)
    return (time.perf_counter() - start) / trips / 2, (cpu_s() - cpu) / trips / 2


def rank_main(rank: int, port: int, sizes: Sequence[int], rounds: int, reads: bool) -> None:
    """One of the two ranks."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = Mesh(AxisSizes(pp=2), "cpu")
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for size in sizes:
        like = (torch.empty(size // 4, device="meta"),)
        given = torch.rand(size // 4)
        trips: dict[str, Trip] = {"gloo": by_gloo(rank, given, reads)}
        opened = []
        for name in CONTENDERS[1:]:
            device = torch.device("cpu")
            transport, _ = open_transport(mesh.p2p, STAGE_RANKS, like, device, name, "")
            opened.append(transport)
            trips[name] = by_transport(transport, rank, given, reads)
        num_trips = max(8, TRIPS_BYTES // size // 2)
        for number in range(rounds + 1):
            for name, trip in trips.items():
                measured = round_of(trip, num_trips)
                for transport in opened:
                    transport.flush()
                if number:  # The first round connects and maps.
                    found.setdefault((size, name), []).append(measured)
        dist.barrier()
        for transport in opened:
            transport.close()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, found)
    if rank == 0:
        torch.save(every, os.environ["TRANSPORTS_RESULT"])
    dist.barrier()
    dist.destroy_process_group()


def measure(sizes: Sequence[int], rounds: int, reads: bool, result: str) -> list[dict[str, Any]]:
    """Rows of a run of two ranks; `result`: a file for their times."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["TRANSPORTS_RESULT"] = result
    arguments = (port, sizes, rounds, reads)
    mp.start_processes(rank_main, arguments, nprocs=2, start_method="spawn")
    first, second = torch.load(result, weights_only=False)
    rows = []
    for size in sizes:
        seconds = {n: statistics.median(s for s, _ in first[size, n]) for n in CONTENDERS}
        for name in CONTENDERS:
            pairs = zip(first[size, name], second[size, name], strict=True)
            cpu = statistics.median(a + b for (_, a), (_, b) in pairs)
            rows.append(
                {
                    "message": f"{size >> 10:,} KiB",
                    "by": name,
                    "MB/s": round(size / seconds[name] / 1e6),
                    "us": round(seconds[name] * 1e6, 1),
                    "CPU us": round(cpu * 1e6, 1),
                    "MB/s, over gloo": round(seconds["gloo"] / seconds[name], 2),
                }
            )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--read", action="store_true", help="also read each message once")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(SIZES, args.rounds, args.read, str(Path(folder) / "times.pt"))
    finish("transports", rows, args.out, rounds=args.rounds, read=args.read)


if __name__ == "__main__":
    main()
