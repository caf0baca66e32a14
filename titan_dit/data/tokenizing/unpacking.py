"""Streams of .gz, .xz and .bz2 within bounds: a few kilobytes may stand for gigabytes."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any

from titan_dit.config.section import UserError

GZIP, XZ, BZ2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh"
"""First bytes of each format."""
MEMORY = 256 << 20
"""Bytes of an .xz decoder; what `xz -9` wrote needs a quarter."""
PACKED, UNPACKED = 64 << 10, 1 << 20
"""Bytes of a piece, before and after."""
ALLOWED = 64 << 20
"""Bytes that any stream may unpack to."""


class Unpacking(io.RawIOBase):
    """The bytes of a compressed stream, which may be of several parts.

    Raises UserError if they are more than `max_ratio` times what was read, EOFError if the stream
    is cut off, zlib.error, LZMAError or OSError if it is damaged.
    """

    def __init__(self, packed: Any, magic: bytes, name: str, max_ratio: int) -> None:
        self.packed, self.magic, self.name, self.max_ratio = packed, magic, name, max_ratio
        self.num_read = self.num_made = 0
        self.pieces, self.piece = self.unpacked(), memoryview(b"")

    def readable(self) -> bool:
        """True, for io.BufferedReader."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; return its bytes, 0 at the end."""
        if not self.piece:
            self.piece = memoryview(next(self.pieces, b""))
        size = min(len(buffer), len(self.piece))
        buffer[:size], self.piece = self.piece[:size], self.piece[size:]
        return size

    def unpacked(self) -> Iterator[bytes]:
        """The bytes, in pieces."""
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
        """Further bytes of the stream; none at its end."""
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
