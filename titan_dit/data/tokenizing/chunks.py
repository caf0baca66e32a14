"""Read text files as chunks of bytes: .jsonl and .txt, plain, compressed or in a tar.

Unpacking is bounded: a few kilobytes may stand for gigabytes.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from titan_dit.config.section import UserError
from titan_dit.config.user_text import BadTextError, decode, is_utf8, parse_json
from titan_dit.data.tar_members import BoundedMember, refuse_sparse

GZIP, XZ, BZ2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh"
"""First bytes of each format."""
MEMORY = 256 << 20
"""Maximum memory of an .xz decoder; files of `xz -9` need a quarter."""
PACKED, UNPACKED = 64 << 10, 1 << 20
"""Bytes of a piece, packed and unpacked."""
ALLOWED = 64 << 20
"""Bytes that any stream may unpack to, whatever its ratio."""


class Unpacking(io.RawIOBase):
    """The unpacked bytes of a compressed stream, which may have several parts.

    Raises UserError above `max_ratio` times the bytes read, EOFError if the stream is cut off, and
    zlib.error, LZMAError or OSError if it is damaged.
    """

    def __init__(self, packed: Any, magic: bytes, name: str, max_ratio: int) -> None:
        self.packed, self.magic, self.name, self.max_ratio = packed, magic, name, max_ratio
        self.num_read = self.num_made = 0
        self.pieces, self.piece = self.unpacked(), memoryview(b"")

    def readable(self) -> bool:
        """True, for io.BufferedReader."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; returns the number of bytes, 0 at the end."""
        if not self.piece:
            self.piece = memoryview(next(self.pieces, b""))
        size = min(len(buffer), len(self.piece))
        buffer[:size], self.piece = self.piece[:size], self.piece[size:]
        return size

    def unpacked(self) -> Iterator[bytes]:
        """Yield the unpacked bytes in pieces. Raises EOFError if the stream ends too early."""
        waiting = self.more()
        while waiting:
            decoder = new_decoder(self.magic)
            while not decoder.eof:
                data = decoder.decompress(waiting, UNPACKED)
                rest = "unused_data" if decoder.eof else "unconsumed_tail"
                waiting = getattr(decoder, rest, b"")
                if data:
                    self.count(len(data))
                    yield data
                if decoder.eof or waiting or not getattr(decoder, "needs_input", True):
                    continue
                waiting = self.more()
                if not waiting and not data:
                    raise EOFError("the compressed stream ends too early")
            # Zeros may fill up the end of a file.
            while not (waiting := waiting.lstrip(b"\0")) and (more := self.more()):
                waiting = more

    def more(self) -> bytes:
        """The next packed bytes; empty at the end."""
        data: bytes = self.packed.read(PACKED)
        self.num_read += len(data)
        return data

    def count(self, size: int) -> None:
        """Count unpacked bytes; UserError if they are too many."""
        self.num_made += size
        if self.num_made > max(ALLOWED, self.max_ratio * self.num_read):
            raise UserError(
                f"{self.name}: unpacks to more than {self.max_ratio} times its size. If it is no "
                "forgery, raise --max-ratio."
            )


def new_decoder(magic: bytes) -> Any:
    """A decoder of one part of a stream."""
    if magic == GZIP:
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    if magic == BZ2:
        return bz2.BZ2Decompressor()
    return lzma.LZMADecompressor(memlimit=MEMORY)


CHUNK_BYTES = 1 << 20
"""Approximate bytes of JSON lines per chunk."""
KINDS = (
    "Give .jsonl or .txt files, also as .gz or .xz, or tars of them (.tar, .tar.gz, .tgz, .tar.xz)."
)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz")

Kind: TypeAlias = Literal["jsonl", "txt"]


MAGIC = {".gz": GZIP, ".xz": XZ}
DAMAGED = (lzma.LZMAError, tarfile.TarError, zlib.error)
"""Errors for a damaged file, besides Python's own."""


@dataclass(frozen=True)
class Limits:
    """Limits on a text file."""

    max_document_bytes: int = 16 << 20
    max_ratio: int = 200
    """Maximum unpacked bytes per packed byte."""


@dataclass(frozen=True)
class TextChunk:
    """Undecoded text of one file."""

    file: str
    """File name for messages; for a tar, with the member's."""
    kind: Kind
    first_line: int
    """Number of its first line in the file, from 1."""
    data: bytes
    most: int
    """Maximum bytes of a document; longer ones are left out."""


