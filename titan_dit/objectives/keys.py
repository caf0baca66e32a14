"""The keys of the objectives of text, without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass

from titan_dit.config.section import Section


@dataclass(frozen=True, kw_only=True)
class NextTokenKeys(Section):
    """Next-token prediction: the cross entropy of every token after the first of a window."""

    section = "objective"
    name = "next_token"

    mask_end_of_document: bool = False
    """Do not train to predict the token after the end of a document, which nothing foretells."""
