"""Texts to ids: what a worker does with a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from titan_dit.data.tokenizing.chunks import Chunk
from titan_dit.data.tokenizing.texts import BadLine, texts_of


@dataclass(frozen=True)
class Recipe:
    """How texts become ids; pickled to the workers."""

    tokenizer: str
    """The contents of a tokenizer.json."""
    dtype: str
    keys: tuple[str, ...]
    end_of_document: int | None
    """Appended to every document."""
    language: str | None
    """Of the rules that split a document into sentences; None: it is one sequence."""


@dataclass(frozen=True)
class Documents:
    """Documents of one key: all ids, tokens of each sequence, sequences of each document."""

    ids: NDArray[np.integer]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """A chunk's documents by key, and what is left out."""

    by_key: dict[str, Documents]
    num_bytes: int
    """UTF-8 bytes of the texts."""
    num_empty: int
    """Documents of a key without ids."""
    bad: list[BadLine]


class Encoder:
    """Encodes chunks in one thread."""

    def __init__(self, recipe: Recipe) -> None:
        from tokenizers import Tokenizer

        self.recipe = recipe
        self.tokenizer = Tokenizer.from_str(recipe.tokenizer)
        self.split = splitter(recipe.language) if recipe.language else None

    def __call__(self, chunk: Chunk) -> Encoded:
        """Encode the documents of a chunk."""
        keys, bad, columns = self.recipe.keys, [], []
        for found in texts_of(chunk, self.recipe.keys):
            if isinstance(found, BadLine):
                bad.append(found)
            else:
                columns.append(found)
        by_key, num_empty, num_bytes = {}, 0, 0
        for key, texts in zip(keys, zip(*columns, strict=True), strict=False):
            by_key[key] = documents = self.encode(texts)
            num_empty += len(texts) - len(documents.sequences)
            num_bytes += sum(len(text.encode()) for text in texts)
        return Encoded(by_key, num_bytes, num_empty, bad)

    def encode(self, texts: Sequence[str]) -> Documents:
        """Encode documents; those without ids are left out, sentences without ids, too."""
        whole = [self.split(text) if self.split else [text] for text in texts]
        sentences = list(chain.from_iterable(whole))
        # Without offsets, which nobody needs here, it is quicker than `encode_batch`.
        found = self.tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        ids = [sentence.ids for sentence in found]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        owner = np.repeat(np.arange(len(whole)), [len(part) for part in whole])
        kept = np.flatnonzero(lengths)
        sequences = np.bincount(owner[kept], minlength=len(whole))
        last = kept[(sequences[sequences > 0]).cumsum() - 1]
        if self.recipe.end_of_document is not None:
            for place in last.tolist():
                ids[place] = [*ids[place], self.recipe.end_of_document]
            lengths[last] += 1
        total = int(lengths.sum())
        joined = np.fromiter(chain.from_iterable(ids), self.recipe.dtype, total)
        return Documents(joined, lengths[kept], sequences[sequences > 0])


def splitter(language: str) -> Callable[[str], list[str]]:
    """Split a text into sentences, by the rules of a language; spaces around them are dropped."""
    from sentencex import segment

    def split(text: str) -> list[str]:
        return [sentence.strip() for sentence in segment(language, text)]

    return split
