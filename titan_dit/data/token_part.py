"""A part of an indexed dataset: where its tokens lie, and what they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from titan_dit.config.section import UserError, show
from titan_dit.data.base import BadSampleError
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.system.progress import ProgressLine, count

SAMPLED_BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Of each file, for the digest."""
PART = 1 << 22
"""Ids counted at once."""
EMPTY = "Choose a `split` that leaves it documents, or a shorter sequence_length."


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


def survey(prefix: Path, split: tuple[float, ...], part: int) -> tuple[IndexedFile, TokenPart]:
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


def histogram(file: IndexedFile, part: TokenPart, vocabulary: int, most: int) -> NDArray[np.int64]:
    """Count each id among the first `most` tokens of a part; refuses ids beyond the vocabulary."""
    counts = np.zeros(vocabulary, np.int64)
    end = min(part.end, part.first + most)
    progress = ProgressLine(end - part.first, "tokens", what=f"checked {part.bin}", form=count)
    for first in range(part.first, end, PART):
        ids = file.ids[first : min(first + PART, end)]
        check_ids(ids, vocabulary, file, first)
        counts += np.bincount(ids, minlength=vocabulary)
        progress.add(len(ids))
    progress.end()
    return counts


def check_ids(ids: NDArray[np.integer], vocabulary: int, file: IndexedFile, first: int) -> None:
    """Refuse ids outside the vocabulary; `first` is the place of ids[0] in the file."""
    if int(ids.max()) < vocabulary and int(ids.min()) >= 0:
        return
    at = int(np.flatnonzero((ids >= vocabulary) | (ids < 0))[0])
    raise BadSampleError(
        f"[data] {file.bin}: id {int(ids[at])} at token {first + at:,}, in document "
        f"{file.document_at(first + at):,}, is outside vocabulary={vocabulary}. Give the tokenizer "
        "that made the file, or raise vocabulary, also [model]'s."
    )


def check_parts(parts: list[TokenPart], weighted: bool, length: int, what: str) -> None:
    """Refuse a part without a window: every weighted one must have one, else one of all."""
    short = [part for part in parts if not part.windows(length)]
    if short and (weighted or len(short) == len(parts)):
        raise UserError(
            f"[data] {short[0].prefix}: its part for {what} holds {len(short[0]):,} tokens, fewer "
            f"than a window of sequence_length={show(length)} + 1. {EMPTY}"
        )
