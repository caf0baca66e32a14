"""Text files as chunks of bytes: .jsonl and .txt, plain, compressed or in a tar.

A chunk is whole lines of JSON, or a .txt file, which is one document. Nothing is decoded here: that
is the workers' part.
"""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from titan_dit.config.section import UserError

CHUNK_BYTES = 1 << 20
"""Bytes of JSON lines in a chunk, about."""
KINDS = (
    "Give .jsonl or .txt files, also as .gz or .xz, or tars of them (.tar, .tar.gz, .tgz, .tar.xz)."
)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz")

Kind: TypeAlias = Literal["jsonl", "txt"]


@dataclass(frozen=True)
class Chunk:
    """Undecoded text of one file."""

    file: str
    """For messages; of a tar also the member."""
    kind: Kind
    first_line: int
    """Number of its first line in the file, from 1."""
    data: bytes


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


def read_chunks(paths: list[Path], command: str) -> Iterator[tuple[Chunk, int]]:
    """Yield the chunks of all files, each with the bytes of the files read until then."""
    before = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                for chunk in chunks_of(path, file):
                    yield chunk, before + file.tell()
        except (EOFError, OSError, lzma.LZMAError, tarfile.TarError, zlib.error) as error:
            raise UserError(
                f"[{command}] input={path}: damaged, cut off or not readable ({error}). Restore "
                "the file; nothing was written."
            ) from None
        before += path.stat().st_size


def chunks_of(path: Path, file: Any) -> Iterator[Chunk]:
    """Yield the chunks of an open file, or of all members of a tar that have a known kind."""
    if not path.name.lower().endswith(TARS):
        yield from chunks_in(str(path), path.name, file)
        return
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            if member.isfile() and kind_of(member.name):
                inner = tar.extractfile(member)
                assert inner
                yield from chunks_in(f"{path}/{member.name}", member.name, inner)


def chunks_in(shown: str, name: str, file: Any) -> Iterator[Chunk]:
    """Yield the chunks of an open file, decompressed by the suffix of its name."""
    kind, suffix = kind_of(name), Path(name.lower()).suffix
    assert kind
    if suffix == ".gz":
        file = gzip.GzipFile(fileobj=file)
    elif suffix == ".xz":
        file = lzma.open(file)  # noqa: SIM115 - the caller closes what is below it.
    if kind == "txt":
        yield Chunk(shown, kind, 1, file.read())
        return
    line = 1
    while data := file.read(CHUNK_BYTES):
        if not data.endswith(b"\n"):
            data += file.readline()
        yield Chunk(shown, kind, line, data)
        line += data.count(b"\n")
