"""Parts of a step in two variants each, for `gpu.py`: what a change of one part can gain.

Each lever is one row with the milliseconds of its variants, which are timed in turns.
gpu_verdicts.py compares them.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_contenders import OBJECTIVES, Cell, Place
from gpu_host import host_ms
from gpu_queue import Job, Row
from ours import learning, network, resident_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titan_dit.optim.ema import move_one_by_one, move_together
from titan_dit.parallel.ring_attention import joining
from titan_dit.rng import SampleRNG

Variants = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the levers that have no cell."""

    ring: tuple[int, int, int]
    """Heads, tokens of a rank and head dim."""
    width: int
    """Elements per parameter of the optimizer's, so that its launches dominate."""
    rows: int
    row_bytes: int
    """Bytes of the file that is read."""
    laps: int


FULL = Sizes((24, 4096, 128), 4096, 2048, 131_072, 3)
TINY = Sizes((2, 16, 8), 16, 32, 4096, 2)
READ_BATCH, READ_S = 16, 1.0
"""Rows of a batch that is read; no batch begins after so many seconds of a lap."""


def jobs(cell: Cell, place: Place, sizes: Sizes) -> list[Job]:
    """One job per lever; `cell`: the step they are parts of."""
    makers: dict[str, Callable[[Cell, Place, Sizes], Variants]] = {
        "ring joins": ring_joins,
        "EMA": averages,
        "optimizer": optimizers,
        "prepare": preparations,
        "token copies": token_copies,
    }

    def of_device(make: Callable[[Cell, Place, Sizes], Variants]) -> Callable[[], Row]:
        return lambda: timed(make(cell, place, sizes), place, sizes.laps)

    found = [
        Job(key={"lever": name}, estimate_s=4.0, take=of_device(make))
        for name, make in makers.items()
    ]
    reading = Job(key={"lever": "reading"}, estimate_s=4.0, take=lambda: reads(sizes))
    return [*found, reading]


def timed(variants: Variants, place: Place, laps: int) -> Row:
    """Milliseconds of each variant, on the device and until its call returns, in turns."""
    device_ms: dict[str, list[float]] = {name: [] for name in variants}
    returns_ms: dict[str, list[float]] = {name: [] for name in variants}
    for work in variants.values():
        place.meter.laps_ms(work, 2)
    for _ in range(laps):
        for name, work in variants.items():
            device_ms[name].append(place.meter.call_ms(work))
            returns_ms[name].append(host_ms(work, place.device))
    return {
        "ms": {name: round(statistics.median(x), 4) for name, x in device_ms.items()},
        "host_ms": {name: round(statistics.median(x), 4) for name, x in returns_ms.items()},
    }


def ring_joins(_: Cell, place: Place, sizes: Sizes) -> Variants:
    """Joining one block of a ring, forward and backward, eager and compiled."""
    heads, tokens, head_dim = sizes.ring
    size = 1, heads, tokens, head_dim
    kind = {"device": place.device, "dtype": torch.bfloat16}
    half = [torch.randn(size, **kind) for _ in range(4)]  # type: ignore[call-overload]
    exact, lse = half[0].float(), half[0][..., 0].float()
    arrived = torch.stack(half[:2]).float()

    @torch.no_grad()
    def join(compiled: bool) -> None:
        by = joining(compiled)
        by.merge(exact, lse, half[1], lse)
        by.add(exact, *half[1:], arrived)

    return {"eager": lambda: join(False), "compiled": lambda: join(True)}


def averages(cell: Cell, place: Place, _: Sizes) -> Variants:
    """EMA of all weights: one foreach lerp with tensor weights, or one step of fused SGD."""
    path, _learn = OBJECTIVES[cell.objective]
    shapes = [p.shape for p in network(cell.config, path).parameters()]
    weights = [torch.randn(shape, device=place.device) for shape in shapes]
    average = [weight.clone() for weight in weights]
    given = average, weights, 1e-3, torch.zeros((), device=place.device)
    return {
        "lerp": lambda: move_one_by_one(*given),
        "one call": lambda: move_together(*given),
    }


def optimizers(cell: Cell, place: Place, sizes: Sizes) -> Variants:
    """Fused AdamW of torch over as many parameters as the model has: DTensors, or local."""
    path, _ = OBJECTIVES[cell.objective]
    count = len(list(network(cell.config, path).parameters()))
    mesh = place.mesh.fsdp

    def parameters(sharded: bool) -> list[nn.Parameter]:
        tensors = [torch.randn(sizes.width, device=place.device) for _ in range(count)]
        if sharded:
            return [
                nn.Parameter(DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim)) for x in tensors
            ]
        return [nn.Parameter(x) for x in tensors]

    def step_of(sharded: bool) -> Callable[[], object]:
        mine = parameters(sharded)
        for parameter in mine:
            parameter.grad = parameter.detach().clone()
        return torch.optim.AdamW(mine, fused=True).step

    return {"DTensor": step_of(True), "local": step_of(False)}


