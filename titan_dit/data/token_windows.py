"""Windows of tokens, the samples of a language model, from Megatron's .bin and .idx."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.data.base import BadSampleError, DataFacts, Field
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.order import BlendedSource
from titan_dit.data.sections import IndexedData, Tokens
from titan_dit.data.shards import RowFile, ShardRows, bytes_of
from titan_dit.data.tokenizer_file import TokenizerFile, read_tokenizer
from titan_dit.system.progress import ProgressLine, count


@dataclass(frozen=True, kw_only=True)
class TokenFacts(DataFacts):
    """Metadata of windows of token ids. Checkpoints store it: text is drawn without the data."""

    differing: ClassVar[frozenset[str]] = DataFacts.differing | {
        "num_tokens",
        "num_left_over",
        "bytes_per_token",
    }

    sequence_length: int
    """Tokens that a window predicts; the window has one more."""
    vocabulary: int
    """Size of the vocabulary: all ids are below it."""
    end_of_document: int | None = None
    """Id of the token that ends a document; None if unknown."""
    bytes_per_token: float | None = None
    """Mean UTF-8 bytes per token in this part of the dataset, which turns a loss per token into
    bits per byte. None unless the tokenizer is byte-level."""
    tokenizer: str = ""
    """Path of the tokenizer.json; empty if unknown."""
    num_tokens: int = 0
    """Tokens of this part of the dataset."""
    num_left_over: int = 0
    """Tokens after the last whole window of each file; they are never targets."""

    @property
    def about(self) -> str:
        """Tokens, window and remainder, for the console."""
        return (
            f"{self.num_tokens:,} tokens in windows of {self.sequence_length:,} + 1, "
            f"{self.num_left_over:,} left over"
        )

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of a sample: the ids of a window."""
        return {"tokens": Field(torch.int64, (self.sequence_length + 1,))}


