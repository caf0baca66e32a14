"""What the datasets of tokens share: their keys, and files that are checked before training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from titan_dit.config.section import UserError
from titan_dit.data.base import BadSampleError, DataConfig, Source
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.keys import TokensKeys
from titan_dit.data.token_part import PART, TokenPart, part_of
from titan_dit.data.tokenizer_file import TokenizerFile, read_tokenizer
from titan_dit.system.progress import ProgressLine, count

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
        vocabulary = self.vocabulary or (tokenizer.vocabulary if tokenizer else 0)
        if tokenizer and vocabulary < tokenizer.vocabulary:
            raise UserError(
                f"[data] vocabulary={vocabulary} is less than the {tokenizer.vocabulary} tokens of "
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
