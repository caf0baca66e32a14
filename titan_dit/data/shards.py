"""Rows of safetensors shards, read into a batch's buffer.

No memory map: its pages are read one after another, 4 KiB at a time, when rows are random, and a
read error ends the process. Here a row is one read, many rows are requested before the first one is
waited for, and an error names file and row.

A shard is the header's length (8 bytes), the header as JSON, and the bytes of the tensors.
"""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped

from titan_dit.config.section import UserError

LENGTH = 8
MAX_BYTES = 1 << 20
"""Maximum bytes of a header: a shard has two to five tensors."""


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    """Dtype in the format's words: F16."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""

    def __str__(self) -> str:
        """Format for error messages."""
        return f"{self.name} {self.dtype} {list(self.shape)} from byte {self.start:,}"


def read_header(descriptor: int) -> tuple[StoredTensor, ...]:
    """The tensors of an open file, by name. Raises ValueError if it has no valid header."""
    size = int.from_bytes(os.pread(descriptor, LENGTH, 0), "little")
    end = LENGTH + size
    if size > MAX_BYTES or end > os.fstat(descriptor).st_size:
        raise ValueError("no safetensors header")
    try:
        header = json.loads(os.pread(descriptor, size, LENGTH))
        return tuple(
            StoredTensor(
                name, entry["dtype"], tuple(entry["shape"]), end + entry["data_offsets"][0]
            )
            for name, entry in sorted(header.items())
            if name != "__metadata__"
        )
    except (AttributeError, LookupError, RecursionError, TypeError):
        raise ValueError("no safetensors header") from None


AHEAD_BYTES = 64 << 20
"""Bytes that are requested before the first read is waited for."""
MAX_BUFFERS = 1024
"""Maximum buffers per read: Linux's IOV_MAX."""
MIN_OPEN, MAX_OPEN = 16, 1 << 16
"""Minimum and maximum open files of a dataset. titan_dit.ranks.open_files counts the minimum,
for two datasets."""
SPARED = 1 << 15
"""Open files left to the rest of the process: more than a rank of 10,000 needs (docs/scale.md)."""


@dataclass(frozen=True)
class RowFile:
    """A file of rows of equal size, one after another."""

    path: Path
    start: int
    """Offset of the first row, in bytes."""
    size: int
    """Bytes of the file."""
    modified_ns: int
    """Modification time in ns."""
    tensors: tuple[StoredTensor, ...] = ()
    """Tensors of its header. If empty, a file with another modification time is refused."""


@dataclass
class RowRead:
    """Neighbouring rows of one file, and the buffers that they are read into."""

    file: int
    offset: int
    """Offset in the file of the first byte that is not read yet."""
    buffers: list[memoryview]


