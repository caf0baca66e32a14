"""CPU time that planning a checkpoint takes from training, simulated for many ranks in one process.

`python benchmarks/checkpoint.py --planning 1024`. The state is that of a DiT with AdamW and one
EMA, sharded by FSDP2 over all ranks. Rank 0's part is run as in a save, with the objects of all
ranks; the other ranks' are made from its own. Communication is left out, pickling is not. All of it
is Python or pickle, which hold Python's lock (GIL); the planning process is counted apart.

before: what torch's `state_dict_saver.save` does in every save, by the same functions.
"""

from __future__ import annotations

import gc
import pickle
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_dit.checkpoint.planning import LocalPlan, Plans, plan_locally
from titan_dit.checkpoint.torch_files import Writer
from titan_dit.models.dit_config import DiTConfig
from titan_dit.ranks.process_group import Ranks

T = TypeVar("T")

NUMBERS_BYTES = 400
"""Minimum bytes of a shard in its file. Only that shards differ in it matters here."""


class Clock:
    """CPU seconds of this thread by part."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count a block as `name`, and not as the part around it."""
        began, inner = time.thread_time(), self.parts.total()
        yield
        self.parts[name] += time.thread_time() - began - (self.parts.total() - inner)

    def run(self, name: str, action: Callable[[], T]) -> T:
        """Count an action."""
        with self.part(name):
            return action()


