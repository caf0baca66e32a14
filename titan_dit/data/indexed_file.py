"""Megatron's indexed datasets: token ids in PREFIX.bin, sequences and documents in PREFIX.idx.

PREFIX.bin is the ids of all sequences, one after another. PREFIX.idx, little-endian:

  9 bytes   MMIDIDX and two zeros
  uint64    version, 1
  uint8     dtype of the ids, a key of `DTYPES`
  uint64    number of sequences s
  uint64    number of documents d, plus 1
  int32     [s] tokens of each sequence
  int64     [s] byte of PREFIX.bin where each sequence begins
  int64     [d + 1] first sequence of each document; the last is s
  int8      [s] mode of each sequence; of multimodal datasets only, not read

A document of a GPT dataset is usually one sequence; of a BERT dataset its sentences.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from titan_dit.config.section import UserError
from titan_dit.system.files import replacing

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = dict(enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), 1))
SMALL_VOCABULARY = 65_500
"""Vocabularies below this size are stored as uint16, as in Megatron."""
PART = 1 << 22
"""Sequences per check."""
AGAIN = "Tokenize the text again, or copy both files again."

Ids: TypeAlias = NDArray[Any]
Counts: TypeAlias = NDArray[np.integer[Any]]


def bin_of(prefix: Path) -> Path:
    """Path of the .bin file, which holds the ids."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_of(prefix: Path) -> Path:
    """Path of the .idx file, which holds the lengths of sequences and documents."""
    return prefix.with_name(f"{prefix.name}.idx")


def dtype_for(vocabulary: int) -> np.dtype[Any]:
    """Megatron's dtype for ids below `vocabulary`."""
    return np.dtype("<u2" if vocabulary < SMALL_VOCABULARY else "<i4")


