"""Pack folders of latents or images into shards: parallel and resumable.

Worker processes read chunks of a listing; `output` writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, read_latent, read_whole, stamp_of
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.listing import Listing, list_folder
from titan_dit.data.manifest import FORMAT, MANIFEST, agreed, read_folder_manifest
from titan_dit.data.packing.images import DecodingBudget, decode_image, read_image
from titan_dit.data.packing.output import (
    CONVERTED,
    SHARD_BYTES,
    ChunkData,
    ChunkRecord,
    Drops,
    ShardJob,
    all_finished,
    check_output,
    claimed,
    resumed,
    shard_of,
    write_all,
    write_chunk,
    writing,
)
from titan_dit.ranks.disk_errors import line_of
from titan_dit.system.worker import end_with_parent

MAX_PIXELS_FLAG = "--max-pixels"
Progress = Callable[[int, int], None]
"""Called often with (files done, of which dropped)."""


@dataclass(frozen=True, kw_only=True)
class PackJob(ShardJob):
    """Everything that determines the shards' bytes, without workers and output path."""

    command: ClassVar[str] = "data pack"
    format: ClassVar[str] = FORMAT

    listing: Listing
    shape: tuple[int, int, int]
    image_size: int | None
    max_pixels: int | None
    """Maximum pixels of a picture; None: as many as its format's memory allows."""

    @property
    def names(self) -> Sequence[str]:
        """The listed files."""
        return self.listing.names

    @property
    def labels(self) -> Int64[Tensor, " n"]:
        """Class of each file."""
        return self.listing.labels

    def compute_digest(self) -> str:
        """See `ShardJob.digest`."""
        listing = self.listing
        parts = (self.name, self.shape, self.dtype, self.shard_size, self.image_size, listing.kind)
        sha = hashlib.sha256(json.dumps([*parts, self.about], sort_keys=True).encode())
        sha.update(listing.names.ends.tobytes() + listing.names.block)
        sha.update(listing.labels.numpy().tobytes())
        if self.max_pixels is not None:  # Outputs of versions without the flag go on.
            sha.update(f" {self.max_pixels}".encode())
        return sha.hexdigest()

    def budget(self, context: Any = threading) -> DecodingBudget:
        """The limit on memory for decoding its pictures; `context` makes the locks."""
        return DecodingBudget(self.max_pixels, context, MAX_PIXELS_FLAG)

    def stamp(self, row: int) -> tuple[int, int]:
        """(length, modification time) of a listed file."""
        return stamp_of(self.listing.root / self.listing.names[row])

    def has_made(self, record: ChunkRecord, chunk: int) -> bool:
        """True if packing the chunk again gives the same bytes."""
        found = self.read_chunk(chunk, self.budget(), lambda *_: None)
        same = not found.kept and not record.file
        if found.kept:
            same = hashlib.sha256(shard_of(self, found)).hexdigest() == record.sha256
        return same and found.dropped == record.dropped

    def read_chunk(
        self, chunk: int, budget: DecodingBudget, report: Callable[[int, int], None]
    ) -> ChunkData:
        """Read the files of a chunk; `report` gets increments of (done, dropped)."""
        rows = self.rows(chunk)
        dropped: Drops = []
        latents = torch.empty(len(rows), *self.shape, dtype=STORED_DTYPES[self.dtype])
        kept: list[int] = []
        num_converted = 0
        for row in rows:
            try:
                latents[len(kept)], is_converted = self.read(row, budget)
                kept.append(row)
                num_converted += is_converted
            except BadFileError as error:
                dropped.append((row, str(error)))
                report(0, 1)
            report(1, 0)
        extra = {CONVERTED: num_converted} if num_converted else {}
        return ChunkData(chunk, kept, dropped, {"latent": latents[: len(kept)]}, extra)

    def read(self, row: int, budget: DecodingBudget) -> tuple[Shaped[Tensor, "c h w"], bool]:
        """(one sample in the shards' dtype, True if its colours were converted to sRGB).

        Raises BadFileError.
        """
        path = self.listing.root / self.listing.names[row]
        if self.listing.kind == "images":
            found = decode_image(read_whole(path), self.image_size, self.shape, budget)
            return found.pixels, found.is_converted
        latent = read_latent(path, self.shape)
        packed = latent.to(STORED_DTYPES[self.dtype])
        if self.dtype == "float16" and packed.isinf().any():
            raise BadFileError("not finite in float16: above 65504. Pack with --dtype float32")
        return packed, False


