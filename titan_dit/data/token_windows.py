"""Windows of tokens: the samples of a language model, out of Megatron's .bin and .idx.

A window is n + 1 neighbouring tokens of the documents of a part, one after another: n inputs, and
the n tokens that follow them. The next window begins with the last token of this one, so each token
is a target once an epoch. A window may span documents; it never spans files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan_dit.config.section import UserError, show
from titan_dit.data.base import DataConfig, Source
from titan_dit.data.blend import BlendedSource
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.keys import PlaysKeys
from titan_dit.data.shard_rows import RowFile, ShardRows, bytes_of
from titan_dit.data.token_facts import TokenFacts
from titan_dit.data.token_files import IndexedData, check_ids
from titan_dit.data.token_part import TokenPart

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
