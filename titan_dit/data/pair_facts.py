"""Metadata of a dataset of consecutive sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from titan_dit.data.base import DataFacts, Field

NUM_SPECIAL = 3
"""[CLS] A [SEP] B [SEP]."""


@dataclass(frozen=True, kw_only=True)
class PairFacts(DataFacts):
    """Two or more consecutive sentences of a document, to be cut into two spans."""

    differing: ClassVar[frozenset[str]] = DataFacts.differing | {"num_tokens", "num_left_out"}

    sequence_length: int
    """Tokens of a sample, with special ones and padding."""
    vocabulary: int
    """Ids are below it."""
    cls: int
    """Id of [CLS]."""
    sep: int
    """Id of [SEP]."""
    mask: int
    """Id of [MASK]."""
    pad: int = 0
    """Id of [PAD]."""
    end_of_document: int | None = None
    """Id of the token that ends a document, if the files have one: it is never masked."""
    short_share: float = 0.0
    """Share of the samples that were built with a shorter target length."""
    tokenizer: str = ""
    """Path of the tokenizer.json; empty if unknown."""
    num_tokens: int = 0
    """Tokens of this part of the dataset."""
    num_left_out: int = 0
    """Tokens of no sample: what was cut off, and documents of one sentence."""

    @property
    def about(self) -> str:
        """Tokens and remainder, for the console."""
        return f"pairs of {self.num_tokens:,} tokens, {self.num_left_out:,} left out"

    @property
    def fields(self) -> dict[str, Field]:
        """`tokens`: the sentences' ids; `sentences`: the number of each one's sentence, from 0.

        Both are padded at the end, `sentences` with -1. Special tokens are not in them.
        """
        field = Field(torch.int64, (self.sequence_length - NUM_SPECIAL,))
        return {"tokens": field, "sentences": field}