SAMPLED_BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""Blocks of each file that its digest reads, and their bytes."""
PART = 1 << 22
"""Ids per count."""


@dataclass(frozen=True)
class TokenPart:
    """The tokens `first` to `end` - 1 of a .bin file.

    It is pickled to all ranks, which so need not read the index.
    """

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
        """Number of windows of `length` + 1 tokens; each begins with the last token of another.

        So every token but the first is a target of one window, except the rest at the end.
        """
        return max(len(self) - 1, 0) // length

    def left_over(self, length: int) -> int:
        """Tokens after the last window; all tokens if there is no window."""
        num = self.windows(length)
        return len(self) - (num * length + 1 if num else 0)


def part_of(prefix: Path, split: tuple[float, ...], part: int) -> tuple[IndexedFile, TokenPart]:
    """Open and check a dataset. `part` is the number of a share of `split`, in whole documents."""
    file = IndexedFile(prefix)
    file.check()
    ends = np.cumsum([0.0, *split]) / sum(split) * file.num_documents
    first, end = (round(float(edge)) for edge in ends[part : part + 2])
    tokens = file.tokens_of(first, end)
    size = file.bin.stat().st_size
    return file, TokenPart(prefix, file.bin, file.dtype.str, *tokens, size, digest_of(file))


def digest_of(file: IndexedFile) -> str:
    """Digest of both files: their lengths, and up to `SAMPLED_BLOCKS` blocks of each."""
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


CHECKED_TOKENS = 1 << 27
"""Tokens, over all paths, whose ids are checked at the start."""


def open_files(section: IndexedData) -> TokenFiles:
    """Open the files, and read the tokenizer; UserError if they do not fit the keys."""
    if not section.paths:
        raise UserError(
            "[data] paths=[]: there is no dataset. Give the path of a .bin without its suffix: "
            "--data.paths PATH."
        )
    tokenizer = read_tokenizer(Path(section.tokenizer)) if section.tokenizer else None
    vocabulary = section.vocab_size or (tokenizer.vocabulary if tokenizer else 0)
    if tokenizer and vocabulary < tokenizer.vocabulary:
        raise UserError(
            f"[data] vocab_size={vocabulary} is less than the {tokenizer.vocabulary} tokens of "
            f"{section.tokenizer}. Leave vocab_size out, or raise it."
        )
    end = tokenizer.end_of_document if tokenizer else None
    if section.end_of_document is not None:
        end = section.end_of_document
    if end is not None and end >= vocabulary:
        raise UserError(
            f"[data] end_of_document={end} is not below vocab_size={vocabulary}. Give the id "
            "of a token, or leave it out."
        )
    opened = [part_of(Path(path), section.split, section.part) for path in section.paths]
    indexed, parts = (tuple(column) for column in zip(*opened, strict=True))
    return TokenFiles(indexed, parts, tokenizer, vocabulary, end)


@dataclass(frozen=True)
class TokenFiles:
    """Open files, a part of each, and their tokenizer."""

    indexed: tuple[IndexedFile, ...]
    parts: tuple[TokenPart, ...]
    tokenizer: TokenizerFile | None
    vocabulary: int
    """Size of the vocabulary: ids must be below it."""
    end_of_document: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(map(len, self.parts))

    @property
    def digest(self) -> str:
        """Digest of the tokens of all parts, independent of the files' paths."""
        contents = " ".join(f"{part.digest} {part.first} {part.end}" for part in self.parts)
        return hashlib.sha256(contents.encode()).hexdigest()

    @property
    def tokenizer_path(self) -> str:
        """Absolute path, so that a run can be resumed from any folder; "" without a tokenizer."""
        return str(self.tokenizer.path.absolute()) if self.tokenizer else ""

    def histograms(self, verify: bool) -> Iterator[tuple[TokenPart, NDArray[np.int64]]]:
        """Yield (part, count of each id); refuses ids outside the vocabulary.

        Unless `verify`, only the first tokens of each part are counted, `CHECKED_TOKENS` in total.
        """
        most = self.num_tokens if verify else max(CHECKED_TOKENS // len(self.parts), 1)
        for file, part in zip(self.indexed, self.parts, strict=True):
            yield part, histogram(file, part, self.vocabulary, most)


def histogram(file: IndexedFile, part: TokenPart, vocabulary: int, most: int) -> NDArray[np.int64]:
    """Count of each id in the first `most` tokens of a part; refuses ids outside the vocabulary."""
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
    """Raise BadSampleError for ids outside the vocabulary.

    `first`: the position of ids[0] in the file.
    """
    if int(ids.max()) < vocabulary and int(ids.min()) >= 0:
        return
    at = int(np.flatnonzero((ids >= vocabulary) | (ids < 0))[0])
    raise BadSampleError(
        f"[data] {file.bin}: id {int(ids[at])} at token {first + at:,}, in document "
        f"{file.document_at(first + at):,}, is outside vocab_size={vocabulary}. Give the tokenizer "
        "that made the file, or raise vocab_size, also [model]'s."
    )


@dataclass(frozen=True)
class TokenSurvey:
    """Result of rank 0's survey, for all ranks."""

    parts: tuple[TokenPart, ...]
    facts: TokenFacts


def survey(section: Tokens) -> TokenSurvey:
    """Check the files and their ids."""
    length, files = section.sequence_length, open_files(section)
    check_windows(section, files.parts)
    sizes = files.tokenizer.token_bytes() if files.tokenizer else None
    num_bytes = 0.0
    for part, counts in files.histograms(section.verify):
        if sizes is not None and counts.any():
            num_bytes += int(counts[: len(sizes)] @ sizes) / int(counts.sum()) * len(part)
    facts = TokenFacts(
        count=sum(part.windows(length) for part in files.parts),
        digest=files.digest,
        sequence_length=length,
        vocabulary=files.vocabulary,
        end_of_document=files.end_of_document,
        bytes_per_token=num_bytes / files.num_tokens if num_bytes else None,
        tokenizer=files.tokenizer_path,
        num_tokens=files.num_tokens,
        num_left_over=sum(part.left_over(length) for part in files.parts),
    )
    return TokenSurvey(files.parts, facts)


def check_windows(section: Tokens, parts: Sequence[TokenPart]) -> None:
    """Raise UserError if a file's part has no window.

    With weights every file's training part needs one, else at least one file.
    """
    short = [part for part in parts if not part.windows(section.sequence_length)]
    if short and ((section.weights and not section.part) or len(short) == len(parts)):
        raise UserError(
            f"[data] {short[0].prefix}: its part for {section.part_name} holds "
            f"{len(short[0]):,} tokens, fewer than a window of "
            f"sequence_length={show(section.sequence_length)} + 1. Choose a `split` that leaves "
            "it documents, or a shorter sequence_length."
        )


class TokenWindows(BlendedSource):
    """Random access to the windows of several files, numbered one file after another."""

    facts: TokenFacts

    def __init__(self, survey: TokenSurvey, weights: Sequence[float] = ()) -> None:
        self.survey, self.parts = survey, survey.parts
        self.facts, self.fields = survey.facts, survey.facts.fields
        length = self.facts.sequence_length
        super().__init__([part.windows(length) for part in self.parts], weights)
        # A reader has many reads of several files in flight, but of one dtype.
        dtypes = [part.dtype for part in self.parts]
        self._readers = {dtype: reader_of(self.of_dtype(dtype), length) for dtype in set(dtypes)}
        self._dtypes = np.array(dtypes)
        self._file = np.array([dtypes[:i].count(dtype) for i, dtype in enumerate(dtypes)])

    def __reduce__(self) -> tuple[type[TokenWindows], tuple[Any, ...]]:
        """Pickle what was surveyed; a spawned process opens the files itself."""
        return TokenWindows, (self.survey, self.weights)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Read one window."""
        return {name: value[0] for name, value in self.read([index]).items()}

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Read windows as int64. UserError for a failed read or an id outside the vocabulary."""
        out = np.empty((len(rows), self.facts.sequence_length + 1), np.int64)
        places = np.array([self.place_of(row) for row in rows], np.int64).reshape(-1, 2)
        paths, windows = places.T
        for dtype, reader in self._readers.items():
            inside = np.flatnonzero(self._dtypes[paths] == dtype)
            ids = np.empty((len(inside), out.shape[1]), dtype)
            reader.read(self._file[paths[inside]], windows[inside], bytes_of(ids))
            out[inside] = ids
        if out.size and not (out.max() < self.facts.vocabulary and out.min() >= 0):
            self.refuse(out, places.tolist())
        return {"tokens": torch.from_numpy(out)}

    def refuse(self, ids: NDArray[np.int64], places: Sequence[Sequence[int]]) -> None:
        """Raise the error for the first id outside the vocabulary, with its file and document."""
        for window, (path, number) in zip(ids, places, strict=True):
            part = self.parts[path]
            first = part.first + number * self.facts.sequence_length
            check_ids(window, self.facts.vocabulary, IndexedFile(part.prefix), first)

    def of_dtype(self, dtype: str) -> list[TokenPart]:
        """The parts of one dtype."""
        return [part for part in self.parts if part.dtype == dtype]


def reader_of(parts: Sequence[TokenPart], length: int) -> ShardRows:
    """A reader of the windows of parts with one dtype; neighbours share a token."""
    size = np.dtype(parts[0].dtype).itemsize
    files = [RowFile(part.bin, part.first * size, part.size, modified_of(part)) for part in parts]
    return ShardRows(files, (length + 1) * size, length * size)


def modified_of(part: TokenPart) -> int:
    """Modification time of this node's file, which may be a copy of the surveyed one.

    Raises UserError if it is missing or of another size.
    """
    try:
        status = part.bin.stat()
    except OSError as error:
        raise UserError(
            f"[data] {part.bin}: cannot be opened: {error.strerror}. Copy the file to all nodes."
        ) from None
    if status.st_size != part.size:
        raise UserError(
            f"[data] {part.bin}: {status.st_size:,} bytes on this node, but {part.size:,} on the "
            "first rank's. Copy the same file to all nodes."
        )
    return status.st_mtime_ns
