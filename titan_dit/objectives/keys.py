"""The keys of the objectives of text, without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from titan_dit.config.section import Bound, NonNegativeInt, Section


@dataclass(frozen=True, kw_only=True)
class NextTokenKeys(Section):
    """Next-token prediction: the cross entropy of every token after the first of a window."""

    section = "objective"
    name = "next_token"

    mask_end_of_document: bool = False
    """Do not train to predict the token after the end of a document."""


@dataclass(frozen=True, kw_only=True)
class MaskedTokenKeys(Section):
    """BERT's objective: predict masked tokens; the defaults are BERT's."""

    section = "objective"
    name = "masked_token"

    sentence_order: bool = False
    """Second task: are the two spans of a sample in order, or swapped? Needs pairs of spans,
    [data] name = "sentence_pairs"; without it windows, [data] name = "tokens"."""
    mask_share: Annotated[float, Bound(above=0, below=1)] = 0.15
    """Share of a sample's tokens that are predicted. Of those 80% are replaced by [MASK], 10% by a
    random token, 10% stay."""
    mask_id: NonNegativeInt | None = None
    """Id of [MASK]. Unset: the data's, else the first id that the data does not use."""
