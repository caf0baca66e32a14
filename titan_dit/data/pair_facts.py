"""Facts of a dataset of consecutive sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from titan_dit.data.base import DataFacts, Field

NUM_SPECIAL = 3
"""[CLS] A [SEP] B [SEP]."""


@dataclass(frozen=True, kw_only=True)
class PairFacts(DataFacts):
    """Two or more consecutive sentences of a document, to be cut into two spans."""

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

    @property
    def fields(self) -> Mapping[str, Field]:
        """`tokens`: the sentences' ids; `sentences`: the number of each one's sentence, from 0.

        Both are padded at the end, `sentences` with -1. Special tokens are not in them.
        """
        size = self.sequence_length - NUM_SPECIAL
        field = Field(torch.int64, (size,))
        return {"tokens": field, "sentences": field}
