"""Sockets, messages and waits of a run of 8, 64, 1,024 and 10,000 GPUs, per part (docs/scale.md).

Sockets are counted in small worlds and extrapolated. Groups are those of the Mesh on torch's fake
backend. The rendezvous' traffic is computed from the size of its state.
"""

from __future__ import annotations

import argparse
import base64
import pickle
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from report import finish, table
from sockets import Counts, count, law
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from titan_dit.commands import train
from titan_dit.dry_run.fake_step import fake_world
from titan_dit.launcher.store import cache_s
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.pipeline.schedules.placement import pipeline_order, rank_of_stage, stages_per_rank
from titan_dit.pipeline.schedules.schedule import channels, neighbours
from titan_dit.ranks import open_files, process_group

RANKS_PER_NODE = 8
LAYOUTS = {
    8: AxisSizes(dp_shard=8),
    64: AxisSizes(dp_shard=8, tp=8),
    1024: AxisSizes(pp=4, dp_replicate=4, dp_shard=8, tp=8),
    10_000: AxisSizes(pp=4, dp_replicate=25, dp_shard=25, tp=4),
}
WORLDS = tuple(LAYOUTS)
PIPELINES = [
    ("1f1b", 4, 1),
    ("1f1b", 16, 1),
    ("interleaved_1f1b", 4, 2),
    ("interleaved_1f1b", 16, 4),
    ("zbv_zero_bubble", 16, 1),
]
MICROBATCHES = 16
Row = dict[str, Any]