def kind_of(name: str) -> Kind | None:
    """The kind of a file by its name; None for other files."""
    name = name.lower().removesuffix(".gz").removesuffix(".xz")
    if name.endswith(".jsonl"):
        return "jsonl"
    return "txt" if name.endswith(".txt") else None


def check_inputs(paths: list[Path], command: str) -> int:
    """Total bytes of the inputs. UserError if one is missing or of an unknown kind."""
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
) -> Iterator[tuple[TextChunk, int]]:
    """Yield (chunk, bytes of files read so far) for all files.

    Raises UserError for a file that is damaged, or that changes while it is read.
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


def chunks_of(path: Path, file: Any, where: str, limits: Limits) -> Iterator[TextChunk]:
    """Yield the chunks of an open file; for a tar, of all its members of a known kind."""
    if not path.name.lower().endswith(TARS):
        yield from chunks_in(str(path), path.name, file, where, limits)
        return
    magic = next((form for form in (GZIP, XZ, BZ2) if file.peek(6).startswith(form)), b"")
    packed = unpacking(file, magic, where, limits) if magic else file
    with tarfile.open(fileobj=packed, mode="r|", tarinfo=BoundedMember) as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined] # A stream may have millions.
            if member.isfile() and kind_of(member.name):
                name = f"{path}/{member.name}"
                refuse_sparse(member, f"{where}: {member.name}")
                inner = tar.extractfile(member)
                assert inner
                yield from chunks_in(name, member.name, inner, where, limits)


def chunks_in(shown: str, name: str, file: Any, where: str, limits: Limits) -> Iterator[TextChunk]:
    """Yield the chunks of an open file, decompressed by the suffix of its name."""
    kind, suffix = kind_of(name), Path(name.lower()).suffix
    assert kind
    most = limits.max_document_bytes
    if suffix in MAGIC:
        file = unpacking(file, MAGIC[suffix], where, limits)
    if kind == "txt":
        # One byte more than is allowed: texts_of refuses it.
        yield TextChunk(shown, kind, 1, file.read(most + 1), most)
        return
    line = 1
    while data := file.read(CHUNK_BYTES):
        if not data.endswith(b"\n"):
            data += rest_of_line(file, most)
        yield TextChunk(shown, kind, line, data, most)
        line += data.count(b"\n")


def rest_of_line(file: Any, most: int) -> bytes:
    """Read up to a line's end; bytes beyond `most` are left out."""
    kept: bytes = file.readline(most + 1)
    if len(kept) > most and not kept.endswith(b"\n"):
        while (part := file.readline(CHUNK_BYTES)) and not part.endswith(b"\n"):
            pass
        kept += b"\n"
    return kept


def unpacking(file: Any, magic: bytes, where: str, limits: Limits) -> Any:
    """The unpacked bytes of a stream, buffered."""
    return io.BufferedReader(Unpacking(file, magic, where, limits.max_ratio), CHUNK_BYTES)


@dataclass(frozen=True)
class BadLine:
    """A line, or a .txt file, that is left out."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        """Format: "corpus.jsonl:12: not JSON"."""
        return f"{self.file}:{self.line}: {self.reason}"


def advice_for(bad: Sequence[BadLine]) -> str:
    """The advice if no texts were found, as a sentence."""
    of_keys = any("no key" in line.reason or "is no text" in line.reason for line in bad)
    return "--json-keys names the keys of the text." if of_keys else "Correct the files."


def texts_of(chunk: TextChunk, keys: Sequence[str]) -> Iterator[tuple[str, ...] | BadLine]:
    """Yield each document's texts, one per key, or a BadLine.

    A .txt file is one text for every key.
    """
    is_text = chunk.kind == "txt"
    parts = [chunk.data] if is_text else chunk.data.split(b"\n")
    for number, part in enumerate(parts, chunk.first_line):
        if is_text or part.strip():
            try:
                if len(part) > chunk.most:
                    raise BadTextError(f"longer than --max-document-bytes {chunk.most}")
                text = decode(part)
                yield (text,) * len(keys) if is_text else texts_in(text, keys)
            except BadTextError as error:
                yield BadLine(chunk.file, number, str(error).partition(" (")[0])


def texts_in(line: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The texts of a JSON line. Raises BadTextError."""
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise BadTextError("not an object")
    for key in keys:
        if key not in entry:
            raise BadTextError(f"no key {json.dumps(key)}")
        if type(entry[key]) is not str:
            raise BadTextError(f"{json.dumps(key)} is no text")
        if not is_utf8(entry[key]):
            raise BadTextError(f"{json.dumps(key)} has half a surrogate pair")
    return tuple(entry[key] for key in keys)
