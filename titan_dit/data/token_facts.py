"""Metadata of a dataset of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from titan_dit.data.base import DataFacts, Field


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
