"""Encode pictures, or clips, into shards; threads decode ahead of the autoencoder."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.caption_embeddings import CAPTIONS
from titan_dit.data.files import BadFileError
from titan_dit.data.latent_facts import FEATURES
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.manifest import MANIFEST, digest_of
from titan_dit.data.packing.images import DecodingBudget
from titan_dit.data.packing.output import (
    CONVERTED,
    PICTURES,
    ChunkData,
    ChunkRecord,
    Drops,
    all_finished,
    resumed,
    write_all,
    write_chunk,
    writing,
)
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.encode_job import PICTURES_DIGEST, DecodedPicture, EncodeJob
from titan_dit.pictures.features import PictureFeatures
from titan_dit.pictures.pixels import Pixels
from titan_dit.pictures.report import as_line, first_rows
from titan_dit.system.files import write_whole
from titan_dit.system.host_copy import HostCopy

MASKS = "mask"
"""Key of a chunk's record: sum and number of the values of its masks."""
Reading = Future[DecodedPicture]
AHEAD = 2
"""Batches queued on the device behind the one that the host waits for."""


@dataclass
class Waited:
    """How long the autoencoder waited for decoded pictures."""

    seconds: float = 0.0
    total: float = 0.0
    """Seconds of encoding, with the waiting."""

    @classmethod
    def joined(cls, parts: Sequence[Waited]) -> Waited:
        """The sums over all ranks."""
        return cls(sum(part.seconds for part in parts), sum(part.total for part in parts))

    def __str__(self) -> str:
        """A share, for the console."""
        return f"{self.seconds / max(self.total, 1e-9):.0%}"


@dataclass(frozen=True)
class PictureBatch:
    """Decoded pictures of one chunk."""

    chunk: int
    rows: list[int]
    """Numbers of the pictures that could be decoded."""
    digests: list[bytes]
    """SHA-256 of their files."""
    pictures: UInt8[Tensor, "b 3 *size"] | None
    """None if all were dropped."""
    dropped: Drops
    num_converted: int
    """Pictures whose colours were converted to sRGB."""
    references: UInt8[Tensor, "b 3 *size"] | None = None
    masks: UInt8[Tensor, "b *latent_size"] | None = None


@dataclass
class EncodedChunk:
    """The encoded part of a chunk."""

    number: int
    latents: list[Tensor] = field(default_factory=list)
    """References included: their channels follow the pictures'."""
    masks: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    """Empty without any."""
    rows: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    dropped: Drops = field(default_factory=list)
    num_converted: int = 0


def missing_chunks(job: EncodeJob, output: Path, verify: bool) -> list[int] | None:
    """Numbers of the missing chunks; None if the output is whole. Needs the output's lock."""
    finished = resumed(job, output, verify)
    if finished is None:
        return None
    return [chunk for chunk in range(job.num_chunks) if chunk not in finished]


def encode_chunks(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    output: Path,
    chunks: Sequence[int],
    threads: int,
    report: Callable[[int, int], None],
    features: PictureFeatures | None = None,
) -> Waited:
    """Encode and write chunks; `report` gets increments of (pictures done, of which dropped).

    `features` are stored beside the latents. Raises UserError.
    """
    chunk: EncodedChunk | None = None
    waited, begun = Waited(), time.perf_counter()
    try:
        with same_bits():
            batches = decoded(job, vae, chunks, threads, waited)
            for batch, stored in encoded(job, vae, batches, features):
                if chunk is None or chunk.number != batch.chunk:
                    if chunk:
                        write(job, output, chunk)
                    chunk = EncodedChunk(batch.chunk)
                dropped = len(chunk.dropped)
                add(job, chunk, batch, stored)
                more = len(chunk.dropped) - dropped
                report(len(batch.rows) + len(batch.dropped), more)
        if chunk:
            write(job, output, chunk)
    except OSError as error:
        raise UserError(f"[data encode] {error}") from None
    waited.total = time.perf_counter() - begun
    return waited


