"""Windows of tokens: the samples of a language model, out of Megatron's .bin and .idx."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.data.base import BadSampleError, DataConfig, DataFacts, Field, Source
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.keys import PlaysKeys, TokensKeys
from titan_dit.data.order import BlendedSource
from titan_dit.data.shard_rows import RowFile, ShardRows, bytes_of
from titan_dit.data.tokenizer_file import TokenizerFile, read_tokenizer
from titan_dit.system.progress import ProgressLine, count


@dataclass(frozen=True, kw_only=True)
class TokenFacts(DataFacts):
    """Windows of token ids; stored in checkpoints, so that text is drawn without the dataset."""

    differing: ClassVar[frozenset[str]] = DataFacts.differing | {
        "num_tokens",
        "num_left_over",
        "bytes_per_token",
    }

    sequence_length: int
    """Tokens that a window predicts; the window has one more."""
    vocabulary: int
    """All ids are below it."""
    end_of_document: int | None = None
    """Id of the token that ends a document; None if unknown."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of the text per token, the mean of this part of the dataset: it turns a loss per
    token into bits per byte. None unless the tokenizer is a byte-level one."""
    tokenizer: str = ""
    """Path of the tokenizer.json; empty if unknown."""
    num_tokens: int = 0
    """Tokens of this part of the dataset."""
    num_left_over: int = 0
    """Tokens after the last whole window of each file: never a target."""

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


CHECKED_TOKENS = 1 << 27
"""Tokens whose ids are checked at the start, over all paths."""


@dataclass(frozen=True, kw_only=True)
class IndexedData(TokensKeys, DataConfig):
    """The [data] section of a dataset that is read from a .bin and a .idx."""

    part: ClassVar[int] = 0
    """Which share of `split`: 0 for training, 1 for validation."""

    @property
    def part_name(self) -> str:
        """Of messages."""
        return ("training", "validation")[self.part]

    def open(self) -> Source:
        """Check the files, and open them."""
        return self.open_surveyed(self.survey())

    def at(self, path: str) -> IndexedData:
        """All documents of another dataset."""
        return replace(self, paths=(path,), weights=(), split=(1.0,))

    def files(self) -> TokenFiles:
        """Open the files, and read the tokenizer; UserError if they do not fit the keys."""
        if not self.paths:
            raise UserError(
                "[data] paths=[]: there is no dataset. Give the path of a .bin without its suffix: "
                "--data.paths PATH."
            )
        tokenizer = read_tokenizer(Path(self.tokenizer)) if self.tokenizer else None
        vocabulary = self.vocab_size or (tokenizer.vocabulary if tokenizer else 0)
        if tokenizer and vocabulary < tokenizer.vocabulary:
            raise UserError(
                f"[data] vocab_size={vocabulary} is less than the {tokenizer.vocabulary} tokens of "
                f"{self.tokenizer}. Leave vocabulary out, or raise it."
            )
        end = tokenizer.end_of_document if tokenizer else None
        if self.end_of_document is not None:
            end = self.end_of_document
        if end is not None and end >= vocabulary:
            raise UserError(
                f"[data] end_of_document={end} is not below vocabulary={vocabulary}. Give the id "
                "of a token, or leave it out."
            )
        opened = [part_of(Path(path), self.split, self.part) for path in self.paths]
        indexed, parts = (tuple(column) for column in zip(*opened, strict=True))
        return TokenFiles(indexed, parts, tokenizer, vocabulary, end)


@dataclass(frozen=True)
class TokenFiles:
    """Open files, a part of each, and what their ids mean."""

    indexed: tuple[IndexedFile, ...]
    parts: tuple[TokenPart, ...]
    tokenizer: TokenizerFile | None
    vocabulary: int
    """Ids must be below it."""
    end_of_document: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(map(len, self.parts))

    @property
    def digest(self) -> str:
        """What identifies the tokens of all parts, wherever the files lie."""
        contents = " ".join(f"{part.digest} {part.first} {part.end}" for part in self.parts)
        return hashlib.sha256(contents.encode()).hexdigest()

    @property
    def tokenizer_path(self) -> str:
        """Absolute, so that a run is resumed and sampled from any folder; "" without one."""
        return str(self.tokenizer.path.absolute()) if self.tokenizer else ""

    def histograms(self, verify: bool) -> Iterator[tuple[TokenPart, NDArray[np.int64]]]:
        """Yield the parts and how often each id comes; refuses ids beyond the vocabulary.

        Unless `verify`, only `CHECKED_TOKENS` tokens are counted, the first ones of each part.
        """
        most = self.num_tokens if verify else max(CHECKED_TOKENS // len(self.parts), 1)
        for file, part in zip(self.indexed, self.parts, strict=True):
            yield part, histogram(file, part, self.vocabulary, most)


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


PLAYS = Path(__file__).parent / "plays"


@dataclass(frozen=True)
class Surveyed:
    """What rank 0 finds out for all ranks."""

    parts: tuple[TokenPart, ...]
    facts: TokenFacts


@dataclass(frozen=True, kw_only=True)
class Tokens(IndexedData):
    """Token ids on disk: Megatron's .bin and .idx, as `data tokenize` writes them."""

    def survey(self) -> Surveyed:
        """Check the files and their ids."""
        length, files = self.sequence_length, self.files()
        self.check_windows(files.parts)
        sizes = files.tokenizer.token_bytes() if files.tokenizer else None
        num_bytes = 0.0
        for part, counts in files.histograms(self.verify):
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
        return Surveyed(files.parts, facts)

    def check_windows(self, parts: Sequence[TokenPart]) -> None:
        """Refuse a part without a window: every weighted one must have one, else one of all."""
        short = [part for part in parts if not part.windows(self.sequence_length)]
        if short and ((self.weights and not self.part) or len(short) == len(parts)):
            raise UserError(
                f"[data] {short[0].prefix}: its part for {self.part_name} holds "
                f"{len(short[0]):,} tokens, fewer than a window of "
                f"sequence_length={show(self.sequence_length)} + 1. Choose a `split` that leaves "
                "it documents, or a shorter sequence_length."
            )

    def open_surveyed(self, survey: Surveyed) -> TokenWindows:
        """Open the surveyed files."""
        return TokenWindows(survey, () if self.part else self.weights)

    def validation_part(self) -> Tokens:
        """The same documents' second share; weights do not apply."""
        return HeldOutTokens(**{f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class HeldOutTokens(Tokens):
    """The second share of `split`."""

    part = 1


@dataclass(frozen=True, kw_only=True)
class Plays(PlaysKeys, DataConfig):
    """Eight plays of Shakespeare as tokens of a vocabulary of 2,048; part of titan_dit.

    Documents 0 to 7 are the beginnings of the plays, 8 to 15 their last 5%.
    """

    @property
    def tokens(self) -> Tokens:
        """The files."""
        return Tokens(
            paths=(str(PLAYS / "plays_text_document"),),
            split=(8, 8),
            sequence_length=self.sequence_length,
            tokenizer=str(PLAYS / "tokenizer.json"),
            verify=True,
        )

    def open(self) -> Source:
        """Open the beginnings."""
        return self.tokens.open()

    def validation_part(self) -> DataConfig:
        """The ends."""
        return self.tokens.validation_part()


class TokenWindows(BlendedSource):
    """Random access to the windows of several files, numbered one file after another."""

    facts: TokenFacts

    def __init__(self, survey: Surveyed, weights: Sequence[float] = ()) -> None:
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
        """Read windows as int64. Raises UserError for a failed read or an id too large."""
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
        """Raise the error of the first id outside the vocabulary; names file and document."""
        for window, (path, number) in zip(ids, places, strict=True):
            part = self.parts[path]
            first = part.first + number * self.facts.sequence_length
            check_ids(window, self.facts.vocabulary, IndexedFile(part.prefix), first)

    def of_dtype(self, dtype: str) -> list[TokenPart]:
        """The parts of one dtype."""
        return [part for part in self.parts if part.dtype == dtype]


def reader_of(parts: Sequence[TokenPart], length: int) -> ShardRows:
    """Read the windows of parts of one dtype; neighbours share a token."""
    size = np.dtype(parts[0].dtype).itemsize
    files = [RowFile(part.bin, part.first * size, part.size, modified_of(part)) for part in parts]
    return ShardRows(files, (length + 1) * size, length * size)


def modified_of(part: TokenPart) -> int:
    """Time of modification of this node's file, which may be a copy of the surveyed one."""
    try:
        status = part.bin.stat()
    except OSError as error:
        raise UserError(f"[data] {part.bin}: cannot be opened: {error.strerror}.") from None
    if status.st_size != part.size:
        raise UserError(
            f"[data] {part.bin}: {status.st_size:,} bytes on this node, but {part.size:,} on the "
            "first rank's. Copy the same file to all nodes."
        )
    return status.st_mtime_ns