def preparations(cell: Cell, place: Place, _: Sizes) -> Variants:
    """The objective's `prepare`: noise, timesteps, inputs and targets of a batch."""
    path, _learn = OBJECTIVES[cell.objective]
    objective = learning(cell.config, path)
    data = resident_batch(cell.config, cell.batch, place.device)

    def prepare() -> object:
        return objective.prepare(data, SampleRNG(0, data.sample_numbers))

    if place.device.type != "cuda":
        return {"eager": prepare}  # To trace the random numbers takes 10 s there.
    return {"eager": prepare, "compiled": torch.compile(prepare)}


def token_copies(cell: Cell, place: Place, _: Sizes) -> Variants:
    """Copies of a gather over 2 tp ranks besides its message, with tokens in dim 1 or dim 0.

    In dim 1 the ranks' parts arrive one after the other and are joined by a copy.
    """
    tokens, _width = cell.config.token_shape
    hidden, *_rest = cell.config.shape
    size = 2 * cell.batch, tokens // 2, hidden
    arrived = torch.randn(size, device=place.device, dtype=torch.bfloat16)
    return {
        "dim 1": lambda: torch.cat(arrived.chunk(2), 1),
        "dim 0": lambda: arrived.view(-1, hidden),
    }


def reads(sizes: Sizes) -> Row:
    """Milliseconds to read a file's rows in random order from the disk: mapped, or as runs do.

    The file is in the current folder: in memory, as /tmp can be, both would read no disk.
    """
    order = torch.randperm(sizes.rows, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[float]] = {"mapped": [], "preadv": []}
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        block = os.urandom(sizes.row_bytes)
        for _ in range(sizes.rows):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        # Twice in turns: the shorter of two laps.
        for _ in range(2):
            for name, opened in (("mapped", by_mapping), ("preadv", by_shard_rows)):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                with opened(Path(file.name), sizes.row_bytes) as read:
                    found[name].append(row_ms(read, order))
    return {"ms": {name: round(sizes.rows * min(laps), 3) for name, laps in found.items()}}


def row_ms(read: Callable[[Tensor], None], order: Tensor) -> float:
    """Milliseconds per row, of as many batches as READ_S allows: pages one by one take minutes."""
    began = time.perf_counter()
    for end in range(READ_BATCH, len(order) + 1, READ_BATCH):
        read(order[end - READ_BATCH : end])
        if time.perf_counter() - began > READ_S:
            break
    return 1e3 * (time.perf_counter() - began) / end


@contextmanager
def by_mapping(path: Path, row_bytes: int) -> Iterator[Callable[[Tensor], None]]:
    """Copies rows out of a mapping for random access (MADV_RANDOM: no read-ahead)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)

        def read(rows: Tensor) -> None:
            for row in rows.tolist():
                mapped[row * row_bytes : (row + 1) * row_bytes]

        yield read


@contextmanager
def by_shard_rows(path: Path, row_bytes: int) -> Iterator[Callable[[Tensor], None]]:
    """The reader of runs: the rows of a batch are requested before the first is waited for."""
    import numpy as np

    from titan_dit.data.shards import RowFile, ShardRows

    status = path.stat()
    reader = ShardRows([RowFile(path, 0, status.st_size, status.st_mtime_ns)], row_bytes)
    out = memoryview(bytearray(READ_BATCH * row_bytes))
    yield lambda rows: reader.read(np.zeros_like(rows.numpy()), rows.numpy(), out)


def table(rows: list[Row]) -> list[Row]:
    """Printed table: a line per lever and variant."""
    lines = []
    for row in rows:
        if "ms" not in row:
            lines.append({"lever": row["lever"], "variant": row["result"].partition(". ")[0]})
        for name, ms in row.get("ms", {}).items():
            host = row.get("host_ms", {}).get(name, "-")
            lines.append({"lever": row["lever"], "variant": name, "ms": ms, "host ms": host})
    return [{"lever": "", "variant": "", "ms": "-", "host ms": "-"} | line for line in lines]


def by_name(rows: list[Row]) -> dict[str, Row]:
    """Measured levers by name."""
    return {row["lever"]: row for row in rows if "ms" in row}


def ratio(row: Row | None, slow: str, fast: str, which: str = "ms") -> float | None:
    """Speed of the second variant over the first; None if one is missing."""
    found = (row or {}).get(which, {})
    if not found.get(slow) or not found.get(fast):
        return None
    return float(found[slow] / found[fast])