class SimulatedRanks(Ranks):
    """Rank 0 of many: the others send what it sends, or `parts`."""

    def __init__(self, count: int, clock: Clock) -> None:
        super().__init__()
        self.count, self.clock = count, clock
        self.parts: list[bytes] = []
        """Result of `gather_bytes`."""
        self.scattered: list[bytes] = []

    def gather(self, value: T) -> list[T]:
        """`value` from every rank."""
        with self.clock.part("digests of all ranks"):
            data = pickle.dumps(value)
            return [pickle.loads(data) for _ in range(self.count)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """A copy of `parts`."""
        with self.clock.part("gather"):
            return [bytes(bytearray(part)) for part in self.parts]

    def scatter_bytes(self, parts: list[bytes]) -> bytes:
        """Rank 0's part."""
        with self.clock.part("scatter"):
            self.scattered = [bytes(bytearray(part)) for part in parts]
            return parts[0]


def state(size: str, ranks: int) -> dict[str, Any]:
    """Rank 0's shards of a model, AdamW's moments and one EMA."""
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    config = DiTConfig(size=size, latent_size=32, in_channels=4, num_classes=1000)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in config.build(4).named_parameters()}

    def shard(shape: torch.Size) -> DTensor:
        local = torch.empty(-(-shape[0] // ranks), *shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def shards() -> dict[str, DTensor]:
        return {name: shard(shape) for name, shape in shapes.items()}

    moments = {
        name: {"step": torch.zeros(()), "exp_avg": shard(shape), "exp_avg_sq": shard(shape)}
        for name, shape in shapes.items()
    }
    return {"model": shards(), "optimizer": moments, "ema": {"0.9999": shards()}}


def plan_of(first: SavePlan, rank: int, ranks: int) -> SavePlan:
    """Another rank's local plan, from rank 0's."""
    return replace(first, items=[item_of(item, rank, ranks) for item in first.items])


def item_of(item: WriteItem, rank: int, ranks: int) -> WriteItem:
    """An item of `plan_of`."""
    data = item.tensor_data
    if item.type != WriteItemType.SHARD or data is None:
        return item
    rows, most = data.size[0], -(-data.size[0] // ranks)
    begin = min(rank * most, rows)
    offsets = torch.Size([begin, *[0] * (len(data.size) - 1)])
    sizes = torch.Size([min(most, rows - begin), *data.size[1:]])
    chunk = ChunkStorageMetadata(offsets, sizes)
    return replace(
        item,
        index=MetadataIndex(item.index.fqn, offsets),
        tensor_data=replace(data, chunk=chunk),
    )


def results_of(plan: SavePlan, rank: int) -> list[WriteResult]:
    """The result of a rank that has written its file."""
    file, size = f"__{rank}_0.distcp", NUMBERS_BYTES
    places = (_StorageInfo(file, i * size, size) for i in range(len(plan.items)))
    return [
        WriteResult(item.index, size, place) for item, place in zip(plan.items, places, strict=True)
    ]


def before(tensors: dict[str, Any], plans: list[bytes], folder: Path) -> tuple[Clock, Clock]:
    """A save by torch: rank 0, and another rank."""
    clock, other = Clock(), Clock()
    writer = FileSystemWriter(folder)
    planner = DefaultSavePlanner()

    def local_plan() -> SavePlan:
        planner.set_up_planner(tensors, is_coordinator=True)
        return planner.create_local_plan()

    local = clock.run("local plan", local_plan)
    other.parts["local plan"] = clock.parts["local plan"]
    own = other.run("gather", lambda: pickle.dumps(local))
    gathered = clock.run("gather", lambda: [pickle.loads(plan) for plan in plans])
    chosen, metadata = clock.run("global plan", partial(planner.create_global_plan, gathered))
    sent = clock.run("scatter", lambda: [pickle.dumps(plan) for plan in chosen])
    other.run("scatter", lambda: pickle.loads(own))
    del sent, gathered
    results = [pickle.dumps(results_of(plan, rank)) for rank, plan in enumerate(chosen)]
    gathered_results = clock.run("gather", lambda: [pickle.loads(part) for part in results])
    clock.run("metadata", lambda: writer.finish(metadata, gathered_results))
    sent_metadata = clock.run("broadcast of the metadata", lambda: pickle.dumps(metadata))
    other.run("broadcast of the metadata", lambda: pickle.loads(sent_metadata))
    return clock, other


def save(
    tensors: dict[str, Any], plans: Plans, ranks: SimulatedRanks, sent: list[bytes], folder: Path
) -> None:
    """A save by `checkpoint.write`, without the shards' bytes; `sent` are the local plans."""
    clock, ranks.parts = ranks.clock, sent
    with clock.part("local plan"):
        local, chosen = plans.plan(tensors, ranks)
    if ranks.scattered:
        choices = [pickle.loads(part) for part in ranks.scattered]
        pairs = enumerate(zip(sent, choices, strict=True))
        ranks.parts = [
            pickle.dumps(results_of(LocalPlan(local.planner, pickle.loads(p), b"").chosen(c), rank))
            for rank, (p, c) in pairs
        ]
        ranks.scattered = []
    results = results_of(chosen, 0)
    with clock.part("local plan"):
        digests = ranks.run_on_all(lambda: plans.digests(results))
    with clock.part("metadata"):
        for name, data in plans.describe(local, results, digests, ranks).items():
            Writer(folder).write_whole(name, data)


def simulate(size: str, count: int) -> list[dict[str, Any]]:
    """Rows of the table: CPU seconds by part."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    tensors = state(size, count)
    first = plan_locally(tensors, True).plan
    sent = [pickle.dumps(plan_of(first, rank, count)) for rank in range(count)]
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, no_collections():
        folder, plans = Path(name), Plans()
        for what in ("first save", "later saves", "later saves"):
            ranks = SimulatedRanks(count, Clock())
            used = children_seconds()
            save(tensors, plans, ranks, sent, folder)
            rows[f"{what}, rank 0"] = dict(ranks.clock.parts)
            if used := children_seconds() - used:
                print(f"{what}: the planning process takes {used:.1f} s beside it", flush=True)
        clock, other = before(tensors, sent, folder)
        rows["before: every save, rank 0"] = dict(clock.parts)
        rows["before: every save, any other rank"] = dict(other.parts)
    dist.destroy_process_group()
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    return [
        {
            f"{size}, {count:,} ranks, CPU s": what,
            **{part: f"{parts.get(part, 0):.2f}" for part in names},
            "all": f"{sum(parts.values()):.2f}",
        }
        for what, parts in rows.items()
    ]


@contextmanager
def no_collections() -> Iterator[None]:
    """Switch Python's garbage collector off, as training does."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def children_seconds() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
