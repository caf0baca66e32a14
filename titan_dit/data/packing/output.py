"""The output folder of `data pack` and `data encode`: shards, and what resumes them.

A job's chunks become shards, each written atomically with a record. Until the manifest makes the
output whole, `pack.json` holds the job's digest and is locked; `sources.json` records which files
the shards were made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Int64
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config import user_text
from titan_dit.config.section import UserError, few
from titan_dit.data.caption_embeddings import CAPTIONS
from titan_dit.data.manifest import CLAIM, MANIFEST, SHARD_KEYS, check_manifest, read_json
from titan_dit.ranks import disk_errors
from titan_dit.system import stdio
from titan_dit.system.file_lock import open_locked
from titan_dit.system.files import sync_folder, write_json, write_whole

DROPPED, PICTURES = "dropped.json", "pictures.jsonl"
SOURCES = "sources.json"
SHARD_BYTES = 128 << 20
SHARD_FILES = r"-\d{5,}\.(safetensors|json)"
KEPT_TEXT = "text-kept.json"
"""The manifest's keys of captions and their embeddings, while lost shards are written again."""
TEXT_FILES = r"text(-index\.safetensors|-kept\.json|-\d{5,}\.(safetensors|json)|\.json)"
"""Embeddings of captions, see `data.caption_embeddings`, and the files kept for resuming them."""
LOOKS = "videos.jsonl"
"""File of what the videos of the input hold; ranks write videos-00000.jsonl."""
TEMPORARY = r"\.tmp\w{6}"
"""Temporary files that an earlier version left when it was killed."""
CONVERTED = "to_srgb"
"""Key of a chunk's record: number of pictures whose colours were converted."""
ShapeKeys: TypeAlias = tuple[dict[str, Any], Sequence[dict[str, Any]]]
"""Keys of a manifest about the shape of rows, and keys of each chunk's shard."""
Drops: TypeAlias = list[tuple[int, str]]
"""(index in the listing, reason) of files that are left out."""


@dataclass(frozen=True, kw_only=True)
class ShardJob(ABC):
    """Listed files in chunks, each of which becomes a shard; all that determines their bytes."""

    command: ClassVar[str]
    """The command, for messages."""
    format: ClassVar[str]
    """Format of the manifest."""

    root: Path
    """The input."""
    name: str
    """Prefix of the files: NAME-00000.safetensors."""
    shape: tuple[int, ...]
    """Shape of a row; the largest one if they differ."""
    dtype: str
    about: dict[str, Any]
    """Further keys of the manifest."""
    shard_size: int
    """Listed files per shard, including dropped ones."""

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The listed files."""

    @property
    @abstractmethod
    def labels(self) -> Int64[Tensor, " n"]:
        """Class of each file; -1 for none."""

    @property
    def copies(self) -> int:
        """Rows per listed file."""
        return 1

    @property
    def num_chunks(self) -> int:
        """Number of chunks; one whose files are all dropped gets no shard."""
        return -(-len(self.names) // self.shard_size)

    def rows(self, chunk: int) -> Sequence[int]:
        """Listing indices of a chunk's files."""
        first = chunk * self.shard_size
        return range(first, min(first + self.shard_size, len(self.names)))

    def shapes_of(self, records: Sequence[ChunkRecord]) -> ShapeKeys:
        """Keys of the manifest about the shape of rows, and keys of each chunk's shard."""
        return {"shape": list(self.shape)}, [{}] * len(records)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that determines the shards' bytes, except the files' contents.

        It does not depend on the folders of input and output.
        """
        return self.compute_digest()

    @abstractmethod
    def compute_digest(self) -> str:
        """The value of `digest`."""

    @abstractmethod
    def stamp(self, row: int) -> tuple[int, int]:
        """(length, modification time) of a listed file."""

    @abstractmethod
    def has_made(self, record: ChunkRecord, chunk: int) -> bool:
        """True if the files still have the contents that the chunk was made of."""


@dataclass
class ChunkData:
    """A chunk, read or encoded."""

    number: int
    kept: list[int]
    """Listing indices of the files that have rows."""
    dropped: Drops
    tensors: dict[str, Tensor]
    """Rows by name, `copies` of each kept file: "latent", and what is stored beside it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """See `ChunkRecord`."""


