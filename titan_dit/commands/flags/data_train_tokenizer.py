"""Flags of `data train-tokenizer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan_dit.config.section import Dim, FilePath, OutputPath, PositiveInt, Section
from titan_dit.data.tokenizing.chunks import Limits

COMMAND = "data train-tokenizer"


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Train a tokenizer on text files."""

    section = COMMAND

    input: tuple[FilePath, ...]
    """Text files, as of `data tokenize`."""
    output: OutputPath
    """The tokenizer.json to write."""
    vocabulary: Dim
    """Most tokens, special ones included."""
    kind: Literal["bpe", "wordpiece"] = "bpe"
    """bpe: on bytes, as GPT-2's, with <|endoftext|>. wordpiece: as BERT's, with [PAD], [UNK],
    [CLS], [SEP], [MASK]."""
    lower: bool = False
    """Of wordpiece: convert to lower case."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of a JSON line that hold text."""
    max_document_bytes: PositiveInt = Limits.max_document_bytes
    """Longer documents are left out and listed."""
    max_ratio: PositiveInt = Limits.max_ratio
    """Refuse .gz and .xz that unpack to more than 64 MiB and more than this many times their
    size."""
