"""Text files as chunks of bytes: .jsonl and .txt, plain, compressed or in a tar.

A chunk is whole lines of JSON, or a .txt file, which is one document. Nothing is decoded here: that
is the workers' part.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from titan_dit.config.section import UserError
from titan_dit.data.tar_members import Member, refuse_sparse
from titan_dit.data.tokenizing.unpacking import BZ2, GZIP, XZ, Unpacking

CHUNK_BYTES = 1 << 20
"""Bytes of JSON lines in a chunk, about."""
KINDS = (
    "Give .jsonl or .txt files, also as .gz or .xz, or tars of them (.tar, .tar.gz, .tgz, .tar.xz)."
)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz")

Kind: TypeAlias = Literal["jsonl", "txt"]


MAGIC = {".gz": GZIP, ".xz": XZ}
DAMAGED = (lzma.LZMAError, tarfile.TarError, zlib.error)
"""Errors of a damaged file, beside Python's own."""


@dataclass(frozen=True)
class Limits:
    """What is refused of a file."""

    max_document_bytes: int = 16 << 20
    max_ratio: int = 200
    """Unpacked bytes for each of a compressed file."""


@dataclass(frozen=True)
class Chunk:
    """Undecoded text of one file."""

    file: str
    """For messages; of a tar also the member."""
    kind: Kind
    first_line: int
    """Number of its first line in the file, from 1."""
    data: bytes
    most: int
    """Bytes of a document: longer ones are left out."""


def kind_of(name: str) -> Kind | None:
    """The kind of a file by its name; None for other files."""
    name = name.lower().removesuffix(".gz").removesuffix(".xz")
    if name.endswith(".jsonl"):
        return "jsonl"
    return "txt" if name.endswith(".txt") else None


def check_inputs(paths: list[Path], command: str) -> int:
    """Refuse inputs that are missing or of another kind; return their bytes."""
    size = 0
    for path in paths:
        if not path.is_file():
            there = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(f"[{command}] input={path} {there}. {KINDS}")
        if not (path.name.lower().endswith(TARS) or kind_of(path.name)):
            raise UserError(f"[{command}] input={path} is of an unknown kind. {KINDS}")
        size += path.stat().st_size
    return size


def read_chunks(
    paths: list[Path], command: str, limits: Limits = Limits()
) -> Iterator[tuple[Chunk, int]]:
    """Yield the chunks of all files, each with the bytes of the files read until then.

    Raises UserError for a file that is damaged, or changes while it is read.
    """
    before = 0
    for path in paths:
        where = f"[{command}] input={path}"
        try:
            stamp = path.stat()
            with path.open("rb") as file:
                for chunk in chunks_of(path, file, where, limits):
                    yield chunk, before + file.tell()
            size = path.stat().st_size
        except UserError:
            raise
        except (ArithmeticError, EOFError, OSError, ValueError, *DAMAGED) as error:
            raise UserError(
                f"{where}: damaged, cut off or not readable ({error}). Restore the file; nothing "
                "was written."
            ) from None
        if (size, path.stat().st_mtime_ns) != (stamp.st_size, stamp.st_mtime_ns):
            raise UserError(
                f"{where} changed while it was read. Repeat the command when it is whole; nothing "
                "was written."
            )
        before += size


def chunks_of(path: Path, file: Any, where: str, limits: Limits) -> Iterator[Chunk]:
    """Yield the chunks of an open file, or of all members of a tar that have a known kind."""
    if not path.name.lower().endswith(TARS):
        yield from chunks_in(str(path), path.name, file, where, limits)
        return
    magic = next((form for form in (GZIP, XZ, BZ2) if file.peek(6).startswith(form)), b"")
    packed = unpacking(file, magic, where, limits) if magic else file
    with tarfile.open(fileobj=packed, mode="r|", tarinfo=Member) as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined] # A stream may have millions.
            if member.isfile() and kind_of(member.name):
                name = f"{path}/{member.name}"
                refuse_sparse(member, f"{where}: {member.name}")
                inner = tar.extractfile(member)
                assert inner
                yield from chunks_in(name, member.name, inner, where, limits)


def chunks_in(shown: str, name: str, file: Any, where: str, limits: Limits) -> Iterator[Chunk]:
    """Yield the chunks of an open file, decompressed by the suffix of its name."""
    kind, suffix = kind_of(name), Path(name.lower()).suffix
    assert kind
    most = limits.max_document_bytes
    if suffix in MAGIC:
        file = unpacking(file, MAGIC[suffix], where, limits)
    if kind == "txt":
        # One byte more than is allowed: texts_of refuses it.
        yield Chunk(shown, kind, 1, file.read(most + 1), most)
        return
    line = 1
    while data := file.read(CHUNK_BYTES):
        if not data.endswith(b"\n"):
            data += rest_of_line(file, most)
        yield Chunk(shown, kind, line, data, most)
        line += data.count(b"\n")


def rest_of_line(file: Any, most: int) -> bytes:
    """Read up to a line's end; of more than `most` bytes those beyond are left out."""
    kept: bytes = file.readline(most + 1)
    if len(kept) > most and not kept.endswith(b"\n"):
        while (part := file.readline(CHUNK_BYTES)) and not part.endswith(b"\n"):
            pass
        kept += b"\n"
    return kept


def unpacking(file: Any, magic: bytes, where: str, limits: Limits) -> Any:
    """The unpacked bytes of a stream."""
    return io.BufferedReader(Unpacking(file, magic, where, limits.max_ratio), CHUNK_BYTES)
