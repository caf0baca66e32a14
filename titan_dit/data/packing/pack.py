"""Pack folders of latents or images into shards: parallel and resumable.

Workers write chunks of a listing, each shard atomically. In the output `pack.json` holds the job's
digest and is locked; `sources.json` records which files the shards were made of.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.caption_embeddings import CAPTIONS as CAPTIONS
from titan_dit.data.files import BadFileError, read_latent, read_whole, stamp_of
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.listing import Listing, few, list_folder
from titan_dit.data.manifest import (
    CLAIM,
    FORMAT,
    MANIFEST,
    SHARD_KEYS,
    agreed,
    check_manifest,
    read_folder_manifest,
    read_json,
)
from titan_dit.data.packing.images import DecodingBudget, decode_image, read_image
from titan_dit.ranks import disk_errors
from titan_dit.ranks.disk_errors import line_of
from titan_dit.system import stdio
from titan_dit.system.file_lock import open_locked
from titan_dit.system.files import sync_folder, write_json, write_whole
from titan_dit.system.worker import end_with_parent


@contextmanager
def claimed(output: Path, digest: str, command: str = "data pack") -> Iterator[None]:
    """Hold the lock of an output folder. Refuses a folder that another job has begun."""
    descriptor = lock(output, command)
    try:
        held = os.read(descriptor, 4096)
        if held and digest.encode() not in held:
            raise UserError(
                f"[{command}] out={output} holds unfinished shards of other files or options. "
                "Delete it or choose another --out."
            )
        if not held:
            # Written in place: a rename would replace the locked file.
            os.write(descriptor, (json.dumps({"plan": digest, "command": command}) + "\n").encode())
            os.fsync(descriptor)
            sync_folder(output)
        yield
    finally:
        os.close(descriptor)


def lock(output: Path, command: str = "data pack", claim: str = CLAIM) -> int:
    """Open and lock `pack.json`, or another file of an output; return its file descriptor."""
    try:
        return open_locked(output / claim)
    except BlockingIOError:
        raise UserError(
            f"[{command}] another process is packing into {output}. Wait for its end, or give "
            "another folder: --out."
        ) from None


ShapeKeys: TypeAlias = tuple[dict[str, Any], Sequence[dict[str, Any]]]
"""Keys of a manifest about the shape of rows, and those of each chunk's shard."""
MAX_PIXELS_FLAG = "--max-pixels"
CONVERTED = "to_srgb"
"""Key of a chunk's record: number of pictures whose colours were converted."""


@runtime_checkable
class ShardJob(Protocol):
    """A job that writes shards, of `data pack` or `data encode`."""

    @property
    def command(self) -> str:
        """The command, for messages."""

    @property
    def format(self) -> str:
        """Format of the manifest."""

    @property
    def copies(self) -> int:
        """Rows per listed file."""

    @property
    def root(self) -> Path:
        """The input."""

    @property
    def names(self) -> Sequence[str]:
        """The listed files."""

    @property
    def labels(self) -> Int64[Tensor, " n"]:
        """Class of each file; -1 for none."""

    @property
    def name(self) -> str:
        """Prefix of the shards' names."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""

    @property
    def dtype(self) -> str:
        """Dtype of the rows."""

    @property
    def about(self) -> dict[str, Any]:
        """Further keys of the manifest."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""

    def rows(self, chunk: int) -> Sequence[int]:
        """Listing indices of a chunk's files."""

    def shapes_of(self, records: Sequence[ChunkRecord]) -> ShapeKeys:
        """Keys of the manifest about the shape of rows, and those of each chunk's shard."""

    def digest(self) -> str:
        """SHA-256 of all that determines the shards' bytes, except the files' contents."""

    def stamp(self, row: int) -> tuple[int, int]:
        """(length, modification time) of a listed file."""

    def has_made(self, record: ChunkRecord, chunk: int) -> bool:
        """True if the files still have the contents that the chunk was made of."""


