"""Encode pictures into shards: decoded by threads ahead of the autoencoder, chunk by chunk.

Chunks and batches are those of the plan, so any number of ranks writes the same bytes, also after
a stop: a chunk with a record is finished (`packing.shard_job`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.manifest import MANIFEST, digest_of
from titan_dit.data.packing import pack
from titan_dit.data.packing.images import DecodingBudget
from titan_dit.data.packing.shard_job import CONVERTED, ChunkRecord, write_chunk, writing
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.encode_plan import PICTURES, EncodePlan, Picture
from titan_dit.system.files import write_whole
from titan_dit.system.host_copy import HostCopy

Drops = list[tuple[int, str]]
Reading = Future[Picture]
AHEAD = 2
"""Batches that are queued on the device behind the one that the host waits for."""


@dataclass(frozen=True)
class Batch:
    """Decoded pictures of one chunk."""

    chunk: int
    rows: list[int]
    """Numbers of the pictures that could be decoded."""
    digests: list[bytes]
    """SHA-256 of their files."""
    pictures: UInt8[Tensor, "b 3 s s"] | None
    """None if all were dropped."""
    dropped: Drops
    num_converted: int
    """Pictures whose colours were of another space than sRGB."""


@dataclass
class Chunk:
    """What has been encoded of a chunk."""

    number: int
    latents: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    dropped: Drops = field(default_factory=list)
    num_converted: int = 0


def todo_of(plan: EncodePlan, output: Path, verify: bool) -> list[int] | None:
    """The chunks that are missing; None if the output is whole. Needs the claim of the output."""
    finished = pack.resumed(plan, output, plan.digest(), verify)
    if finished is None:
        return None
    return [chunk for chunk in range(plan.num_chunks) if chunk not in finished]


def encode_chunks(
    plan: EncodePlan,
    vae: Autoencoder,
    output: Path,
    chunks: Sequence[int],
    threads: int,
    report: Callable[[int, int], None],
) -> None:
    """Encode and write chunks; `report` gets increments of (pictures done, of which dropped)."""
    digest = plan.digest()
    chunk: Chunk | None = None
    try:
        with same_bits():
            for batch, stored in encoded(plan, vae, decoded(plan, vae, chunks, threads)):
                if chunk is None or chunk.number != batch.chunk:
                    if chunk:
                        write(plan, digest, output, chunk)
                    chunk = Chunk(batch.chunk)
                dropped = len(chunk.dropped)
                add(plan, chunk, batch, stored)
                more = len(chunk.dropped) - dropped
                report(len(batch.rows) + len(batch.dropped), more)
        if chunk:
            write(plan, digest, output, chunk)
    except OSError as error:
        raise UserError(f"[data encode] {error}") from None


@contextmanager
def same_bits() -> Iterator[None]:
    """Equal pictures are equal bits: one thread of torch, deterministic kernels of cuDNN."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            yield
    finally:
        torch.set_num_threads(threads)


def decoded(
    plan: EncodePlan, vae: Autoencoder, chunks: Sequence[int], threads: int
) -> Iterator[Batch]:
    """Decode the pictures of all chunks in threads, some batches ahead."""
    pinned = vae.device.type == "cuda"
    waiting: deque[tuple[int, range, list[Reading]]] = deque()
    budget = DecodingBudget(plan.max_pixels, flag="--max-pixels")
    with ThreadPoolExecutor(threads) as pool:
        try:
            for chunk in chunks:
                for rows in plan.batches(chunk):
                    readings = [pool.submit(plan.picture, row, budget) for row in rows]
                    waiting.append((chunk, rows, readings))
                    if len(waiting) > 2 + 4 * threads // len(rows):
                        yield joined(*waiting.popleft(), pinned)
            while waiting:
                yield joined(*waiting.popleft(), pinned)
        finally:
            pool.shutdown(cancel_futures=True)


def joined(chunk: int, rows: range, readings: list[Reading], pinned: bool) -> Batch:
    """A batch of those pictures that can be decoded."""
    kept, found, dropped = [], [], []
    for row, reading in zip(rows, readings, strict=True):
        try:
            found.append(reading.result())
        except BadFileError as error:
            dropped.append((row, str(error)))
            continue
        kept.append(row)
    stacked = torch.stack([picture.pixels for picture in found]) if found else None
    if stacked is not None and pinned:
        stacked = stacked.pin_memory()
    digests = [picture.digest for picture in found]
    return Batch(chunk, kept, digests, stacked, dropped, sum(p.is_converted for p in found))


def encoded(
    plan: EncodePlan, vae: Autoencoder, batches: Iterator[Batch]
) -> Iterator[tuple[Batch, Tensor | None]]:
    """Rows of every batch, on the CPU: [pictures, copies, c, h, w].

    AHEAD batches are queued behind the one that is waited for: a GPU works on them while the host
    adds rows, writes shards and joins the next batch.
    """
    queued: deque[tuple[Batch, HostCopy | None]] = deque()
    for batch in batches:
        started = None
        if batch.pictures is not None:
            started = HostCopy(latents_of(plan, vae, batch.pictures))
        queued.append((batch, started))
        if len(queued) > AHEAD:
            yield rows_of(*queued.popleft())
    while queued:
        yield rows_of(*queued.popleft())