@contextmanager
def same_bits() -> Iterator[None]:
    """Make equal pictures equal bits: one torch thread, deterministic cuDNN kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            yield
    finally:
        torch.set_num_threads(threads)


def decoded(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    chunks: Sequence[int],
    threads: int,
    waited: Waited,
) -> Iterator[PictureBatch]:
    """Decode the pictures of all chunks in threads, some batches ahead. Counts what is `waited`."""
    pinned = vae.device.type == "cuda"
    waiting: deque[tuple[int, Sequence[int], list[Reading]]] = deque()
    budget = DecodingBudget(job.how.max_pixels, flag="--max-pixels")
    with ThreadPoolExecutor(threads) as pool:
        try:
            for chunk in chunks:
                for rows in job.batches(chunk):
                    readings = [pool.submit(job.picture, row, budget) for row in rows]
                    waiting.append((chunk, rows, readings))
                    if len(waiting) > job.batches_ahead(chunk, threads):
                        yield joined(*waiting.popleft(), pinned, waited)
            while waiting:
                yield joined(*waiting.popleft(), pinned, waited)
        finally:
            pool.shutdown(cancel_futures=True)


def joined(
    chunk: int, rows: Sequence[int], readings: list[Reading], pinned: bool, waited: Waited
) -> PictureBatch:
    """A batch of the pictures that could be decoded."""
    begun = time.perf_counter()
    wait(readings)
    waited.seconds += time.perf_counter() - begun
    kept, found, dropped = [], [], []
    for row, reading in zip(rows, readings, strict=True):
        try:
            found.append(reading.result())
        except BadFileError as error:
            dropped.append((row, str(error)))
            continue
        kept.append(row)

    def stacked(parts: list[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        whole = torch.stack(there) if there else None
        return whole.pin_memory() if whole is not None and pinned else whole

    return PictureBatch(
        chunk,
        kept,
        [picture.digest for picture in found],
        stacked([picture.pixels for picture in found]),
        dropped,
        sum(picture.is_converted for picture in found),
        stacked([picture.reference for picture in found]),
        stacked([picture.mask for picture in found]),
    )


def encoded(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    batches: Iterator[PictureBatch],
    features: PictureFeatures | None = None,
) -> Iterator[tuple[PictureBatch, list[Tensor]]]:
    """Each batch with its rows on the CPU: [pictures, copies, c, h, w], or [..., c, f, h, w].

    With `features` also theirs: [pictures, copies, rows, columns, dim]. [] if all pictures were
    dropped.

    AHEAD batches are queued behind the one that is waited for. A GPU works on them while the host
    adds rows, writes shards and joins the next batch.
    """
    queued: deque[tuple[PictureBatch, list[HostCopy]]] = deque()
    for batch in batches:
        started = []
        if batch.pictures is not None:
            images = with_copies(job, batch.pictures.to(vae.device, non_blocking=True))
            started.append(HostCopy(latents_of(job, vae, images, batch.references)))
            if features:
                found = features.of(images)
                started.append(HostCopy(found.view(-1, job.copies, *found.shape[1:])))
        queued.append((batch, started))
        if len(queued) > AHEAD:
            yield rows_of(*queued.popleft())
    while queued:
        yield rows_of(*queued.popleft())


def rows_of(batch: PictureBatch, stored: list[HostCopy]) -> tuple[PictureBatch, list[Tensor]]:
    """Wait for the rows of a batch."""
    return batch, [copy.read() for copy in stored]


GREY = 127.5
"""Value of a pixel that is not given: 0 of an autoencoder's input."""


def latents_of(
    job: EncodeJob,
    vae: Autoencoder | Pixels,
    images: UInt8[Tensor, "bk 3 *size"],
    references: UInt8[Tensor, "b 3 *size"] | None = None,
) -> Shaped[Tensor, "b k c *found"]:
    """The rows of pictures: unscaled mean and std of each, or the mean alone, or the pixels.

    Behind them the means of their references, or of the first frames of clips.
    """
    mean, std = vae.encode(images)
    rows = [mean, std] if job.how.posterior == "both" else [mean]
    if references is not None:
        rows.append(vae.encode(with_copies(job, references.to(vae.device, non_blocking=True)))[0])
    elif job.how.first_frame:
        rows.append(vae.encode(first_frames(images))[0])
    stored = torch.cat(rows, 1).to(STORED_DTYPES[job.dtype])
    return stored.view(-1, job.copies, *stored.shape[1:])


def with_copies(job: EncodeJob, images: Shaped[Tensor, "b *size"]) -> Shaped[Tensor, "bk *size"]:
    """Pictures, or masks, each followed by its mirror image with --flip true."""
    copies = [images, images.flip(-1)] if job.how.flip else [images]
    return torch.stack(copies, 1).flatten(0, 1)


def first_frames(clips: UInt8[Tensor, "b 3 f h w"]) -> Float[Tensor, "b 3 f h w"]:
    """Clips with grey frames in place of all but the first."""
    given = torch.full(clips.shape, GREY, device=clips.device)
    given[:, :, 0] = clips[:, :, 0]
    return given


def add(job: EncodeJob, chunk: EncodedChunk, batch: PictureBatch, stored: Sequence[Tensor]) -> None:
    """Add a batch to its chunk, without pictures whose latents or features are not finite."""
    dropped = list(batch.dropped)
    if stored:
        finite = torch.stack([rows.isfinite().flatten(1).all(1) for rows in stored])
        kept = finite.all(0)
        for rows, found in zip(stored, (chunk.latents, chunk.features), strict=False):
            found.append(rows[kept])
        if batch.masks is not None:
            chunk.masks.append(batch.masks[kept])
        whys = (
            f"its latent is not finite in {job.dtype}",
            "its features are not finite in float16",
        )
        pairs = zip(batch.rows, batch.digests, finite.T.tolist(), strict=True)
        for row, sha, are_finite in pairs:
            if all(are_finite):
                chunk.rows.append(row)
                chunk.digests.append(sha)
            else:
                dropped.append((row, whys[are_finite.index(False)]))
    chunk.dropped += sorted(dropped)
    chunk.num_converted += batch.num_converted