@dataclass(frozen=True, kw_only=True)
class Chunks(ABC):
    """Listed files in chunks of one size; each becomes a shard."""

    shard_size: int
    """Listed files per shard, including dropped ones."""

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The listed files."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks; one whose files are all dropped gets no shard."""
        return -(-len(self.names) // self.shard_size)

    def rows(self, chunk: int) -> Sequence[int]:
        """Listing indices of a chunk's files."""
        first = chunk * self.shard_size
        return range(first, min(first + self.shard_size, len(self.names)))


def one_shape(job: ShardJob, records: Sequence[ChunkRecord]) -> ShapeKeys:
    """Keys of the manifest, and of each shard, if all rows have the job's shape."""
    return {"shape": list(job.shape)}, [{}] * len(records)


@dataclass(frozen=True)
class PackJob(Chunks):
    """Everything that determines the shards' bytes, without workers and output path."""

    command: ClassVar[str] = "data pack"
    format: ClassVar[str] = FORMAT
    copies: ClassVar[int] = 1

    listing: Listing
    name: str
    """Prefix of the files: NAME-00000.safetensors."""
    shape: tuple[int, int, int]
    dtype: str
    image_size: int | None
    about: dict[str, Any]
    """Further manifest keys: source, num_classes, classes, scale, shift, value_range."""
    max_pixels: int | None = None
    """Maximum pixels of a picture; None: as many as its format's memory allows."""

    @property
    def root(self) -> Path:
        """The input folder."""
        return self.listing.root

    @property
    def names(self) -> Sequence[str]:
        """The listed files."""
        return self.listing.names

    @property
    def labels(self) -> Int64[Tensor, " n"]:
        """Class of each file."""
        return self.listing.labels

    def digest(self) -> str:
        """Return a SHA-256 of the job, independent of the parent folders of input and output."""
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

    def shapes_of(self, records: Sequence[ChunkRecord]) -> ShapeKeys:
        """One shape."""
        return one_shape(self, records)

    def has_made(self, record: ChunkRecord, chunk: int) -> bool:
        """True if packing the chunk again gives the same bytes."""
        kept, latents, dropped, _ = self.read_chunk(chunk, self.budget(), lambda *_: None)
        same = not kept and not record.file
        if kept:
            same = hashlib.sha256(shard_of(self, kept, latents)).hexdigest() == record.sha256
        return same and dropped == record.dropped

    def read_chunk(
        self, chunk: int, budget: DecodingBudget, report: Callable[[int, int], None]
    ) -> tuple[list[int], Shaped[Tensor, "n c h w"], list[tuple[int, str]], int]:
        """(kept rows, their samples, (row, reason) of dropped ones, number of converted pictures).

        A picture is converted if its colours were not sRGB. `report` gets increments of (done,
        dropped).
        """
        rows = self.rows(chunk)
        dropped: list[tuple[int, str]] = []
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
        return kept, latents[: len(kept)], dropped, num_converted

    def read(self, row: int, budget: DecodingBudget) -> tuple[Shaped[Tensor, "c h w"], bool]:
        """Read one sample in the shards' dtype; raises BadFileError.

        With True if it is a picture whose colours were of another space than sRGB.
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


@dataclass(frozen=True)
class ChunkRecord:
    """The result of a chunk. `file` is empty if all its files were dropped."""

    plan: str
    file: str
    count: int
    bytes: int
    sha256: str
    dropped: list[tuple[int, str]]
    """(index in the listing, reason)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further values: sums over the chunk of `data encode`, number of converted pictures."""


def pack_chunk(
    job: PackJob,
    digest: str,
    output: Path,
    chunk: int,
    budget: DecodingBudget,
    report: Callable[[int, int], None],
) -> None:
    """Read a chunk; write its shard and record; `report` gets increments of (done, dropped)."""
    kept, latents, dropped, num_converted = job.read_chunk(chunk, budget, report)
    extra = {CONVERTED: num_converted} if num_converted else {}
    write_chunk(job, digest, output, chunk, kept, latents, dropped, extra)


def write_chunk(
    job: ShardJob,
    digest: str,
    output: Path,
    chunk: int,
    kept: Sequence[int],
    latents: Shaped[Tensor, "n c *size"],
    dropped: list[tuple[int, str]],
    extra: dict[str, Any] | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a chunk's shard and its record, each whole or not at all; no shard if none is `kept`.

    `latents` are the rows of the `kept` files, `job.copies` for each; `more`: further tensors of
    these rows.
    """
    stem = f"{job.name}-{chunk:05d}"
    record = ChunkRecord(digest, "", 0, 0, "", dropped)
    if kept:
        file = f"{stem}.safetensors"
        data = shard_of(job, kept, latents, more or {})
        with writing(output / file, job.command):
            write_whole(output / file, data)
        sha = hashlib.sha256(data).hexdigest()
        count = len(kept) * job.copies
        record = ChunkRecord(digest, file, count, len(data), sha, dropped, extra or {})
    with writing(output / f"{stem}.json", job.command):
        write_json(output / f"{stem}.json", asdict(record))


def shard_of(
    job: ShardJob,
    kept: Sequence[int],
    latents: Shaped[Tensor, "n c *size"],
    more: Mapping[str, Tensor] = MappingProxyType({}),
) -> bytes:
    """The bytes of a shard."""
    labels = job.labels[torch.tensor(kept)].repeat_interleave(job.copies)
    # Not save_file: its files have mode 0600, and if killed it leaves a temporary file.
    data: bytes = safetensors.save({"latent": latents.contiguous(), "label": labels, **more})
    return data


def writing(file: Path, command: str = PackJob.command) -> AbstractContextManager[None]:
    """Raise an OSError of the block as a UserError that names the file and the fix."""
    return disk_errors.writing(f"[{command}] {file}", "Run the same command again: it resumes.")


def read_record(output: Path, stem: str) -> ChunkRecord | None:
    """Return the record of a finished chunk; None if it or its shard is missing or damaged."""
    try:
        file = output / f"{stem}.json"
        values: dict[str, Any] = user_text.read_json(file, str(file))
        values["dropped"] = [(int(row), str(why)) for row, why in values["dropped"]]
        record = ChunkRecord(**values)
        whole = not record.file or (output / record.file).stat().st_size == record.bytes
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if whole else None


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
        digest = job.digest()
        for chunk in chunks:
            pack_chunk(job, digest, output, chunk, budget, report)
    except (UserError, OSError) as error:
        named = line_of(error, "[data pack]") if isinstance(error, OSError) else str(error)
        errors.send(named)
        raise SystemExit(1) from None


SOURCES = "sources.json"


def stamps_of(job: ShardJob) -> list[str]:
    """By chunk: a digest of its files' lengths and modification times."""
    return [
        hashlib.sha256(
            " ".join(f"{job.stamp(row)}" for row in job.rows(chunk)).encode()
        ).hexdigest()[:32]
        for chunk in range(job.num_chunks)
    ]


def check_sources(
    job: ShardJob, output: Path, digest: str, made: Mapping[int, ChunkRecord], verify: bool
) -> None:
    """Raise UserError if files of finished chunks have changed; else record their state.

    `verify` reads and compares contents; otherwise lengths and modification times are compared.
    """
    now, before = stamps_of(job), recorded(job, output, digest)
    unknown = [chunk for chunk in made if before[chunk] is None]
    if verify:
        changed = [chunk for chunk, record in made.items() if not job.has_made(record, chunk)]
        how, compare = "contents", ""
    else:
        changed = [chunk for chunk in made if before[chunk] not in (None, now[chunk])]
        how = "length or time of modification"
        compare = " If they are the same, --verify true compares their contents."
    if changed:
        names = few([f"{job.name}-{chunk:05d}" for chunk in changed])
        raise UserError(
            f"[{job.command}] input={job.root}: files have changed ({how}) since these shards of "
            f"{output} were made of them: {names}. Delete {output}, or choose another --out."
            f"{compare}"
        )
    if unknown and not verify:
        stdio.write(
            sys.stderr,
            f"whether the files of {job.root} have changed is not known: an earlier version wrote "
            f"{output}. --verify true compares their contents\n",
        )
    kept = {} if verify else dict.fromkeys(unknown)
    chunks = [kept.get(chunk, stamp) for chunk, stamp in enumerate(now)]
    if chunks != before:
        with writing(output / SOURCES, job.command):
            write_json(output / SOURCES, {"plan": digest, "chunks": chunks})


def check_sources_unchanged(job: ShardJob, output: Path, digest: str) -> None:
    """Raise UserError if files changed while they were read."""
    pairs = zip(recorded(job, output, digest), stamps_of(job), strict=True)
    if any(before not in (None, now) for before, now in pairs):
        raise UserError(
            f"[{job.command}] input={job.root}: files have changed while they were read. Delete "
            f"{output}, and repeat the command."
        )


def recorded(job: ShardJob, output: Path, digest: str) -> list[str | None]:
    """By chunk: the recorded digest of its files for this job; None if not known."""
    file = output / SOURCES
    found = user_text.read_json(file, str(file)) if file.is_file() else None
    if isinstance(found, dict) and found.get("plan") == digest:
        chunks = found.get("chunks")
        if isinstance(chunks, list) and len(chunks) == job.num_chunks:
            return chunks
    return [None] * job.num_chunks


Progress = Callable[[int, int], None]
"""Called often with (files done, of which dropped)."""


def pack_here(job: PackJob, output: Path, todo: list[int], progress: Progress) -> None:
    """Pack the chunks of `todo` in this process."""
    digest, counts = job.digest(), [0, 0]

    def report(done: int, dropped: int) -> None:
        counts[0] += done
        counts[1] += dropped
        progress(*counts)

    try:
        for chunk in todo:
            pack_chunk(job, digest, output, chunk, job.budget(), report)
    except OSError as error:
        raise UserError(line_of(error, "[data pack]")) from None


def run_workers(
    job: PackJob, output: Path, todo: list[int], workers: int, progress: Progress
) -> None:
    """Pack the chunks of `todo` in worker processes; worker i takes todo[i::workers]."""
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


DROPPED, PICTURES = "dropped.json", "pictures.jsonl"
SHARD_BYTES = 128 << 20
SHARD_FILES = r"-\d{5,}\.(safetensors|json)"
KEPT_TEXT = "text-kept.json"
"""What the manifest said of captions and their embeddings, while lost shards are written again."""
TEXT_FILES = r"text(-index\.safetensors|-kept\.json|-\d{5,}\.(safetensors|json)|\.json)"
"""Embeddings of captions, see `data.caption_embeddings`, and the files kept for resuming them."""
LOOKS = "videos.jsonl"
"""File of what the videos of the input hold; ranks write videos-00000.jsonl."""
TEMPORARY = r"\.tmp\w{6}"
"""Temporary files that an earlier version left when it was killed."""


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
    """List a folder and choose the shards."""
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
        listing,
        output.resolve().name,
        shape,
        dtype,
        image_size,
        about,
        max_pixels,
        shard_size=size,
    )