class ShardRows:
    """Reads rows of several files; keeps at most `max_open()` of them open."""

    def __init__(
        self,
        files: Sequence[RowFile],
        row_bytes: int | Sequence[int],
        stride: int | None = None,
        beside: ShardRows | None = None,
    ) -> None:
        """`row_bytes`: of all files, or of each; files that are read together have the same.

        `stride`: bytes between the starts of two rows; less than `row_bytes` if rows overlap.
        `beside`: rows of another tensor of the same files, which share their descriptors.
        """
        self.descriptors: dict[int, int] = {} if beside is None else beside.descriptors
        """File number -> descriptor, the first opened first."""
        self.files, self.stride = files, stride
        self.row_bytes = [row_bytes] * len(files) if isinstance(row_bytes, int) else row_bytes
        self.starts = np.array([file.start for file in files], dtype=np.int64)
        self.most_open = max_open()
        self.can_ask = True
        """False if the file system, such as NFS, does not say what is cached."""

    def __del__(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])

    def read(
        self, file: Int64[np.ndarray, " b"], row: Int64[np.ndarray, " b"], out: memoryview
    ) -> None:
        """Fill `out`, bytes, with row[i] of file[i] for every i. Raises UserError.

        Rows are read in the order of the files, not of the batch.
        """
        self.read_each(self.reads(file, row, out))

    def read_each(self, reads: Iterable[tuple[int, int, list[memoryview]]]) -> None:
        """Fill the buffers of each (file, offset in bytes, buffers). Raises UserError."""
        waiting: list[RowRead] = []
        ahead = 0
        for number, offset, buffers in reads:
            if self.is_cached(number, offset, buffers):
                continue
            waiting.append(RowRead(number, offset, buffers))
            ahead += sum(map(len, buffers))
            if ahead >= AHEAD_BYTES:
                self.fill(waiting)
                waiting, ahead = [], 0
        self.fill(waiting)

    def reads(
        self, file: Int64[np.ndarray, " b"], row: Int64[np.ndarray, " b"], out: memoryview
    ) -> Iterator[tuple[int, int, list[memoryview]]]:
        """Yield (file, offset, buffers) in the order of the files; neighbours are one read."""
        if not len(file):
            return
        order, size = np.lexsort((row, file)), self.row_bytes[int(file[0])]
        stride = self.stride or size
        file, row = file[order], row[order]
        files, offsets = file.tolist(), (self.starts[file] + row * stride).tolist()
        buffers = [out[i * size : (i + 1) * size] for i in order.tolist()]
        is_new = (np.diff(file) != 0) | (np.diff(row) != 1) | (stride != size)
        if is_new.all():  # As good as always when rows are random.
            yield from zip(files, offsets, ([buffer] for buffer in buffers), strict=True)
            return
        is_new[MAX_BUFFERS - 1 :: MAX_BUFFERS] = True
        for begin, end in pairwise([0, *(np.flatnonzero(is_new) + 1).tolist(), len(order)]):
            yield files[begin], offsets[begin], buffers[begin:end]

    def is_cached(self, number: int, offset: int, buffers: list[memoryview]) -> bool:
        """Read the row from the page cache; if it is not there, let the kernel begin to read it."""
        descriptor = self.descriptors.get(number) or self.descriptor(number)
        size = sum(map(len, buffers))
        if self.can_ask:
            try:
                if os.preadv(descriptor, buffers, offset, os.RWF_NOWAIT) == size:
                    return True
            except BlockingIOError:
                pass
            except OSError as error:
                # A bad block is reported by the read that waits. With any other error the file
                # system, the kernel or a sandbox does not know the flag.
                self.can_ask = error.errno == errno.EIO
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        return False

    def fill(self, waiting: list[RowRead]) -> None:
        """Complete the reads, waiting for the disk.

        Raises UserError for a row that cannot be read.
        """
        for read in waiting:
            while read.buffers:
                try:
                    num = os.preadv(self.descriptor(read.file), read.buffers, read.offset)
                except OSError as error:
                    raise self.failed(read, f"cannot be read: {error.strerror}") from None
                if not num:
                    raise self.failed(read, "is missing: the file has been cut off")
                advance(read, num)

    def failed(self, read: RowRead, what: str) -> UserError:
        """The error for a row that could not be read."""
        file = self.files[read.file]
        row = (read.offset - file.start) // (self.stride or self.row_bytes[read.file])
        return UserError(f"[data] {file.path}: row {row} {what}. Check the disk, restore the file.")

    def descriptor(self, number: int) -> int:
        """The descriptor of a file, which is opened if needed."""
        if (known := self.descriptors.get(number)) is not None:
            return known
        while len(self.descriptors) >= self.most_open:
            os.close(self.descriptors.pop(next(iter(self.descriptors))))
        self.descriptors[number] = opened = open_unchanged(self.files[number])
        return opened


def max_open() -> int:
    """Maximum open files of a dataset: more if the limit is far above a rank's needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = MAX_OPEN if soft == resource.RLIM_INFINITY else (soft - SPARED) // 4
    return min(max(MIN_OPEN, spare), MAX_OPEN)


def open_unchanged(file: RowFile) -> int:
    """Open a file to read random rows. Raises UserError if it is missing or has changed."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"[data] {file.path}: cannot be opened: {error.strerror}. Restore it on this node."
        ) from None
    found = os.fstat(descriptor)
    if (found.st_size, found.st_mtime_ns) != (file.size, file.modified_ns):
        try:
            check_contents(file, descriptor, found)
        except UserError:
            os.close(descriptor)
            raise
    # Else neighbours in a batch look like a file that is read to its end, and it is read ahead.
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def check_contents(file: RowFile, descriptor: int, found: os.stat_result) -> None:
    """Raise UserError for a file with another length or other tensors.

    Only its modification time may differ.
    """
    now: tuple[StoredTensor, ...] = ()
    with suppress(ValueError, OSError):
        now = read_header(descriptor)
    if found.st_size != file.size:
        change = f"{found.st_size:,} bytes instead of {file.size:,}"
    elif not file.tensors:
        change = "another time of modification"
    elif not now or now != file.tensors:
        held = [" and ".join(map(str, tensors)) or "no header" for tensors in (now, file.tensors)]
        change = " instead of ".join(held)
    else:
        return
    raise UserError(
        f"[data] {file.path}: the file has changed since the run began: {change}; modified "
        f"{moment(found.st_mtime_ns)}, not {moment(file.modified_ns)}. Restore the file, then run "
        "the same command again."
    )


def moment(nanoseconds: int) -> str:
    """A modification time as text, UTC."""
    return f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f}"


def advance(read: RowRead, num: int) -> None:
    """Drop the first `num` bytes: the system may read fewer than requested."""
    read.offset += num
    while read.buffers and num >= len(read.buffers[0]):
        num -= len(read.buffers.pop(0))
    if num:
        read.buffers[0] = read.buffers[0][num:]


def bytes_of(array: Shaped[np.ndarray, "..."]) -> memoryview:
    """The bytes of a contiguous array, writable."""
    return array.reshape(-1).view(np.uint8).data