def make_job(
    source: Path,
    output: Path,
    *,
    dtype: str | None = None,
    scale: float | None = None,
    shift: float | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    image_size: int | None = None,
    shard_size: int | None = None,
    text: str | None = None,
    max_pixels: int | None = None,
) -> PackJob:
    """List a folder and choose the shards. Raises UserError for options that do not fit it."""
    listing, stated = list_folder(source, num_classes, classes), read_folder_manifest(source)
    pictures = listing.kind == "images"
    if pictures and dtype:
        raise UserError(f"[data pack] dtype={dtype}: images are stored as uint8. Omit --dtype.")
    if image_size and not pictures:
        raise UserError(
            f"[data pack] image_size={image_size}: {source} holds latents, not images. Omit it."
        )
    dtype = "uint8" if pictures else dtype or "float16"
    shape = most_common_shape(listing, image_size, max_pixels)
    about = {
        "source": text or stated["source"] or f"packed from {source.resolve().name}",
        "num_classes": listing.num_classes,
        **({"classes": list(listing.class_names)} if listing.class_names else {}),
        "scale": agreed("scale", scale, stated["scale"], 1 / 127.5 if pictures else 1.0, source),
        "shift": agreed("shift", shift, stated["shift"], 127.5 if pictures else 0.0, source),
        "value_range": [0.0, 255.0] if pictures else None,
    }
    bytes_each = math.prod(shape) * STORED_DTYPES[dtype].itemsize
    size = shard_size or max(1, SHARD_BYTES // bytes_each)
    return PackJob(
        listing=listing,
        root=listing.root,
        name=output.resolve().name,
        shape=shape,
        dtype=dtype,
        image_size=image_size,
        about=about,
        max_pixels=max_pixels,
        shard_size=size,
    )


def most_common_shape(
    listing: Listing, image_size: int | None, max_pixels: int | None, num: int = 64
) -> tuple[int, int, int]:
    """The most frequent shape of up to `num` evenly spaced files. Raises UserError."""
    num = min(num, len(listing.names))
    shapes: Counter[tuple[int, int, int]] = Counter()
    first_error = ""
    budget = DecodingBudget(max_pixels, flag=MAX_PIXELS_FLAG)
    for row in (i * len(listing.names) // num for i in range(num)):
        path = listing.root / listing.names[row]
        try:
            c, h, w = read_sample(listing, path, image_size, budget).shape
            shapes[c, h, w] += 1
        except BadFileError as error:
            first_error = first_error or f"{path}: {error}"
    if not shapes:
        raise UserError(
            f"[data pack] none of {num} sampled files of {listing.root} can be packed. Restore "
            f"them; the first is {first_error}."
        )
    sizes = {(h, w) for _, h, w in shapes}
    if (
        listing.kind == "images"
        and not image_size
        and (len(sizes) > 1 or any(h != w for h, w in sizes))
    ):
        found = ", ".join(f"{w}x{h}" for h, w in sorted(sizes)[:4])
        raise UserError(
            f"[data pack] the images of {listing.root} are not squares of one size ({found}). "
            "Resize and crop them to the model's size, such as --image-size 64."
        )
    return shapes.most_common(1)[0][0]


def read_sample(
    listing: Listing, path: Path, image_size: int | None, budget: DecodingBudget
) -> Shaped[Tensor, "c h w"]:
    """Read a file of the listing, of any shape."""
    if listing.kind == "images":
        return read_image(path, image_size, budget=budget)
    return read_latent(path)


def pack(
    job: PackJob, output: Path, workers: int, progress: Progress, verify: bool = False
) -> Drops | None:
    """Write the shards and the manifest; return the dropped files, or None if already packed.

    `verify` compares the contents of files that were packed before. Raises UserError.
    """
    check_output(job, output)
    output.mkdir(parents=True, exist_ok=True)
    with claimed(job, output):
        finished = resumed(job, output, verify)
        if finished is None:
            return None
        todo = [chunk for chunk in range(job.num_chunks) if chunk not in finished]
        done = sum(len(job.rows(chunk)) for chunk in finished)
        dropped = sum(len(record.dropped) for record in finished.values())

        def report(newly_done: int, newly_dropped: int) -> None:
            progress(done + newly_done, dropped + newly_dropped)

        if min(workers, len(todo)) > 1:
            run_workers(job, output, todo, min(workers, len(todo)), report)
        else:
            pack_here(job, output, todo, report)
        records = all_finished(job, output)
        with writing(output / MANIFEST, job.command):
            write_all(job, output, records)
    return [drop for record in records for drop in record.dropped]


def pack_chunk(
    job: PackJob,
    output: Path,
    chunk: int,
    budget: DecodingBudget,
    report: Callable[[int, int], None],
) -> None:
    """Read a chunk; write its shard and record; `report` gets increments of (done, dropped)."""
    write_chunk(job, output, job.read_chunk(chunk, budget, report))


def pack_here(job: PackJob, output: Path, todo: list[int], progress: Progress) -> None:
    """Pack the chunks of `todo` in this process. Raises UserError if the disk fails."""
    counts = [0, 0]

    def report(done: int, dropped: int) -> None:
        counts[0] += done
        counts[1] += dropped
        progress(*counts)

    try:
        for chunk in todo:
            pack_chunk(job, output, chunk, job.budget(), report)
    except OSError as error:
        raise UserError(line_of(error, "[data pack]")) from None


def run_workers(
    job: PackJob, output: Path, todo: list[int], workers: int, progress: Progress
) -> None:
    """Pack the chunks of `todo` in worker processes; worker i takes todo[i::workers].

    Raises the error of a worker: UserError, or RuntimeError if it died.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork.
    shared = context.RawArray("q", 2 * workers)
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    budget = job.budget(context)
    processes = [
        context.Process(
            target=pack_chunks,
            args=(job, output, todo[i::workers], budget, shared, i, pipes[i][1]),
            daemon=True,
        )
        for i in range(workers)
    ]
    try:
        with sigint_ignored():
            for process in processes:
                process.start()
        running = dict(zip(processes, (receiver for receiver, _ in pipes), strict=True))
        while running:
            wait([process.sentinel for process in running], timeout=0.5)
            progress(sum(shared[::2]), sum(shared[1::2]))
            for process in [process for process in running if not process.is_alive()]:
                errors = running.pop(process)
                if process.exitcode:
                    raise worker_error(process.exitcode, errors.recv() if errors.poll() else "")
    finally:
        started = [process for process in processes if process.pid]
        for process in started:
            process.terminate()
        deadline = time.monotonic() + 1
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def pack_chunks(
    job: PackJob,
    output: Path,
    chunks: list[int],
    budget: DecodingBudget,
    counts: Any,
    place: int,
    errors: Connection,
) -> None:
    """Entry point of worker `place`: packs `chunks`, adds its progress to the shared `counts`.

    Sends an error's message to the parent. Exits if the parent dies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent terminates the workers.
    end_with_parent()
    torch.set_num_threads(1)

    def report(done: int, dropped: int) -> None:
        counts[2 * place] += done
        counts[2 * place + 1] += dropped

    try:
        for chunk in chunks:
            pack_chunk(job, output, chunk, budget, report)
    except (UserError, OSError) as error:
        named = line_of(error, "[data pack]") if isinstance(error, OSError) else str(error)
        errors.send(named)
        raise SystemExit(1) from None


@contextmanager
def sigint_ignored() -> Iterator[None]:
    """Make child processes ignore Ctrl-C from their start; the parent terminates them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may set handlers, and only it is interrupted.
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def worker_error(exit_code: int, message: str) -> Exception:
    """Return the error of a dead worker: its message, or its signal or exit code."""
    if message:
        return UserError(message)
    if exit_code < 0:
        return UserError(
            f"[data pack] a worker was killed (signal {-exit_code}): not enough memory? Set fewer "
            "--workers; the same command resumes."
        )
    return RuntimeError(f"a worker failed (exit code {exit_code}), see above")