def most_common_shape(
    listing: Listing, image_size: int | None, max_pixels: int | None, num: int = 64
) -> tuple[int, int, int]:
    """Return the most frequent shape of up to `num` evenly spaced files."""
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
) -> list[tuple[int, str]] | None:
    """Write the shards and the manifest; return the dropped files, or None if already packed.

    `verify` compares the contents of files that were packed before.
    """
    check_output(job, output)
    digest = job.digest()
    output.mkdir(parents=True, exist_ok=True)
    with claimed(output, digest):
        finished = resumed(job, output, digest, verify)
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
        records = all_finished(job, output, digest)
        with writing(output / MANIFEST):
            write_all(job, output, digest, records)
    return [drop for record in records for drop in record.dropped]


def resumed(
    job: ShardJob, output: Path, digest: str, verify: bool
) -> dict[int, ChunkRecord] | None:
    """Records of finished chunks; None if the output is whole.

    Raises UserError if the files they were made of have changed; `verify` compares contents.
    """
    manifest = read_json(output)
    if manifest.get("plan") == digest:
        records = records_of(job, output, digest, manifest)
        if all(has_size(output, shard["file"], shard["bytes"]) for shard in manifest["shards"]):
            try:
                check_sources(job, output, digest, records, verify)
            finally:
                clean(job, output)  # Also of an error: the output is whole, and not claimed.
            return None
        for chunk, record in records.items():
            write_json(output / f"{job.name}-{chunk:05d}.json", asdict(record))
        if manifest.get("text"):
            kept = {key: manifest.get(key) for key in ("captions", "text")}
            write_json(output / KEPT_TEXT, kept)
        (output / MANIFEST).unlink()
    found = find_finished(job, output, digest)
    check_sources(job, output, digest, found, verify)
    return found


