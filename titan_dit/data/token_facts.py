"""Facts of a dataset of token windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from titan_dit.data.base import DataFacts, Field


@dataclass(frozen=True, kw_only=True)
class TokenFacts(DataFacts):
    """Windows of `sequence_length` + 1 token ids."""

    sequence_length: int
    vocabulary: int
    """Ids are below it."""
    end_of_document: int | None = None
    bytes_per_token: float | None = None
    """Of the text that the tokens are of, on average."""
    tokenizer: str = ""
    """Path of the tokenizer.json; empty if unknown."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The tensor of a sample."""
        return {"tokens": Field(torch.int64, (self.sequence_length + 1,))}