def group_row(sizes: AxisSizes, num_ranks: int) -> Row:
    """The groups of a rank in the middle, its pipeline included, and the seconds to open them."""
    with fake_world(num_ranks // 2, num_ranks):
        start = time.perf_counter()
        mesh = Mesh(sizes, "cpu")
        took = time.perf_counter() - start
        mesh.p2p.open(neighbours(range(sizes.pp)))
        several = [group.size() for group in process_group.own_groups() if group.size() > 1]
        return {
            "ranks": f"{num_ranks:,}",
            "layout": str(sizes),
            "groups of a rank": len(process_group.own_groups()) + 1,
            "with several ranks": len(several) + 1,
            "s to open the mesh": f"{took:.2f}",
        }


def socket_rows(name: str, counts: dict[int, Counts]) -> list[Row]:
    """One row per part: counted, then extrapolated from the two largest worlds."""
    *_, small, large = sorted(counts)
    rows = []
    for part in counts[large]:
        counted = {f"{n}": counts[n][part] for n in sorted(counts)}
        at = law((small, counts[small][part]), (large, counts[large][part]))
        further = {f"{n:,}": f"{at(n):,}" for n in WORLDS if n > large}
        rows.append({"rank": name, "open after": part} | counted | further)
    return rows


def limit_row(num_ranks: int) -> Row:
    """Open files that a rank asks for before it starts."""
    first, other = (open_files.needed(rank, num_ranks, "cuda") for rank in (0, 1))
    return {"ranks": f"{num_ranks:,}", "rank 0": f"{first:,}", "another": f"{other:,}"}


@dataclass(frozen=True)
class Timing:
    """The rendezvous' timing for a number of nodes."""

    interval_s: int
    attempts: int

    @classmethod
    def of(cls, nodes: int) -> Timing:
        """Timing as `titan_dit train` sets it."""
        pairs = (pair.split("=") for pair in train.rendezvous_timing(str(nodes)).split(","))
        found = {key: int(value) for key, value in pairs}
        return cls(found["keep_alive_interval"], found["keep_alive_max_attempt"])


def state_bytes(nodes: int) -> int:
    """Size of the rendezvous' state in the store, with the host names of a large cluster."""
    state = dynamic_rendezvous._RendezvousState()
    for rank in range(nodes):
        name = f"node{rank:05d}.cluster.example.com"
        node = dynamic_rendezvous._NodeDesc(name, 100_000 + rank, 0)
        state.participants[node] = rank
        state.last_heartbeats[node] = datetime.now(UTC)
    return len(base64.b64encode(pickle.dumps(state)))


def rendezvous_row(num_ranks: int) -> Row:
    """Heartbeats and reads of all nodes, which go to one host."""
    nodes = max(1, num_ranks // RANKS_PER_NODE)
    timing, size = Timing.of(nodes), state_bytes(nodes)
    reads = nodes / cache_s(timing.interval_s)
    beats = nodes / timing.interval_s
    # compare_set sends the state and gets it back; the first one usually finds a newer state.
    rate = size * (reads + 4 * beats)
    return {
        "nodes": f"{nodes:,}",
        "a node is lost after": f"{timing.interval_s * timing.attempts} s",
        "state": f"{size / 1024:,.1f} KiB",
        "heartbeats/s": f"{beats:.1f}",
        "reads/s": f"{reads:.1f}",
        "MB/s at the host": f"{rate / 1e6:,.2f}",
    }


def stop_row(num_ranks: int) -> Row:
    """The stop flag of a step: as a gloo all-reduce of its own (a ring), and as it is sent."""
    with fake_world(num_ranks - 1, num_ranks):
        alone = reduced_bytes(None)
        both = reduced_bytes(torch.zeros((), dtype=torch.float64))
    return {
        "ranks": f"{num_ranks:,}",
        "own all-reduce, hops": f"{2 * (num_ranks - 1):,}",
        "beside the norm, messages": len(both) - len(alone),
        "bytes more": sum(both) - sum(alone),
    }


def reduced_bytes(flag: torch.Tensor | None) -> list[int]:
    """Bytes of each all-reduce of a gradient norm."""
    sizes: list[int] = []
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    def reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        sizes.append(tensor.nbytes)

    with mock.patch.object(dist, "all_reduce", reduce):
        clip_norm([parameter], 1.0, flag)
    return sizes


def pipeline_row(schedule: str, num_ranks: int, virtual_stages: int) -> Row:
    """The groups and messages of the busiest pipeline rank, per step of 16 microbatches."""
    sizes = {"num_ranks": num_ranks, "virtual_stages": virtual_stages}
    order = pipeline_order(schedule, num_microbatches=MICROBATCHES, **sizes)
    count = num_ranks * stages_per_rank(schedule, virtual_stages)
    lines = channels(order, [rank_of_stage(schedule, stage, num_ranks) for stage in range(count)])
    ranks = range(num_ranks)
    return {
        "schedule": schedule,
        "pp": num_ranks,
        "stages of a rank": count // num_ranks,
        "groups of a rank": max(sum(rank in pair for pair in lines) for rank in ranks),
        "messages that a rank sends": max(
            sum(len(line) for (source, _), line in lines.items() if source == rank)
            for rank in ranks
        ),
    }


def main() -> None:
    """Count, compute, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--eager", action="store_true", help="count without lazy connections")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    counted = {n: count(n, lazy=not args.eager) for n in args.worlds}
    sockets = socket_rows("0", {n: first for n, (first, _) in counted.items()})
    sockets += socket_rows("another", {n: other for n, (_, other) in counted.items()})
    parts = {
        "Groups": [group_row(sizes, n) for n, sizes in LAYOUTS.items()],
        "Sockets": sockets,
        "Open files": [limit_row(n) for n in WORLDS],
        "Stop flag": [stop_row(n) for n in WORLDS],
        "Rendezvous": [rendezvous_row(n) for n in WORLDS],
        "Pipelines": [pipeline_row(*case) for case in PIPELINES],
    }
    for title, rows in parts.items():
        print(f"## {title}\n\n{table(rows)}\n")
    rows = [{"part": title, "rows": len(rows)} for title, rows in parts.items()]
    finish("scale", rows, args.out, parts=parts)


if __name__ == "__main__":
    main()