def all_finished(job: ShardJob, output: Path, digest: str) -> list[ChunkRecord]:
    """Records of all chunks. UserError if one is missing, or if all files were dropped."""
    check_sources_unchanged(job, output, digest)
    records = list(find_finished(job, output, digest).values())
    if len(records) != job.num_chunks:
        raise UserError(
            f"[{job.command}] another process changed {output} during packing. Run the command "
            "again."
        )
    if not any(record.count for record in records):
        clean(job, output, all_of_it=True)
        row, reason = records[0].dropped[0]
        raise UserError(
            f"[{job.command}] none of the {len(job.names):,} files can be packed, and nothing was "
            f"written. Restore them; the first is {job.root / job.names[row]}: {reason}."
        )
    return records


def num_converted(output: Path) -> int:
    """Number of pictures of a finished output whose colours were converted to sRGB."""
    shards = read_json(output)["shards"]
    return sum(int(shard.get("extra", {}).get(CONVERTED, 0)) for shard in shards)


def check_output(job: ShardJob, output: Path) -> None:
    """Refuse an output that is inside the input, or holds anything but this job's files."""
    root = job.root.resolve()
    if output.resolve() == root or root in output.resolve().parents:
        raise UserError(
            f"[{job.command}] out={output} is inside the input {job.root}, so the shards "
            "would become part of it. Choose another --out."
        )
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"[{job.command}] out={output} is a file. Choose another --out.")
    stated = read_json(output)
    if stated and stated.get("plan") != job.digest():
        raise UserError(
            f"[{job.command}] out={output} holds another dataset. Delete it or choose another "
            "--out."
        )
    written = f"{CLAIM}|{DROPPED}|{MANIFEST}|{SOURCES}|{re.escape(CAPTIONS)}|{re.escape(PICTURES)}"
    written += f"|{TEXT_FILES}|{re.escape(LOOKS)}|{Path(LOOKS).stem}-\\d{{5,}}\\.jsonl"
    known = rf"({re.escape(job.name)}{SHARD_FILES}|{written})(\..*\.partial|\.partial)?"
    if stated or (output / CLAIM).is_file():
        known += f"|{TEMPORARY}"
    strange = [path.name for path in output.iterdir() if not re.fullmatch(known, path.name)]
    if strange:
        raise UserError(
            f"[{job.command}] out={output} is not empty: it holds {sorted(strange)[0]}. Choose "
            "another --out."
        )
    if any(output.glob(f"{job.name}-*")) and not stated and not (output / CLAIM).is_file():
        raise UserError(
            f"[{job.command}] out={output} holds shards of unknown origin, without a "
            f"{MANIFEST}. Delete it or choose another --out."
        )