@dataclass(frozen=True)
class ChunkRecord:
    """The result of a chunk. `file` is empty if all its files were dropped."""

    plan: str
    file: str
    count: int
    bytes: int
    sha256: str
    dropped: Drops
    extra: dict[str, Any] = field(default_factory=dict)
    """Further values: sums over the chunk of `data encode`, number of converted pictures."""


@contextmanager
def claimed(job: ShardJob, output: Path) -> Iterator[None]:
    """Hold the lock of an output folder. Raises UserError for one that another job has begun."""
    descriptor = lock(output, job.command)
    try:
        held = os.read(descriptor, 4096)
        if held and job.digest.encode() not in held:
            raise UserError(
                f"[{job.command}] out={output} holds unfinished shards of other files or options. "
                "Delete it or choose another --out."
            )
        if not held:
            # Written in place: a rename would replace the locked file.
            values = {"plan": job.digest, "command": job.command}
            os.write(descriptor, (json.dumps(values) + "\n").encode())
            os.fsync(descriptor)
            sync_folder(output)
        yield
    finally:
        os.close(descriptor)


def lock(output: Path, command: str, claim: str = CLAIM) -> int:
    """Open and lock `pack.json`, or another file of an output; return its file descriptor.

    Raises UserError if another process holds the lock.
    """
    try:
        return open_locked(output / claim)
    except BlockingIOError:
        raise UserError(
            f"[{command}] another process is packing into {output}. Wait for its end, or give "
            "another folder: --out."
        ) from None


def check_output(job: ShardJob, output: Path) -> None:
    """Raise UserError if the output is inside the input, or holds more than this job's files."""
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
    if stated and stated.get("plan") != job.digest:
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


def write_chunk(job: ShardJob, output: Path, chunk: ChunkData) -> None:
    """Write a chunk's shard and its record; no shard if all its files were dropped.

    Raises UserError if they cannot be written.
    """
    write_record(
        output,
        f"{job.name}-{chunk.number:05d}",
        shard_of(job, chunk) if chunk.kept else b"",
        command=job.command,
        plan=job.digest,
        count=len(chunk.kept) * job.copies,
        dropped=chunk.dropped,
        extra=chunk.extra if chunk.kept else {},
    )


def shard_of(job: ShardJob, chunk: ChunkData) -> bytes:
    """The bytes of a shard."""
    labels = job.labels[torch.tensor(chunk.kept)].repeat_interleave(job.copies)
    rows = {name: tensor.contiguous() for name, tensor in chunk.tensors.items()}
    # Not save_file: its files have mode 0600, and if killed it leaves a temporary file.
    data: bytes = safetensors.save({**rows, "label": labels})
    return data


def write_record(
    output: Path,
    stem: str,
    data: bytes,
    *,
    command: str,
    plan: str,
    count: int,
    dropped: Drops,
    extra: dict[str, Any],
) -> None:
    """Write STEM.safetensors, unless `data` is empty, and its record: each whole or not at all.

    Raises UserError if they cannot be written.
    """
    record = ChunkRecord(plan, "", 0, 0, "", dropped, extra)
    if data:
        file = f"{stem}.safetensors"
        with writing(output / file, command):
            write_whole(output / file, data)
        sha = hashlib.sha256(data).hexdigest()
        record = ChunkRecord(plan, file, count, len(data), sha, dropped, extra)
    with writing(output / f"{stem}.json", command):
        write_json(output / f"{stem}.json", asdict(record))


def writing(file: Path, command: str) -> AbstractContextManager[None]:
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


def find_finished(job: ShardJob, output: Path) -> dict[int, ChunkRecord]:
    """Return the records of finished chunks, from this run or an earlier one."""
    found = {}
    for chunk in range(job.num_chunks):
        record = read_record(output, f"{job.name}-{chunk:05d}")
        if record and record.plan == job.digest:
            found[chunk] = record
    return found


