"""A worker's part of packing: chunks of a listing into shards, each whole or not there at all.

A chunk is written aside, renamed, and then vouched for by a record `NAME-00000.json`: its count,
bytes, SHA-256 and what was left out. A chunk without a record is packed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, read_latent
from titan_dit.data.listing import Listing
from titan_dit.data.manifest import write_json
from titan_dit.data.packing.images import read_image
from titan_dit.system.files import write_whole

DTYPES = {"float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8}


@dataclass(frozen=True)
class Plan:
    """All that decides what is written, and nothing else: not how many workers, not where."""

    listing: Listing
    name: str
    """What the files are called: NAME-00000.safetensors."""
    shape: tuple[int, int, int]
    dtype: str
    shard_size: int
    """Files of the listing per shard, before any is left out."""
    image_size: int | None
    about: dict[str, Any]
    """What else the manifest will say: source, num_classes, classes, scale, shift, value_range."""

    @property
    def num_chunks(self) -> int:
        """Shards, if no chunk turns out empty."""
        return -(-len(self.listing.names) // self.shard_size)

    def rows(self, chunk: int) -> range:
        """The files of a chunk, by their place in the listing."""
        first = chunk * self.shard_size
        return range(first, min(first + self.shard_size, len(self.listing.names)))

    def digest(self) -> str:
        """Equal for equal plans, wherever input and output lie."""
        listing = self.listing
        parts = (self.name, self.shape, self.dtype, self.shard_size, self.image_size, listing.kind)
        sha = hashlib.sha256(json.dumps([*parts, self.about], sort_keys=True).encode())
        sha.update(listing.names.ends.tobytes() + listing.names.block)
        sha.update(listing.labels.numpy().tobytes())
        return sha.hexdigest()

    def read(self, row: int) -> Shaped[Tensor, "c h w"]:
        """One sample in the dtype of the shards; a BadFileError says why there is none."""
        path = self.listing.root / self.listing.names[row]
        if self.listing.kind == "images":
            return read_image(path, self.image_size, self.shape)
        latent = read_latent(path, self.shape)
        packed = latent.to(DTYPES[self.dtype])
        if self.dtype == "float16" and packed.isinf().any():
            raise BadFileError("not finite in float16: above 65504. Pack with --dtype float32")
        return packed


@dataclass(frozen=True)
class ChunkRecord:
    """What became of a chunk. `file` is empty if nothing of it was fit to be packed."""

    plan: str
    file: str
    count: int
    bytes: int
    sha256: str
    dropped: list[tuple[int, str]]
    """(place in the listing, reason)."""


def pack_chunk(
    plan: Plan, digest: str, output: Path, chunk: int, tell: Callable[[int, int], None]
) -> None:
    """Read a chunk, write its shard, vouch for it; `tell` is given (more done, more dropped)."""
    rows = plan.rows(chunk)
    dropped: list[tuple[int, str]] = []
    latents = torch.empty(len(rows), *plan.shape, dtype=DTYPES[plan.dtype])
    kept: list[int] = []
    for row in rows:
        try:
            latents[len(kept)] = plan.read(row)
            kept.append(row)
        except BadFileError as error:
            dropped.append((row, str(error)))
            tell(0, 1)
        tell(1, 0)
    stem = f"{plan.name}-{chunk:05d}"
    record = ChunkRecord(digest, "", 0, 0, "", dropped)
    if kept:
        file = f"{stem}.safetensors"
        labels = plan.listing.labels[torch.tensor(kept)]
        # Not save_file: it writes 0600, and leaves a file of another name where it is killed.
        data = safetensors.save({"latent": latents[: len(kept)], "label": labels})
        with writing(output / file):
            write_whole(output / file, data)
        sha = hashlib.sha256(data).hexdigest()
        record = ChunkRecord(digest, file, len(kept), len(data), sha, dropped)
    with writing(output / f"{stem}.json"):
        write_json(output / f"{stem}.json", asdict(record))


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Say of an error which file could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"[data pack] {file} cannot be written: {error.strerror}. Free space, or mend the "
            "place, and run the same command again: it goes on from here."
        ) from None


def read_record(output: Path, stem: str) -> ChunkRecord | None:
    """The record of a finished chunk whose shard is there in full; None otherwise."""
    try:
        values: dict[str, Any] = json.loads((output / f"{stem}.json").read_text())
        values["dropped"] = [(int(row), str(why)) for row, why in values["dropped"]]
        record = ChunkRecord(**values)
        whole = not record.file or (output / record.file).stat().st_size == record.bytes
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if whole else None


def work(
    plan: Plan,
    output: Path,
    chunks: list[int],
    counts: Any,
    place: int,
    errors: Connection,
) -> None:
    """The life of a worker process: its chunks one after another, its counts in shared memory.

    An error is sent to the parent in words; without a parent the worker ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it.
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)

    def tell(done: int, dropped: int) -> None:
        counts[2 * place] += done
        counts[2 * place + 1] += dropped

    try:
        digest = plan.digest()
        for chunk in chunks:
            pack_chunk(plan, digest, output, chunk, tell)
    except (UserError, OSError) as error:
        errors.send(str(error) if isinstance(error, UserError) else f"[data pack] {error}")
        raise SystemExit(1) from None


def end_with_parent() -> None:
    """Wait for the parent's end, however it comes, and follow it."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