def has_size(output: Path, file: str, size: int) -> bool:
    """Return True if a shard exists with the expected size."""
    return (output / file).is_file() and (output / file).stat().st_size == size


def records_of(
    job: ShardJob, output: Path, digest: str, manifest: dict[str, Any]
) -> dict[int, ChunkRecord]:
    """Records of the chunks of a finished dataset, from its manifest.

    A chunk is missing, and is packed again, if the list of its dropped files is lost.
    """
    reasons = reasons_of(output / DROPPED, len(job.names))
    rows = enumerate(job.names) if reasons else ()
    dropped = {row: reasons[name] for row, name in rows if name in reasons}
    shards = {shard["file"]: shard for shard in manifest["shards"]}
    records = {}
    for chunk in range(job.num_chunks):
        stem = f"{job.name}-{chunk:05d}"
        lost = [(row, dropped[row]) for row in job.rows(chunk) if row in dropped]
        shard = shards.get(f"{stem}.safetensors", {"file": "", "count": 0, "bytes": 0})
        if shard["count"] // job.copies + len(lost) == len(job.rows(chunk)):
            known = {key: shard[key] for key in (*SHARD_KEYS, "extra") if key in shard}
            records[chunk] = ChunkRecord(digest, **({"sha256": ""} | known), dropped=lost)
    return records