class IndexedFile:
    """Random access to sequences and documents; both files are memory-mapped.

    Raises UserError if a file is missing, is no indexed dataset, or is cut off.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix, self.bin, self.idx = prefix, bin_of(prefix), idx_of(prefix)
        for file, other in ((self.idx, self.bin), (self.bin, self.idx)):
            if not file.is_file():
                there = f"{other.name} is there, but {file.name} is missing. Copy it, too."
                no = "there is neither a .idx nor a .bin. Give the path without its suffix."
                raise UserError(f"[data] {prefix}: {there if other.is_file() else no}")
        index = np.memmap(self.idx, mode="r") if self.idx.stat().st_size else np.empty(0, np.uint8)
        if len(index) < HEADER.size or bytes(index[: len(MAGIC)]) != MAGIC:
            raise UserError(
                f"[data] {self.idx}: not the index of a Megatron dataset: it does not begin with "
                "MMIDIDX. `data tokenize` writes one."
            )
        _, version, code, num_sequences, num_starts = HEADER.unpack(index[: HEADER.size].tobytes())
        if (
            version != VERSION
            or code not in DTYPES
            or DTYPES[code].startswith("f")
            or not num_starts
        ):
            raise UserError(
                f"[data] {self.idx}: version {version} with dtype {code} and {num_starts:,} "
                f"document starts is not supported. {AGAIN}"
            )
        self.dtype = np.dtype(f"<{DTYPES[code]}")
        ends = np.cumsum([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_starts])
        if len(index) not in (ends[-1], ends[-1] + num_sequences):
            raise UserError(
                f"[data] {self.idx}: {len(index):,} bytes, but {int(ends[-1]):,} are needed for "
                f"{num_sequences:,} sequences and {num_starts - 1:,} documents. {AGAIN}"
            )
        self.lengths: Counts = index[ends[0] : ends[1]].view("<i4")
        self.pointers: Counts = index[ends[1] : ends[2]].view("<i8")
        self.documents: Counts = index[ends[2] : ends[3]].view("<i8")
        """First sequence of each document, and the number of sequences."""
        size = self.bin.stat().st_size
        wanted = self.start_of(num_sequences) * self.dtype.itemsize
        if size != wanted or self.documents[-1] != num_sequences:
            raise UserError(
                f"[data] {self.bin}: {size:,} bytes, but {self.idx.name} counts {wanted:,} in "
                f"{num_sequences:,} sequences. {AGAIN}"
            )
        self.ids: Ids = np.memmap(self.bin, self.dtype, "r") if size else np.empty(0, self.dtype)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> Ids:
        """The ids of a sequence, a view of the mapped file."""
        first = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.ids[first : first + int(self.lengths[sequence])]

    def start_of(self, sequence: int) -> int:
        """Number of tokens before a sequence; for `len(self)`, the number of all tokens."""
        if sequence < len(self):
            return int(self.pointers[sequence]) // self.dtype.itemsize
        if not len(self):
            return 0
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1])

    def tokens_of(self, first: int, end: int) -> tuple[int, int]:
        """(first, last + 1) token of the documents `first` to `end` - 1."""
        return self.start_of(int(self.documents[first])), self.start_of(int(self.documents[end]))

    def document_at(self, token: int) -> int:
        """The document that holds a token."""
        sequence = np.searchsorted(self.pointers, token * self.dtype.itemsize, side="right") - 1
        return int(np.searchsorted(self.documents, sequence, side="right")) - 1

    def check(self) -> None:
        """Raise UserError unless sequences and documents are contiguous; reads the whole index.

        Windows that span several sequences need it.
        """
        follow = not self.documents[0] and not (len(self) and self.pointers[0])
        for first in range(0, self.num_documents, PART):
            starts = self.documents[first : first + PART + 1]
            follow = follow and bool((starts[1:] >= starts[:-1]).all())
        for first in range(0, len(self) - 1, PART):
            starts = self.pointers[first : first + PART + 1]
            sizes = self.lengths[first : first + len(starts) - 1] * np.int64(self.dtype.itemsize)
            follow = follow and bool((np.diff(starts) == sizes).all())
        if not follow:
            raise UserError(
                f"[data] {self.idx}: its sequences do not lie one after another in "
                f"{self.bin.name}: damaged, or not written by Megatron. {AGAIN}"
            )


class IndexedWriter:
    """Writer of both files, byte-equal to megatron-core's `IndexedDatasetBuilder`.

    A context manager. The files get their names at its end, the index last; not after an error.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self.lengths: list[Counts] = []
        self.documents: list[Counts] = []
        self.num_tokens = 0

    def __enter__(self) -> IndexedWriter:
        """Open temporary files next to the final ones."""
        with ExitStack() as opening:
            self.idx = opening.enter_context(replacing(idx_of(self.prefix)))
            ids = opening.enter_context(replacing(bin_of(self.prefix)))
            self.ids = opening.enter_context(ids.open("wb"))
            self.open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Write the index, and rename the files."""
        if error is None:
            self.idx.write_bytes(self.index())
        return bool(self.open.__exit__(kind, error, traceback))

    def add(
        self, ids: Ids, lengths: Sequence[int] | Counts, sequences: Sequence[int] | Counts
    ) -> None:
        """Append documents.

        `ids`: all ids. `lengths`: tokens of each sequence. `sequences`: sequences of each document.
        """
        assert len(ids) == np.sum(lengths)
        assert len(lengths) == np.sum(sequences)
        self.ids.write(np.ascontiguousarray(ids, self.dtype).tobytes())
        self.lengths.append(np.asarray(lengths, np.int32))
        self.documents.append(np.asarray(sequences, np.int64))
        self.num_tokens += len(ids)

    def index(self) -> bytes:
        """The contents of the index."""
        lengths = np.concatenate([np.empty(0, "<i4"), *self.lengths])
        documents = np.concatenate([np.zeros(1, "<i8"), *self.documents]).cumsum()
        ends = lengths.cumsum(dtype=np.int64) * self.dtype.itemsize
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        (code,) = (code for code, name in DTYPES.items() if np.dtype(f"<{name}") == self.dtype)
        head = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents))
        parts = lengths.astype("<i4"), pointers.astype("<i8"), documents.astype("<i8")
        return head + b"".join(part.tobytes() for part in parts)
