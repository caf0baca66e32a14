"""Shards on a cold page cache, and how this loader read them before: for `loader.py`.

A reader of before maps the shards (MADV_RANDOM) and copies rows: each page of 4 KiB is a read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from titan_dit.data.latents import LatentShards, write_shards


class MappedRows:
    """In place of `ShardRows`: rows copied from mapped files, as until commit ab0708a."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.latents = []
        for path in paths:
            with safe_open(path, framework="pt") as file:
                latents = file.get_tensor("latent")
            advise_random(latents)
            self.latents.append(latents.flatten(1).numpy())

    def read(self, file: Any, row: Any, out: memoryview) -> None:
        """Read rows, see `ShardRows.read`."""
        rows = np.frombuffer(out, self.latents[0].dtype).reshape(len(file), -1)
        for i, (number, where) in enumerate(zip(file.tolist(), row.tolist(), strict=True)):
            rows[i] = self.latents[number][where]


def advise_random(mapped: Tensor) -> None:
    """Switch off readahead for a mapped tensor."""
    start = mapped.data_ptr()
    begin = start - start % mmap.PAGESIZE
    length = start + mapped.nbytes - begin
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_RANDOM)


def mapped(source: LatentShards) -> LatentShards:
    """Have a dataset read as before."""
    source._latents = MappedRows([s.latents.path for s in source.shards])  # type: ignore[assignment]
    return source


def evict(paths: Sequence[Path]) -> None:
    """Drop the files' pages from the page cache; nobody may have them mapped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached_share(paths: Sequence[Path]) -> float:
    """Share of the files' pages that are in the page cache, by mincore."""
    found = total = 0
    for path in paths:
        # A private mapping that is written to has an address; nothing is written.
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as map_,
        ):
            pages = -(-len(map_) // mmap.PAGESIZE)
            state = (ctypes.c_ubyte * pages)()
            start = ctypes.c_char.from_buffer(map_)
            address = ctypes.c_void_p(ctypes.addressof(start))
            if ctypes.CDLL(None, use_errno=True).mincore(
                address, ctypes.c_size_t(len(map_)), state
            ):
                raise OSError(ctypes.get_errno(), "mincore")
            del start
            found, total = found + sum(page & 1 for page in state), total + pages
    return found / total


def cold_turns(
    path: Path,
    readers: dict[str, Callable[[LatentShards], LatentShards]],
    batch: int,
    num_batches: int,
    turns: int,
) -> tuple[dict[str, list[float]], float]:
    """Samples per second of each reader by turn, each from a cold cache; the most that was cached.

    Every turn reads other rows, the readers of a turn the same ones, in changing order.
    """
    files = [shard.latents.path for shard in LatentShards(path).shards]
    rates: dict[str, list[float]] = {name: [] for name in readers}
    names, most = list(readers), 0.0
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            evict(files)
            most = max(most, cached_share(files))
            source = readers[name](LatentShards(path))
            rows = random.Random(turn).sample(range(len(source)), batch * num_batches)
            began = time.perf_counter()
            for begin in range(0, len(rows), batch):
                source.read(rows[begin : begin + batch])
            rates[name].append(len(rows) / (time.perf_counter() - began))
            del source
    return rates, most


def warm_turns(
    path: Path,
    readers: dict[str, Callable[[LatentShards], LatentShards]],
    batch: int,
    num_batches: int,
    turns: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Microseconds of CPU time per row of each reader by turn; all pages are cached.

    The first time that a process reads a row, when a mapped page is not in its page table yet, and
    the second time.
    """
    first: dict[str, list[float]] = {name: [] for name in readers}
    again: dict[str, list[float]] = {name: [] for name in readers}
    names = list(readers)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            source = readers[name](LatentShards(path))
            rows = random.Random(turn).sample(range(len(source)), batch * num_batches)
            for used in (first, again):
                began = time.process_time()
                for begin in range(0, len(rows), batch):
                    source.read(rows[begin : begin + batch])
                used[name].append((time.process_time() - began) / len(rows) * 1e6)
    return first, again


READERS: dict[str, Callable[[LatentShards], LatentShards]] = {
    "mapped, as before": mapped,
    "preadv": lambda source: source,
}


def measure_cold(
    path: Path, shape: tuple[int, int, int], count: int, batch: int, turns: int
) -> list[dict[str, Any]]:
    """Write shards of random rows at `path`, and compare the readers: rows of the report."""
    latents = torch.randn(count, *shape).half()
    write_shards(
        path,
        latents,
        torch.arange(count) % 10,
        num_classes=10,
        source="random",
        shard_size=-(-count // 4),
    )
    num_batches = max(1, count // batch // 4)
    # As they were written, then as random reads have brought them back: in smaller pieces.
    written = warm_turns(path, READERS, batch, num_batches, turns)
    cold, cached = cold_turns(path, READERS, batch, num_batches, turns)
    source = LatentShards(path)
    shuffled = random.Random(0).sample(range(count), count)
    for begin in range(0, count, batch):
        source.read(shuffled[begin : begin + batch])
    brought_back = warm_turns(path, READERS, batch, num_batches, turns)

    def warm(used: dict[str, list[float]], name: str) -> str:
        return f"{np.median(used[name]):.2f}"

    def ratio(ours: list[float], others: list[float]) -> str:
        return f"{np.median([a / b for a, b in zip(ours, others, strict=True)]):.1f}"

    return [
        {
            "rows": f"{count:,} of {latents[0].nbytes:,} B, batch {batch}",
            "reads": name,
            "cached before a cold turn": f"{cached:.1%}",
            "cold: rows/s": f"{np.median(cold[name]):,.0f}",
            "cold / before": ratio(cold[name], cold["mapped, as before"]),
            "warm, as written: CPU us/row": warm(written[0], name),
            "again": warm(written[1], name),
            "warm, read at random: CPU us/row": warm(brought_back[0], name),
            "again ": warm(brought_back[1], name),
        }
        for name in READERS
    ]