def reasons_of(report: Path, rows: int) -> dict[str, str]:
    """File -> reason why it was dropped; {} if the list is lost. UserError if it is damaged."""
    if not report.is_file():
        return {}
    # Of a hundred million pictures it may be gigabytes.
    drops = user_text.read_json(report, str(report), user_text.MAX_BYTES + 1024 * rows)
    try:
        return {str(entry["file"]): str(entry["reason"]) for entry in drops}
    except (LookupError, TypeError):
        raise UserError(
            f"{report} is no list of dropped files. Delete it: their shards are made again."
        ) from None


def find_finished(job: ShardJob, output: Path, digest: str) -> dict[int, ChunkRecord]:
    """Return the records of finished chunks, from this run or an earlier one."""
    found = {}
    for chunk in range(job.num_chunks):
        record = read_record(output, f"{job.name}-{chunk:05d}")
        if record and record.plan == digest:
            found[chunk] = record
    return found


def write_all(
    job: ShardJob,
    output: Path,
    digest: str,
    records: list[ChunkRecord],
    more: dict[str, Any] | None = None,
) -> None:
    """Write the list of dropped files and then the manifest; delete the chunk records.

    `more`: further keys of the manifest.
    """
    names = job.names
    dropped = [
        {"file": names[row], "reason": reason}
        for record in records
        for row, reason in record.dropped
    ]
    if dropped:
        write_json(output / DROPPED, dropped)
    of_all, of_each = job.shapes_of(records)
    shards = [
        {key: getattr(record, key) for key in SHARD_KEYS}
        | own
        | ({"extra": record.extra} if record.extra else {})
        for record, own in zip(records, of_each, strict=True)
        if record.file
    ]
    manifest: dict[str, Any] = {
        "format": job.format,
        **job.about,
        **(more or {}),
        **of_all,
        "dtype": job.dtype,
        "count": sum(record.count for record in records),
        "dropped": len(dropped),
        "plan": digest,
        **kept_text(output, (more or {}).get("captions")),
        "shards": shards,
    }
    check_manifest(manifest, output / MANIFEST)  # The check of opening a dataset.
    write_json(output / MANIFEST, manifest)
    clean(job, output)


def kept_text(output: Path, captions: Any) -> dict[str, Any]:
    """The manifest's `text` before shards were lost; {} if there was none, or of other captions."""
    try:
        kept = user_text.read_json(output / KEPT_TEXT, str(output / KEPT_TEXT))
        return {"text": kept["text"]} if kept["captions"] == captions else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def clean(job: ShardJob, output: Path, all_of_it: bool = False) -> None:
    """Delete the files kept for resuming; with `all_of_it`, also the shards and the folder."""
    endings = "json|safetensors" if all_of_it else "json"
    leftover = (
        rf"{re.escape(job.name)}-\d{{5,}}\.({endings})|.*\.partial|{re.escape(CLAIM)}|{TEMPORARY}"
        rf"|{re.escape(KEPT_TEXT)}"
    )
    if all_of_it:
        leftover += f"|{SOURCES}"
    # pack.json last: shards without it are refused.
    for path in sorted(output.iterdir(), key=lambda path: path.name == CLAIM):
        if re.fullmatch(leftover, path.name):
            path.unlink()
    if all_of_it:
        with suppress(OSError):  # Not empty: it holds files of the user.
            output.rmdir()


def classes_without_samples(job: ShardJob, dropped: list[tuple[int, str]]) -> list[int]:
    """Return the classes whose files were all dropped."""
    labels = job.labels
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[[row for row, _ in dropped]] = False
    had, left = (set(np.unique(some).tolist()) for some in (labels[labels >= 0], labels[kept]))
    return sorted(had - left)
