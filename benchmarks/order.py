"""Cost of the sample order, of held-out rows and of labels: `python benchmarks/order.py`.

Measures what `[job] data_order` costs a rank: the rows of a batch at any size of the dataset, and
CPU time and memory of the sorted permutation, of the held-out rows, and of opening shards. Memory
is the growth of the peak (or, of labels, of the anonymous memory after opening), in a process of
its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import finish
from torch import Tensor

from titan_dit.data.base import DataFacts, Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.data.latents import write_shards
from titan_dit.data.order import EpochOrder
from titan_dit.data.sections import Latents

BATCHES = (256, 1024)
PART = 1 << 16


class Labelled(Source):
    """Rows of 1,000 classes, in parts as shards have them."""

    def __init__(self, count: int) -> None:
        self.facts = DataFacts(count=count)

    def groups(self) -> Tensor:
        """The class of every row."""
        return torch.arange(len(self)) % 1000

    def group_parts(self) -> Iterator[Tensor]:
        """The groups, shard by shard."""
        part = torch.arange(PART) % 1000
        for first in range(0, len(self), PART):
            yield part[: len(self) - first]


def batch_us(order: EpochOrder, batch: int, turns: int = 200) -> float:
    """Median microseconds of the rows of a batch, in the middle of an epoch."""
    times, first = [], order.num_rows // 2
    for turn in range(turns + 1):
        numbers = range(first + turn * batch, first + (turn + 1) * batch)
        began = time.perf_counter()
        order.rows(numbers)
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[1:])


def status_bytes(key: str) -> int:
    """A line of /proc/self/status."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def cost(work: Callable[[], Any], kind: str) -> tuple[float, float]:
    """(CPU seconds, bytes) of a function in a forked process."""

    def measure(send: Any) -> None:
        torch.set_num_threads(1)
        Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
        before, began = status_bytes(kind), time.process_time()
        kept = work()
        send.send((time.process_time() - began, status_bytes(kind) - before))
        del kept

    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(send,))
    process.start()
    found: tuple[float, float] = receive.recv()
    process.join()
    return found


def row_of(what: str, count: int, found: tuple[float, float]) -> dict[str, str]:
    """A row of the table: totals, and per row of the dataset."""
    seconds, size = found
    return {
        "what": what,
        "rows": f"{count:,}",
        "CPU s": f"{seconds:.2f}",
        "ns/row": f"{seconds / count * 1e9:.1f}",
        "MiB": f"{size / 2**20:.1f}",
        "B/row": f"{size / count:.2f}",
    }


def costs(count: int, large: int, folder: Path) -> Iterator[dict[str, str]]:
    """Time and memory of whatever reads or permutes all rows."""
    sort = EpochOrder(0, count, data_order="sort")
    yield row_of("epoch, sort", count, cost(lambda: sort.rows([0]), "VmHWM"))
    feistel = EpochOrder(0, large)
    yield row_of("epoch, feistel", large, cost(lambda: feistel.rows([0]), "VmHWM"))
    for way, size in (("sort", count), ("feistel", count), ("feistel", large)):
        source = Labelled(size)
        chosen = cost(lambda s=source, w=way: held_out_rows(s, 0, 50_000, w), "VmHWM")
        yield row_of(f"50,000 held-out rows, {way}", size, chosen)
    labels = torch.arange(count) % 1000
    latents = torch.zeros(count, 1, 1, 1, dtype=torch.uint8)
    write_shards(folder / "shards", latents, labels, num_classes=1000, source="zeros")
    del latents, labels
    config = Latents(path=str(folder / "shards"))
    yield row_of("opening shards, first rank", count, cost(config.open, "RssAnon"))
    yield row_of("opening shards", count, cost(lambda: config.open_surveyed(None), "RssAnon"))
    whole = cost(lambda: config.open_surveyed(None).groups(), "RssAnon")
    yield row_of("the same, all labels copied", count, whole)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10**7, help="rows to sort")
    parser.add_argument("--large", type=int, default=10**9, help="rows that nothing sorts")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = list(costs(options.count, options.large, Path(folder)))
    finish(f"all rows: {options.count:,} and {options.large:,}", found, options.out)
    rows = [
        {
            "order": name,
            "rows": f"{size:,}",
            **{f"us, batch {batch}": f"{batch_us(order, batch):.0f}" for batch in BATCHES},
        }
        for name, size in (
            ("sort", 10**6),
            ("feistel", 10**6),
            ("feistel", options.large),
            ("feistel", 2**40),
        )
        for order in [EpochOrder(0, size, data_order=name)]
    ]
    finish("rows of a batch", rows, options.out)


if __name__ == "__main__":
    main()