def rows_of(batch: Batch, stored: HostCopy | None) -> tuple[Batch, Tensor | None]:
    """Wait for the rows of a batch."""
    return batch, None if stored is None else stored.read()


def latents_of(
    plan: EncodePlan, vae: Autoencoder, pictures: UInt8[Tensor, "b 3 s s"]
) -> Shaped[Tensor, "b k c h w"]:
    """The rows of pictures: unscaled mean and std (not its logarithm) of each, or the mean."""
    images = pictures.to(vae.device, non_blocking=True)
    copies = [images, images.flip(-1)] if plan.flip else [images]
    mean, std = vae.encode(torch.stack(copies, 1).flatten(0, 1))
    rows = torch.cat([mean, std], 1) if plan.posterior == "both" else mean
    stored = rows.to(STORED_DTYPES[plan.dtype])
    return stored.view(len(pictures), len(copies), *plan.shape)


def add(plan: EncodePlan, chunk: Chunk, batch: Batch, stored: Tensor | None) -> None:
    """Add a batch to its chunk, without pictures whose latents are not finite."""
    dropped = list(batch.dropped)
    if stored is not None:
        finite = stored.isfinite().flatten(1).all(1)
        chunk.latents.append(stored[finite])
        for row, sha, is_finite in zip(batch.rows, batch.digests, finite.tolist(), strict=True):
            if is_finite:
                chunk.rows.append(row)
                chunk.digests.append(sha)
            else:
                dropped.append((row, f"its latent is not finite in {plan.dtype}"))
    chunk.dropped += sorted(dropped)
    chunk.num_converted += batch.num_converted


def write(plan: EncodePlan, digest: str, output: Path, chunk: Chunk) -> None:
    """Write a chunk's shard and its record."""
    every = chunk.latents or [torch.empty(0, plan.copies, *plan.shape)]
    latents = torch.cat(every).flatten(0, 1)
    extra: dict[str, Any] = sums(plan, latents) | {
        PICTURES: hashlib.sha256(b"".join(chunk.digests)).hexdigest()
    }
    if chunk.num_converted:
        extra[CONVERTED] = chunk.num_converted
    write_chunk(plan, digest, output, chunk.number, chunk.rows, latents, chunk.dropped, extra)


def sums(plan: EncodePlan, rows: Shaped[Tensor, "n c h w"]) -> dict[str, list[float]]:
    """Sum and sum of squares of each channel of drawn latents, in fp64.

    A drawn latent is mean + std * noise, so its expected square is mean^2 + std^2.
    """
    # numpy: its sums do not depend on the number of threads.
    total, squares = np.zeros(plan.channels), np.zeros(plan.channels)
    for part in torch.split(rows, 1024):
        values = part.double().numpy()
        per_channel = np.square(values).sum((0, 2, 3))
        total += values[:, : plan.channels].sum((0, 2, 3))
        squares += per_channel.reshape(-1, plan.channels).sum(0)
    return {"sum": total.tolist(), "squares": squares.tolist()}


def moments(plan: EncodePlan, records: Sequence[ChunkRecord]) -> tuple[list[float], list[float]]:
    """Mean and std of each channel over the data, summed in the plan's order."""
    count = sum(record.count for record in records) * math.prod(plan.shape[1:])
    total, squares = np.zeros(plan.channels), np.zeros(plan.channels)
    for record in records:
        if record.count:
            total += np.array(record.extra["sum"])
            squares += np.array(record.extra["squares"])
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
    return mean.tolist(), std.tolist()


def finish(plan: EncodePlan, output: Path) -> tuple[Drops, list[float], list[float]]:
    """Write captions, dropped.json and the manifest; the output is whole then.

    Returns the dropped pictures, and mean and std of each channel over the data.
    """
    digest = plan.digest()
    records = pack.all_finished(plan, output, digest)
    mean, std = moments(plan, records)
    more: dict[str, Any] = {}
    if plan.units == "measured":
        if not all(std):
            raise UserError(
                f"[data encode] units=measured: channel {std.index(0)} of all latents is constant, "
                "so it has no scale. Choose --units vae."
            )
        more = {"scale": [1 / value for value in std], "shift": mean}
    more["pictures_digest"] = digest_of([r.extra[PICTURES] for r in records if r.count])
    if plan.pictures.texts:
        data = b"".join(captions(plan, records))
        with writing(output / pack.CAPTIONS, plan.command):
            write_whole(output / pack.CAPTIONS, data)
        more["captions"] = {"file": pack.CAPTIONS, "sha256": hashlib.sha256(data).hexdigest()}
    with writing(output / MANIFEST, plan.command):
        pack.write_all(plan, output, digest, records, more)
    return [drop for record in records for drop in record.dropped], mean, std


def captions(plan: EncodePlan, records: Sequence[ChunkRecord]) -> Iterator[bytes]:
    """A line of JSON for each picture that was kept: its first row, file and caption."""
    row = 0
    for number, record in enumerate(records):
        lost = {picture for picture, _ in record.dropped}
        for picture in plan.rows(number):
            if picture in lost:
                continue
            values = {
                "row": row,
                "file_name": plan.names[picture],
                "text": plan.pictures.texts[picture],
            }
            yield (json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8", "replace")
            row += plan.copies
