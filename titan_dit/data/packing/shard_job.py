"""A packing worker: writes chunks of a listing as shards, atomically.

A finished chunk has a record `NAME-00000.json` with its count, bytes, SHA-256 and dropped files. A
chunk without a record is packed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Int64, Shaped
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError, read_latent, read_whole, stamp_of
from titan_dit.data.latents import STORED_DTYPES
from titan_dit.data.listing import Listing
from titan_dit.data.manifest import FORMAT, write_json
from titan_dit.data.packing.images import DecodingBudget, decode_image
from titan_dit.launcher.disk_errors import line_of
from titan_dit.system.files import write_whole

MAX_PIXELS_FLAG = "--max-pixels"
CONVERTED = "to_srgb"
"""Of a record: pictures whose colours were converted."""


@runtime_checkable
class ShardPlan(Protocol):
    """A plan of shards: of `data pack` or of `data encode`."""

    @property
    def command(self) -> str:
        """The command, for messages."""

    @property
    def format(self) -> str:
        """Format of the manifest."""

    @property
    def copies(self) -> int:
        """Rows of each listed file."""

    @property
    def root(self) -> Path:
        """The input."""

    @property
    def names(self) -> Sequence[str]:
        """The listed files."""

    @property
    def labels(self) -> Int64[Tensor, " n"]:
        """Their classes; -1 for a file without one."""

    @property
    def name(self) -> str:
        """Prefix of the shards' names."""

    @property
    def shape(self) -> tuple[int, int, int]:
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

    def rows(self, chunk: int) -> range:
        """Listing indices of a chunk's files."""

    def digest(self) -> str:
        """SHA-256 of everything that determines the shards' bytes, but the files' contents."""

    def stamp(self, row: int) -> tuple[int, int]:
        """Length and time of modification of a listed file."""

    def has_made(self, record: ChunkRecord, chunk: int) -> bool:
        """True if the files' contents are those of which a chunk was made."""


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

    def rows(self, chunk: int) -> range:
        """Listing indices of a chunk's files."""
        first = chunk * self.shard_size
        return range(first, min(first + self.shard_size, len(self.names)))


@dataclass(frozen=True)
class PackPlan(Chunks):
    """Everything that determines the shards' bytes; not the workers or the output path."""

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
    """Of a picture that is read; None: by the memory that its format takes."""

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
        """Their classes."""
        return self.listing.labels

    def digest(self) -> str:
        """Return a SHA-256 of the plan, independent of the parent folders of input and output."""
        listing = self.listing
        parts = (self.name, self.shape, self.dtype, self.shard_size, self.image_size, listing.kind)
        sha = hashlib.sha256(json.dumps([*parts, self.about], sort_keys=True).encode())
        sha.update(listing.names.ends.tobytes() + listing.names.block)
        sha.update(listing.labels.numpy().tobytes())
        if self.max_pixels is not None:  # Outputs of versions without the flag go on.
            sha.update(f" {self.max_pixels}".encode())
        return sha.hexdigest()

    def budget(self, context: Any = threading) -> DecodingBudget:
        """What limits its pictures; `context` makes the locks."""
        return DecodingBudget(self.max_pixels, context, MAX_PIXELS_FLAG)

    def stamp(self, row: int) -> tuple[int, int]:
        """Length and time of modification of a listed file."""
        return stamp_of(self.listing.root / self.listing.names[row])

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
        """The rows of a chunk that can be read, their samples, the other rows with the reason.

        The last is the number of pictures whose colours were converted. `report` gets increments
        of (done, dropped).
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
            return decode_image(read_whole(path), self.image_size, self.shape, budget)
        latent = read_latent(path, self.shape)
        packed = latent.to(STORED_DTYPES[self.dtype])
        if self.dtype == "float16" and packed.isinf().any():
            raise BadFileError("not finite in float16: above 65504. Pack with --dtype float32")
        return packed, False


@dataclass(frozen=True)
class ChunkRecord:
    """Result of a chunk; `file` is empty if all its files were dropped."""

    plan: str
    file: str
    count: int
    bytes: int
    sha256: str
    dropped: list[tuple[int, str]]
    """(index in the listing, reason)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What `data encode` sums up over a chunk."""


def pack_chunk(
    plan: PackPlan,
    digest: str,
    output: Path,
    chunk: int,
    budget: DecodingBudget,
    report: Callable[[int, int], None],
) -> None:
    """Read a chunk; write its shard and record; `report` gets increments of (done, dropped)."""
    kept, latents, dropped, num_converted = plan.read_chunk(chunk, budget, report)
    extra = {CONVERTED: num_converted} if num_converted else {}
    write_chunk(plan, digest, output, chunk, kept, latents, dropped, extra)


def write_chunk(
    plan: ShardPlan,
    digest: str,
    output: Path,
    chunk: int,
    kept: Sequence[int],
    latents: Shaped[Tensor, "n c h w"],
    dropped: list[tuple[int, str]],
    extra: dict[str, Any] | None = None,
) -> None:
    """Write a chunk's shard and its record, each whole or not at all; no shard if none is `kept`.

    `latents` are the rows of the files `kept`, `plan.copies` of each.
    """
    stem = f"{plan.name}-{chunk:05d}"
    record = ChunkRecord(digest, "", 0, 0, "", dropped)
    if kept:
        file = f"{stem}.safetensors"
        data = shard_of(plan, kept, latents)
        with writing(output / file, plan.command):
            write_whole(output / file, data)
        sha = hashlib.sha256(data).hexdigest()
        count = len(kept) * plan.copies
        record = ChunkRecord(digest, file, count, len(data), sha, dropped, extra or {})
    with writing(output / f"{stem}.json", plan.command):
        write_json(output / f"{stem}.json", asdict(record))


def shard_of(plan: ShardPlan, kept: Sequence[int], latents: Shaped[Tensor, "n c h w"]) -> bytes:
    """The bytes of a shard."""
    labels = plan.labels[torch.tensor(kept)].repeat_interleave(plan.copies)
    # Not save_file: its files have mode 0600, and if killed it leaves a temporary file.
    data: bytes = safetensors.save({"latent": latents.contiguous(), "label": labels})
    return data


@contextmanager
def writing(file: Path, command: str = PackPlan.command) -> Iterator[None]:
    """Turn an OSError into a UserError that names the file and the fix."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"[{command}] {file} cannot be written: {error.strerror}. Free space or fix the disk, "
            "and run the same command again: it resumes."
        ) from None


def read_record(output: Path, stem: str) -> ChunkRecord | None:
    """Return the record of a finished chunk; None if it or its shard is missing or damaged."""
    try:
        text = (output / f"{stem}.json").read_text()
        values: dict[str, Any] = user_text.parse_json(text)
        values["dropped"] = [(int(row), str(why)) for row, why in values["dropped"]]
        record = ChunkRecord(**values)
        whole = not record.file or (output / record.file).stat().st_size == record.bytes
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if whole else None


def work(
    plan: PackPlan,
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
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)

    def report(done: int, dropped: int) -> None:
        counts[2 * place] += done
        counts[2 * place + 1] += dropped

    try:
        digest = plan.digest()
        for chunk in chunks:
            pack_chunk(plan, digest, output, chunk, budget, report)
    except (UserError, OSError) as error:
        named = line_of(error, "[data pack]") if isinstance(error, OSError) else str(error)
        errors.send(named)
        raise SystemExit(1) from None


def end_with_parent() -> None:
    """Exit when the parent process ends, even by SIGKILL."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