def stamps_of(job: ShardJob) -> list[str]:
    """By chunk: a digest of its files' lengths and modification times."""
    return [
        hashlib.sha256(
            " ".join(f"{job.stamp(row)}" for row in job.rows(chunk)).encode()
        ).hexdigest()[:32]
        for chunk in range(job.num_chunks)
    ]


def check_sources(
    job: ShardJob, output: Path, made: Mapping[int, ChunkRecord], verify: bool
) -> None:
    """Raise UserError if files of finished chunks have changed; else record their state.

    `verify` reads and compares contents; otherwise lengths and modification times are compared.
    """
    now, before = stamps_of(job), recorded(job, output)
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
            write_json(output / SOURCES, {"plan": job.digest, "chunks": chunks})


def check_sources_unchanged(job: ShardJob, output: Path) -> None:
    """Raise UserError if files changed while they were read."""
    pairs = zip(recorded(job, output), stamps_of(job), strict=True)
    if any(before not in (None, now) for before, now in pairs):
        raise UserError(
            f"[{job.command}] input={job.root}: files have changed while they were read. Delete "
            f"{output}, and repeat the command."
        )


def recorded(job: ShardJob, output: Path) -> list[str | None]:
    """By chunk: the recorded digest of its files for this job; None if not known."""
    file = output / SOURCES
    found = user_text.read_json(file, str(file)) if file.is_file() else None
    if isinstance(found, dict) and found.get("plan") == job.digest:
        chunks = found.get("chunks")
        if isinstance(chunks, list) and len(chunks) == job.num_chunks:
            return chunks
    return [None] * job.num_chunks


def resumed(job: ShardJob, output: Path, verify: bool) -> dict[int, ChunkRecord] | None:
    """Records of finished chunks; None if the output is whole.

    Raises UserError if the files they were made of have changed; `verify` compares contents.
    """
    manifest = read_json(output)
    if manifest.get("plan") == job.digest:
        records = records_of(job, output, manifest)
        if all(has_size(output / shard["file"], shard["bytes"]) for shard in manifest["shards"]):
            try:
                check_sources(job, output, records, verify)
            finally:
                clean(job, output)  # Also of an error: the output is whole, and not claimed.
            return None
        for chunk, record in records.items():
            write_json(output / f"{job.name}-{chunk:05d}.json", asdict(record))
        if manifest.get("text"):
            kept = {key: manifest.get(key) for key in ("captions", "text")}
            write_json(output / KEPT_TEXT, kept)
        (output / MANIFEST).unlink()
    found = find_finished(job, output)
    check_sources(job, output, found, verify)
    return found


def all_finished(job: ShardJob, output: Path) -> list[ChunkRecord]:
    """Records of all chunks. UserError if one is missing, or if all files were dropped."""
    check_sources_unchanged(job, output)
    records = list(find_finished(job, output).values())
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


def records_of(job: ShardJob, output: Path, manifest: dict[str, Any]) -> dict[int, ChunkRecord]:
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
            records[chunk] = ChunkRecord(job.digest, **({"sha256": ""} | known), dropped=lost)
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


def write_all(
    job: ShardJob,
    output: Path,
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
        "plan": job.digest,
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


def has_size(file: Path, size: int) -> bool:
    """True if a file is there and has this many bytes."""
    return file.is_file() and file.stat().st_size == size


def num_converted(output: Path) -> int:
    """Number of pictures of a finished output whose colours were converted to sRGB."""
    shards = read_json(output)["shards"]
    return sum(int(shard.get("extra", {}).get(CONVERTED, 0)) for shard in shards)


def classes_without_samples(job: ShardJob, dropped: Drops) -> list[int]:
    """Return the classes whose files were all dropped."""
    labels = job.labels
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[[row for row, _ in dropped]] = False
    had, left = (set(np.unique(some).tolist()) for some in (labels[labels >= 0], labels[kept]))
    return sorted(had - left)