def write(job: EncodeJob, output: Path, chunk: EncodedChunk) -> None:
    """Write a chunk's shard and its record. Raises UserError."""
    (channels, *size), beside = job.shape_of(chunk.number), job.reference_channels
    every = chunk.latents or [torch.empty(0, job.copies, channels + beside, *size)]
    rows = torch.cat(every).flatten(0, 1)
    tensors = {"latent": rows[:, :channels].contiguous()}
    extra: dict[str, Any] = sums(job, tensors["latent"]) | {
        PICTURES_DIGEST: hashlib.sha256(b"".join(chunk.digests)).hexdigest()
    }
    if beside:
        tensors["reference"] = rows[:, channels:].contiguous()
    if chunk.masks:
        masks = tensors["mask"] = with_copies(job, torch.cat(chunk.masks))
        extra[MASKS] = [int(masks.sum(dtype=torch.int64)), masks.numel()]
    if chunk.num_converted:
        extra[CONVERTED] = chunk.num_converted
    if chunk.features:
        tensors[FEATURES] = torch.cat(chunk.features).flatten(0, 1)
    write_chunk(job, output, ChunkData(chunk.number, chunk.rows, chunk.dropped, tensors, extra))


def sums(job: EncodeJob, rows: Shaped[Tensor, "n c *size"]) -> dict[str, list[float]]:
    """Sum and sum of squares of each channel of drawn latents, in fp64.

    A drawn latent is mean + std * noise, so its expected square is mean^2 + std^2.
    """
    # numpy: its sums do not depend on the number of threads.
    total, squares = np.zeros(job.channels), np.zeros(job.channels)
    others = (0, *range(2, rows.ndim))
    frames = rows.shape[2] if rows.ndim == 5 else 1
    for part in torch.split(rows, max(1, 1024 // frames)):
        values = part.double().numpy()
        per_channel = np.square(values).sum(others)
        total += values[:, : job.channels].sum(others)
        squares += per_channel.reshape(-1, job.channels).sum(0)
    return {"sum": total.tolist(), "squares": squares.tolist()}


def moments(job: EncodeJob, records: Sequence[ChunkRecord]) -> tuple[list[float], list[float]]:
    """Mean and std of each channel over the dataset, summed in the job's order."""
    count = sum(
        record.count * math.prod(job.shape_of(chunk)[1:]) for chunk, record in enumerate(records)
    )
    total, squares = np.zeros(job.channels), np.zeros(job.channels)
    for record in records:
        if record.count:
            total += np.array(record.extra["sum"])
            squares += np.array(record.extra["squares"])
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
    return mean.tolist(), std.tolist()


def finish(job: EncodeJob, output: Path) -> tuple[Drops, list[float], list[float]]:
    """Write captions, reports and the manifest, which makes the output whole.

    Returns (dropped pictures, mean of each channel, std of each channel). Raises UserError.
    """
    records = all_finished(job, output)
    mean, std = moments(job, records)
    more: dict[str, Any] = {}
    if job.how.units == "measured":
        if not all(std):
            raise UserError(
                f"[data encode] units=measured: channel {std.index(0)} of all latents is constant, "
                "so it has no scale. Choose --units vae."
            )
        more = {"scale": [1 / value for value in std], "shift": mean}
    if job.has_masks:
        more["mask"] = {"mean": mean_of_masks(records)}
    more["pictures_digest"] = digest_of([r.extra[PICTURES_DIGEST] for r in records if r.count])
    if job.pictures.texts:
        data = b"".join(captions(job, records))
        with writing(output / CAPTIONS, job.command):
            write_whole(output / CAPTIONS, data)
        more["captions"] = {"file": CAPTIONS, "sha256": hashlib.sha256(data).hexdigest()}
    if job.survey is not None:
        with writing(output / PICTURES, job.command):
            write_whole(output / PICTURES, b"".join(job.report_lines(records)))
    with writing(output / MANIFEST, job.command):
        write_all(job, output, records, more)
    return [drop for record in records for drop in record.dropped], mean, std


def mean_of_masks(records: Sequence[ChunkRecord]) -> float:
    """The mean of all masks, 0 to 255. Raises UserError if they are black."""
    total, count = (sum(r.extra[MASKS][at] for r in records if r.count) for at in (0, 1))
    if not total:
        raise UserError(
            "[data encode] all masks are black, so no token would have a loss. White counts in "
            "full: exchange black and white."
        )
    return float(total / count)


def captions(job: EncodeJob, records: Sequence[ChunkRecord]) -> Iterator[bytes]:
    """A line of JSON for each kept picture: its first row, file name and caption."""
    for picture, row in first_rows(job, records).items():
        text = job.pictures.texts[picture]
        yield as_line({"row": row, "file_name": job.names[picture], "text": text})
