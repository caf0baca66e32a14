"""A part of an indexed dataset: where its tokens lie, and what they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan_dit.data.indexed_file import IndexedFile

SAMPLED_BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Of each file, for the digest."""
PART = 1 << 22
"""Ids counted at once."""


@dataclass(frozen=True)
class TokenPart:
    """The tokens `first` to `end` - 1 of a .bin file; pickled, so ranks need not read the index."""

    prefix: Path
    bin: Path
    dtype: str
    first: int
    end: int
    size: int
    """Bytes of the file."""
    digest: str

    def __len__(self) -> int:
        """Number of tokens."""
        return self.end - self.first

    def windows(self, length: int) -> int:
        """Windows of `length` + 1 tokens, each beginning with the last token of the one before.

        So every token but the first is a target of one window. The rest is left over.
        """
        return max(len(self) - 1, 0) // length

    def left_over(self, length: int) -> int:
        """Tokens after the last window; all of them if there is no window."""
        num = self.windows(length)
        return len(self) - (num * length + 1 if num else 0)


def part_of(prefix: Path, split: tuple[float, ...], part: int) -> tuple[IndexedFile, TokenPart]:
    """Open and check a dataset; `part` is the share of `split` to take, of whole documents."""
    file = IndexedFile(prefix)
    file.check()
    ends = np.cumsum([0.0, *split]) / sum(split) * file.num_documents
    first, end = (round(float(edge)) for edge in ends[part : part + 2])
    tokens = file.tokens_of(first, end)
    size = file.bin.stat().st_size
    return file, TokenPart(prefix, file.bin, file.dtype.str, *tokens, size, digest_of(file))


def digest_of(file: IndexedFile) -> str:
    """A digest of both files: their lengths, and up to `SAMPLED_BLOCKS` blocks of each."""
    sha = hashlib.sha256()
    for path in (file.idx, file.bin):
        with path.open("rb") as opened:
            size = opened.seek(0, 2)
            sha.update(size.to_bytes(8, "little"))
            last = max(size - BLOCK_BYTES, 0)
            for at in sorted({last * i // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)}):
                opened.seek(at)
                sha.update(opened.read(BLOCK_BYTES))
    return sha.hexdigest()
